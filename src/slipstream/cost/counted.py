"""The costs of stages on described hardware, computed from counted operations: no device is needed.

They are a device's speeds times the amounts of one rank, which `slipstream.cost.sharing` says. A slice of n tokens (all
sequences of the microbatch together) after a context takes, of a rank's own products, bytes and heads:

    matrix products   FLOPs / rate + bytes / bandwidth
                      + half a last wave of tiles
    other kernels     bytes / bandwidth
    attention         FLOPs of the scores under the mask / rate(n)         a fused kernel: scores aren't written
                      bytes of the context's gradients / bandwidth         of keys and values, added in the backward
    exchanges         of ranks that share work

but at least the number of its kernels times the shortest time of one, and as long as the host takes to start them. Each
action of a stage adds the device's `action_seconds`, so that many short slices cost more than few long ones.

Where training systems differ, these costs ask the `System` (`slipstream.cost.system`) that runs the step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import product
from math import ceil
from typing import Any

import numpy as np

from slipstream.array_types import Floats
from slipstream.cost.cluster import Cluster
from slipstream.cost.cluster_links import ClusterCost
from slipstream.cost.costs import NO_LINK, LinkTime
from slipstream.cost.counted_parts import CountedParts
from slipstream.cost.operation_counts import AttentionCall, ModelCount, OpCount, PartCount
from slipstream.cost.sharing import WAYS, Copies, Exchange
from slipstream.cost.system import SLIPSTREAM, System
from slipstream.cost.update import Update
from slipstream.cost.work import OPS, Stage, Work
from slipstream.options import UNSHARED, Degrees
from slipstream.schedule import BACKWARDS, Action, Op

# How often kernels read or write scores that are written to memory. Forward: product, softmax (2), dropout (2),
# product. Backward: dP (2), dropout (2), softmax (3), dQ, dK.
_SCORE_PASSES = {Op.F: 6, Op.I: 9}
# Of each step of a ring of ranks in several nodes, beside the bytes that it sends: all wait for the slowest link.
# By InternEvo's steps on 16 to 1,024 A100, after these were seen (docs/papers.md).
_RING_STEP_SECONDS = 5e-5
_SCORE_BYTES = 2.5  # elements that such a score keeps: of softmax, of dropout, and half a one for its mask


@dataclass(frozen=True)
class CountedCosts(CountedParts):
    """The costs of a counted model's stages on a cluster, on one rank of a stage, for microbatches of one size.

    Attention is FlashAttention, but in systems that write scores to memory: only the scores under the mask, recomputed
    in the backward.

    Args:
        model: counted with the kernels of the system (`System.counted`).
        degrees, microbatch_size, sequence_parallel: those of `Sharing`.
        system: that runs the step.
    """

    model: ModelCount
    cluster: Cluster
    degrees: Degrees = UNSHARED
    microbatch_size: int = 1
    sequence_parallel: bool = False
    system: System = SLIPSTREAM

    # --- seconds -----------------------------------------------------------------------------------------------------

    def each_seconds(self, work: Work) -> Floats:
        return self._rows(lambda part: self.part_seconds(part, *work), work)

    def fixed_seconds(self, work: Work) -> Floats:
        takes_none = work.op is Op.R and self.system.replays_in_backward
        return np.full(len(work.lengths), 0.0 if takes_none else self.cluster.device.action_seconds)

    def part_seconds(self, part: PartCount, op: Op, length: Any, context: Any) -> Any:
        """Returns the seconds of one op of one part of the model; B is I and W, R is F."""
        if op in BACKWARDS and not part.has_backward:
            return 0.0
        if op is Op.B:
            return sum(self.part_seconds(part, half, length, context) for half in (Op.I, Op.W))
        exchanged = sum(self.exchange_seconds(way, part, op, length) for way in WAYS)
        op = Op.F if op is Op.R else op
        device = self.cluster.device
        tokens = self.sharing.tokens(length)
        count = part.ops[op]
        scores = sum(self.attention_seconds(call, op, length, context) for call in part.attentions)
        busy = self.product_seconds(part, count, tokens) + self._elementwise_seconds(part, count, tokens) + scores
        host = self._host_seconds(part, op)
        busy = np.maximum(busy, max(count.num_kernels * device.kernel_seconds, host))
        if not self.system.runs_ahead:
            busy = busy + (host if op is Op.F else host / 2)
        return self._with_experts(part, op, length, busy + exchanged)

    def _with_experts(self, part: PartCount, op: Op, length: Any, seconds: Any) -> Any:
        """Returns the seconds of F, I or W of a part, as its experts run: without the exchanges that are hidden, and as
        long as the host takes to start the kernels. I and W are half a backward each."""
        runs = self.system.experts
        if not part.experts_per_token:
            return seconds
        passes = 1.0 if op is Op.F else 1 / 2
        if runs.beside_passes:
            exchange = self.exchange_seconds("experts", part, Op.F, length)
            seconds = np.maximum(seconds - (0 if op is Op.W else exchange), passes * exchange)
        launches = runs.launches + runs.launches_of_expert * part.num_experts / self.degrees.experts
        return np.maximum(seconds, passes * launches) if launches else seconds

    def product_seconds(self, part: PartCount, count: OpCount, tokens: Any) -> Any:
        """Returns the time of the matrix products. Their reads and writes aren't hidden behind their arithmetic, and in
        a last wave half of the device has nothing to do: so a product of short slices, or narrow as ranks share it,
        computes for less of its time."""
        products = self.sharing.products(part, count, tokens)
        device, dtype = self.cluster.device, self.model.dtype
        unaligned = products.unaligned_flops * (1 / device.unaligned_rate - 1)
        computed = (products.flops + unaligned) / device.matmul_flops(dtype)
        if self.system.experts.part_of_tile and count is not part.ops[Op.W]:
            rows = 2 * self.system.experts.part_of_tile * part.num_in_experts / self.degrees.experts
            computed = computed + rows / (device.matmul_flops(dtype) * self.system.product_rate(dtype, device))
        return computed + products.depth * device.wave_seconds(dtype) + products.num_bytes / device.bytes_per_second

    def _host_seconds(self, part: PartCount, op: Op) -> float:
        """Returns the time in which the host starts a layer's kernels; I and W share that of a backward."""
        layers = self.sharing.num_regions(part) / 2
        return layers * self.cluster.device.layer_seconds / (1 if op is Op.F else 2)

    def each_selective_replay(self, work: Work) -> Floats:
        return self._rows(lambda part: self.part_selective_replay(part, work.lengths, work.contexts), work)

    def part_selective_replay(self, part: PartCount, length: Any, context: Any) -> Any:
        """Returns the time of a part's kernels other than products and attention, or of what else the system
        repeats."""
        what = self.system.selective
        scores = 0.0
        if what != "kernels":
            scores = sum(self.attention_seconds(call, Op.F, length, context) for call in part.attentions)
        if what == "scores":
            return scores
        count = part.ops[Op.F]
        moved = self._elementwise_seconds(part, count, self.sharing.tokens(length))
        shortest = (count.num_kernels - count.num_matmuls) * self.cluster.device.kernel_seconds
        kernels = np.maximum(moved, shortest)
        if what == "kernels":
            return kernels
        return kernels + (self.part_seconds(part, Op.F, length, context) - scores - kernels) / 2

    def _elementwise_seconds(self, part: PartCount, count: OpCount, tokens: Any) -> Any:
        """Returns the time of the kernels other than matrix products and attention, which only move bytes."""
        return self.sharing.kernel_bytes(part, count, tokens) / self.cluster.device.bytes_per_second

    def each_exchange(self, work: Work) -> Floats:
        seconds = partial(self.exchange_seconds, op=work.op, length=work.lengths)
        return np.stack([self._rows(partial(seconds, way), work) for way in WAYS])

    def exchange_seconds(self, way: str, part: PartCount, op: Op, length: Any) -> Any:
        """Returns the time of a part's exchanges between ranks that share work in one of the `WAYS`."""
        if way == "experts" and self.system.experts.sends == "devices":
            return self._token_seconds(part, length) if op in (Op.F, Op.R, Op.I) else 0.0
        whole = sum(self._link_seconds(each) for each in WAYS[way].exchanges(self.sharing, part, op, length))
        return self._exposed_seconds(part, op, length, whole) if way == "tensor" and part.attentions else whole

    def _exposed_seconds(self, part: PartCount, op: Op, length: Any, whole: Any) -> Any:
        """Returns what isn't hidden of the exchanges of tensor-parallel ranks.

        Beside the products around them, it is the first of as many pieces as there are ranks, and what takes longer
        than the products. Beside those of a weight's gradient, the sums of its input's gradients are hidden; where
        ranks share tokens, the gathering of its output's gradients, half of it all, comes before.
        """
        beside = self.system.tensor_beside
        tokens = self.sharing.tokens(length)
        if beside == "products":
            products = self.product_seconds(part, part.ops[Op.F if op is Op.R else op], tokens)
            return np.maximum(whole / self.degrees.tensor, whole - products)
        if beside == "weights" and op is Op.I:
            ahead = whole / 2 if self.sequence_parallel else 0.0
            return ahead + np.maximum(0.0, whole - ahead - self.product_seconds(part, part.ops[Op.W], tokens))
        return whole

    def _token_seconds(self, part: PartCount, length: Any) -> Any:
        """Returns the time of exchanges that send a token once to every device that has some of its experts, and once
        to every node, whose devices pass it on: of k experts on n devices it is n (1 - (1 - 1/n)^k) of them."""
        size = self.degrees.experts
        if not part.experts_per_token or size == 1:
            return 0.0
        cluster = self.cluster
        num_nodes = max(1, size * self.degrees.tensor // cluster.devices_per_domain)
        reached = [n * (1 - (1 - 1 / n) ** part.experts_per_token) for n in (size, num_nodes)]
        token = self.sharing.tokens(length) * self.model.hidden_size * self.model.dtype_bytes / self.degrees.tensor
        inside = token * reached[0] / cluster.inside.rate() * (1 - 1 / size)
        across = token * reached[1] / cluster.between.rate(cluster.devices_per_node) * (1 - 1 / num_nodes)
        return 2 * (cluster.between.latency * (num_nodes > 1) + np.maximum(inside, across))

    def _link_seconds(self, each: Exchange) -> Any:
        seconds = self.cluster.all_reduce_seconds if each.is_sum else self.cluster.all_to_all_seconds
        return each.times * seconds(each.num_bytes, each.num_ranks, each.stride)

    def attention_seconds(self, call: AttentionCall, op: Op, length: Any, context: Any) -> Any:
        """Returns the time of an attention call's scores in F, I or W, without the projections around it; and, in
        proportion to the context, of adding the gradients of its keys and values to those that are there."""
        if op is Op.W or (op is Op.I and not call.has_gradient):
            return 0.0
        device = self.cluster.device
        if self.system.writes_scores:
            return self._written_score_seconds(call, op, length, context)
        operations = self.sharing.score_operations(call, op, length, context)
        rate = device.attention_flops(self.model.dtype, self.microbatch_size * self.sharing.queries(length))
        computed = self._attention_factor * operations / rate
        if op is Op.F:
            return computed
        read = call.window.context_keys(context)
        numbers = self.microbatch_size * read * self.sharing.key_heads(call) * (call.key_width + call.value_width)
        # a kernel writes them; then they are read, and the sums in float32 are read and written
        return computed + numbers * (2 * self.model.dtype_bytes + 2 * 4) / device.bytes_per_second

    def each_activation(self, lengths: Any) -> Floats:
        kept = super().each_activation(lengths)
        if not self.system.writes_scores:
            return kept
        # Those of a slice without context: of a whole sequence.
        heads = self._each(lambda part: sum(call.num_heads for call in part.attentions))
        scores = np.outer(heads / self.degrees.tensor * self.microbatch_size, np.square(lengths))
        return kept + _SCORE_BYTES * self.model.dtype_bytes * scores

    def _written_score_seconds(self, call: AttentionCall, op: Op, length: Any, context: Any) -> Any:
        """Returns the time of attention that computes all scores, masked ones too, and writes them to memory."""
        device = self.cluster.device
        heads = call.num_heads / self.degrees.tensor
        scores = heads * (self.microbatch_size * length * (context + length))
        width = (call.key_width + call.value_width) * (1 if op is Op.F else 2)  # backward: dP, dV, dQ, dK
        computed = 2 * scores * width / (device.flops[self.model.dtype] * device.attention_efficiency)
        return computed + _SCORE_PASSES[op] * scores * self.model.dtype_bytes / device.bytes_per_second

    @property
    def _attention_factor(self) -> float:
        """The time of attention's kernel over that of the described one. In 8 bits its products, whose share of the
        time is the efficiency, take half."""
        narrow = self.cluster.device.attention_efficiency if self.system.attention_bits == 8 else 0.0
        return self.system.attention_time * (1 - narrow / 2)

    @property
    def deserves_table(self) -> bool:
        return True

    @property
    def whole_is_least(self) -> bool:
        # Where keys are gathered, slices make the last rank's attention less uneven.
        return not self.sharing.gathers_keys

    def least_seconds(self, length: int) -> float:
        seconds = {op: float(self.seconds(self.model.whole, op, length, 0)) for op in OPS}
        work = seconds[Op.F] + min(seconds[Op.B], seconds[Op.I] + seconds[Op.W])
        return max(0.0, work - self.uneven_seconds(self.model.whole, length))

    def uneven_seconds(self, layers: Stage, length: int) -> float:
        """Returns by how much longer than on average a whole sequence's attention takes on the rank with the last
        queries, forward and backward; 0 unless keys are gathered."""
        if not self.sharing.gathers_keys:
            return 0.0
        even = replace(self, degrees=self.sharing.even)
        total = 0.0
        for count, part in self.model.counted(layers):
            for call, op in product(part.attentions, (Op.F, Op.I)):
                seconds = [costs.attention_seconds(call, op, length, 0) for costs in (self, even)]
                total += count * max(0.0, float(seconds[0] - seconds[1]))
        return total

    # --- replicas ----------------------------------------------------------------------------------------------------

    def gathering_seconds(self, num_bytes: float, copies: Copies) -> float:
        seconds = float(self.cluster.exchange_seconds(num_bytes, *copies))
        if not self.cluster.leaves_domain(*copies):
            return seconds
        num_exchanges = max(1, ceil(num_bytes / max(self.system.replicas.bucket_bytes, self._tensor_bytes)))
        return seconds + num_exchanges * (copies.num_ranks - 1) * _RING_STEP_SECONDS

    @cached_property
    def _tensor_bytes(self) -> float:
        """The bytes of a layer's trained tensor on one rank, on average."""
        layers = [self.model.layers[kind] for kind in self.model.kinds]
        num_tensors = sum(part.num_trained_tensors for part in layers)
        num_trained = sum(map(self.sharing.num_trained, layers))
        return self.model.dtype_bytes * num_trained / num_tensors if num_tensors else 0.0

    def update_seconds(self, update: Update, trained: float, optimized: float) -> float:
        return update.moved_bytes(trained, optimized) / self.cluster.device.bytes_per_second

    def link(self, num_ranks: int, replicas: int = 1) -> LinkTime:
        """Returns the slowest link between neighbours of a pipeline with so many replicas, and the bandwidth at which
        it carries a token's message."""
        if num_ranks == 1:
            return NO_LINK
        cost = self.action_costs({}, [1], replicas)
        seconds = partial(cost.link_seconds, Action(Op.SEND_F, 0, 0, 0))
        occupied = partial(cost.link_occupied, Action(Op.SEND_F, 0, 0, 0))
        neighbours = ((rank, (rank + 1) % num_ranks) for rank in range(num_ranks))
        slowest = max(neighbours, key=lambda pair: seconds(*pair))
        busy = occupied(*slowest)
        return LinkTime(seconds(*slowest) - busy, float(self.message_bytes(1)) / busy)

    def action_costs(
        self, times: Mapping[tuple[int, int, Op], float], slices: Sequence[int], data_parallel: int = 1
    ) -> ClusterCost:
        """Returns the simulator's costs with the given times by (stage, slice, op) and the links' times of messages."""
        return ClusterCost(
            times=times,
            message_bytes=[float(self.message_bytes(length)) for length in slices],
            cluster=self.cluster,
            stride=self.degrees.num_shared * data_parallel,
            num_parts=self.divided.message_parts,
        )
