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
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

import numpy as np

from slipstream.array_types import Floats
from slipstream.cost.cluster import Cluster
from slipstream.cost.cluster_links import ClusterCost
from slipstream.cost.costs import NO_LINK, LinkTime
from slipstream.cost.counted_parts import CountedParts
from slipstream.cost.operation_counts import AttentionCall, ModelCount, OpCount, PartCount
from slipstream.cost.sharing import WAYS, Copies, Exchange
from slipstream.cost.update import Update
from slipstream.cost.work import OPS, Stage, Work
from slipstream.options import UNSHARED, Degrees
from slipstream.schedule import BACKWARDS, Action, Op


@dataclass(frozen=True)
class CountedCosts(CountedParts):
    """The costs of a counted model's stages on a cluster, on one rank of a stage, for microbatches of one size.

    Attention is FlashAttention: only the scores under the mask, recomputed in the backward, never written to memory.

    Args:
        degrees, microbatch_size, sequence_parallel: those of `Sharing`.
    """

    model: ModelCount
    cluster: Cluster
    degrees: Degrees = UNSHARED
    microbatch_size: int = 1
    sequence_parallel: bool = False

    # --- seconds -----------------------------------------------------------------------------------------------------

    def each_seconds(self, work: Work) -> Floats:
        return self._rows(lambda part: self.part_seconds(part, *work), work)

    def fixed_seconds(self, work: Work) -> Floats:
        return np.full(len(work.lengths), self.cluster.device.action_seconds)

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
        busy = np.maximum(busy, max(count.num_kernels * device.kernel_seconds, self._host_seconds(part, op)))
        return busy + exchanged

    def product_seconds(self, part: PartCount, count: OpCount, tokens: Any) -> Any:
        """Returns the time of the matrix products. Their reads and writes aren't hidden behind their arithmetic, and in
        a last wave half of the device has nothing to do: so a product of short slices, or narrow as ranks share it,
        computes for less of its time."""
        products = self.sharing.products(part, count, tokens)
        device, dtype = self.cluster.device, self.model.dtype
        computed = products.flops / device.matmul_flops(dtype)
        return computed + products.depth * device.wave_seconds(dtype) + products.num_bytes / device.bytes_per_second

    def _host_seconds(self, part: PartCount, op: Op) -> float:
        """Returns the time in which the host starts a layer's kernels; I and W share that of a backward."""
        layers = self.sharing.num_regions(part) / 2
        return layers * self.cluster.device.layer_seconds / (1 if op is Op.F else 2)

    def each_selective_replay(self, work: Work) -> Floats:
        return self._rows(lambda part: self.part_selective_replay(part, work.lengths, work.contexts), work)

    def part_selective_replay(self, part: PartCount, length: Any, context: Any) -> Any:
        """Returns the time of a part's kernels other than products and attention."""
        count = part.ops[Op.F]
        moved = self._elementwise_seconds(part, count, self.sharing.tokens(length))
        shortest = (count.num_kernels - count.num_matmuls) * self.cluster.device.kernel_seconds
        return np.maximum(moved, shortest)

    def _elementwise_seconds(self, part: PartCount, count: OpCount, tokens: Any) -> Any:
        """Returns the time of the kernels other than matrix products and attention, which only move bytes."""
        return self.sharing.kernel_bytes(part, count, tokens) / self.cluster.device.bytes_per_second

    def each_exchange(self, work: Work) -> Floats:
        seconds = partial(self.exchange_seconds, op=work.op, length=work.lengths)
        return np.stack([self._rows(partial(seconds, way), work) for way in WAYS])

    def exchange_seconds(self, way: str, part: PartCount, op: Op, length: Any) -> Any:
        """Returns the time of a part's exchanges between ranks that share work in one of the `WAYS`."""
        return sum(self._link_seconds(each) for each in WAYS[way].exchanges(self.sharing, part, op, length))

    def _link_seconds(self, each: Exchange) -> Any:
        seconds = self.cluster.all_reduce_seconds if each.is_sum else self.cluster.all_to_all_seconds
        return each.times * seconds(each.num_bytes, each.num_ranks, each.stride)

    def attention_seconds(self, call: AttentionCall, op: Op, length: Any, context: Any) -> Any:
        """Returns the time of an attention call's scores in F, I or W, without the projections around it; and, in
        proportion to the context, of adding the gradients of its keys and values to those that are there."""
        if op is Op.W or (op is Op.I and not call.has_gradient):
            return 0.0
        device = self.cluster.device
        operations = self.sharing.score_operations(call, op, length, context)
        rate = device.attention_flops(self.model.dtype, self.microbatch_size * self.sharing.queries(length))
        computed = operations / rate
        if op is Op.F:
            return computed
        read = call.window.context_keys(context)
        numbers = self.microbatch_size * read * self.sharing.key_heads(call) * (call.key_width + call.value_width)
        # a kernel writes them; then they are read, and the sums in float32 are read and written
        return computed + numbers * (2 * self.model.dtype_bytes + 2 * 4) / device.bytes_per_second

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

    def gathering_seconds(self, num_bytes: float, copies: Copies) -> float:
        return float(self.cluster.exchange_seconds(num_bytes, *copies))

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
