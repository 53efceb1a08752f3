"""The costs of stages on described hardware, computed from counted operations: no device is needed.

A slice of n tokens (all sequences of the microbatch together) after a context takes, on one of t tensor-parallel ranks:

    matrix products   FLOPs / t / rate + bytes / bandwidth                 of each one side is as wide as the hidden
                      + half a last wave of tiles                          state, on every rank; all else is 1/t
    other kernels     bytes / bandwidth                                    as wide as the hidden state: on every rank
    attention         FLOPs of the scores under the mask / t / rate(n)     a fused kernel: scores aren't written
                      bytes of the context's gradients / bandwidth         of keys and values, added in the backward
    all-reduces       two a layer forward, two backward                    Megatron's g and f (PTD-P section 2.3)
    all-to-alls       of context and of expert parallelism, below

but at least the number of its kernels times the shortest time of one, and as long as the host takes to start them. Each
action of a stage adds the device's `action_seconds`, so that many short slices cost more than few long ones.

Of g context-parallel ranks each has n/g tokens of everything but attention, and in attention Hq/(t g) heads of all n:
two all-to-alls a layer, forward and backward, take queries, keys and values there, and the outputs back. Or keys and
values of all n are gathered, and their gradients reduced and scattered; the last rank's n/g queries see most. Of e
expert-parallel ranks each has 1/e of the experts; two all-to-alls take a row for every expert that a token chose there,
and the results back. Tokens are taken to choose all experts alike, so that a rank computes as many rows as it sends.
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
from slipstream.cost.operation_counts import Amount, AttentionCall, ModelCount, OpCount, PartCount, StateBytes
from slipstream.cost.work import Stage, Work
from slipstream.options import UNSHARED, Degrees
from slipstream.schedule import BACKWARDS, Action, Op


@dataclass(frozen=True)
class CountedCosts(CountedParts):
    """The costs of a counted model's stages on a cluster, on one rank of a stage, for microbatches of one size.

    Attention is FlashAttention: only the scores under the mask, recomputed in the backward, never written to memory.

    Args:
        degrees: by how many ranks a stage's work is shared. Those that share every layer are next to each other, and
            their number divides the attention heads; without expert parallelism they share each expert, too.
        microbatch_size: sequences of a microbatch.
        sequence_parallel: whether tensor-parallel ranks share the tokens of tensors that all would else compute and
            keep: norms, residuals (Korthikanti et al. 2022). Inputs of matrix products are gathered and kept whole.
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
        exchanged = sum(self._part_exchanges(part, op, length))
        op = Op.F if op is Op.R else op
        device, tokens, count = self.cluster.device, self._tokens(length), part.ops[op]
        scores = sum(self.attention_seconds(call, op, length, context) for call in part.attentions)
        busy = self.product_seconds(part, count, tokens) + self._elementwise_seconds(part, count, tokens) + scores
        busy = np.maximum(busy, max(count.num_kernels * device.kernel_seconds, self._host_seconds(part, op)))
        return busy + exchanged

    def _moved_bytes(self, part: PartCount, amount: Amount, tokens: Any) -> Any:
        # The bytes that don't grow with the tokens are of weights.
        return amount.per_token * tokens / self.degrees.tensor + amount.constant * self._weights_share(part)

    def _weights_share(self, part: PartCount) -> float:
        return self.degrees.held(part.num_parameters, part.num_in_experts) / max(1, part.num_parameters)

    def product_seconds(self, part: PartCount, count: OpCount, tokens: Any) -> Any:
        """Returns the time of the matrix products. Their reads and writes aren't hidden behind their arithmetic, and in
        a last wave half of the device has nothing to do: so a product of short slices, or narrow as t ranks share it,
        computes for less of its time."""
        read = count.matmul_bytes
        whole = min(count.num_matmuls * self.model.hidden_size * self.model.dtype_bytes, read.per_token)
        shared = (read.per_token - whole) * tokens / self.degrees.tensor + read.constant * self._weights_share(part)
        moved = (whole * tokens + shared) / self.cluster.device.bytes_per_second
        device, dtype = self.cluster.device, self.model.dtype
        # of products over shared dimensions, each adds up its part, but all the tokens for the gradient of a weight
        depth = count.hidden_depth.at(tokens) + count.other_depth.per_token * tokens
        depth = depth + count.other_depth.constant / self.degrees.tensor
        computed = count.flops.at(tokens) / (self.degrees.tensor * device.matmul_flops(dtype))
        return computed + depth * device.wave_seconds(dtype) + moved

    def _host_seconds(self, part: PartCount, op: Op) -> float:
        """Returns the time in which the host starts a layer's kernels; I and W share that of a backward."""
        layers = self._num_regions(part) / 2
        return layers * self.cluster.device.layer_seconds / (1 if op is Op.F else 2)

    def each_selective_replay(self, work: Work) -> Floats:
        return self._rows(lambda part: self.part_selective_replay(part, work.lengths, work.contexts), work)

    def part_selective_replay(self, part: PartCount, length: Any, context: Any) -> Any:
        """Returns the time of a part's kernels other than products and attention."""
        count = part.ops[Op.F]
        moved = self._elementwise_seconds(part, count, self._tokens(length))
        shortest = (count.num_kernels - count.num_matmuls) * self.cluster.device.kernel_seconds
        return np.maximum(moved, shortest)

    def _elementwise_seconds(self, part: PartCount, count: OpCount, tokens: Any) -> Any:
        """Returns the time of the kernels other than matrix products and attention, which only move bytes."""
        wide = count.wide_bytes.per_token * tokens / self._token_parts
        wide = wide + count.wide_bytes.constant * self._weights_share(part)
        return (wide + self._moved_bytes(part, count.other_bytes, tokens)) / self.cluster.device.bytes_per_second

    def each_exchange(self, work: Work) -> Floats:
        parts = [self._part_exchanges(part, work.op, work.lengths) for part in self.model.of_kind]
        shape = np.shape(work.lengths)
        rows = [[np.broadcast_to(np.asarray(seconds, float), shape) for seconds in exchanges] for exchanges in parts]
        return np.array(rows).swapaxes(0, 1)

    def _part_exchanges(self, part: PartCount, op: Op, length: Any) -> tuple[Any, ...]:
        reduced = self._part_reduce_seconds(part, Op.F if op is Op.R else op, length)
        if op in (Op.F, Op.R) or (op is Op.I and part.has_backward):
            return reduced, self._part_context_seconds(part, op, length), self._part_expert_seconds(part, length)
        return reduced, 0.0, 0.0

    def _part_context_seconds(self, part: PartCount, op: Op, length: Any) -> Any:
        """Returns the time of a layer's exchanges around attention: all-to-alls of queries, keys and values together,
        of which several ranks get the same heads where there are fewer, and of outputs; or one to gather keys and
        values, or sums of their gradients, which a replay finds in the context."""
        ranks, itemsize, seconds = self.degrees.context, self.model.dtype_bytes, 0.0
        for call in part.attentions if ranks > 1 else ():
            queries, keys = call.num_heads / self.degrees.tensor, ranks * self._key_heads(call)
            both = keys * (call.key_width + call.value_width)
            sent = [(queries * call.key_width + both) * itemsize, queries * call.value_width * itemsize]
            if self._gathers_keys:
                sent = [] if op is Op.R else [both * (itemsize if op is Op.F else max(4, itemsize))]
            for size in sent:
                seconds = seconds + self.cluster.all_to_all_seconds(
                    self._tokens(length) * size, ranks, self.degrees.tensor
                )
        return seconds

    def _part_expert_seconds(self, part: PartCount, length: Any) -> Any:
        """Returns the time of a layer's all-to-alls between ranks with other experts: of how many rows there are, then
        there and back of a row for each expert that a token chose. Tensor-parallel ranks send a part each."""
        if not part.experts_per_token:
            return 0.0
        rows = self._tokens(length) * part.experts_per_token / self.degrees.tensor
        sent = rows * self.model.hidden_size * self.model.dtype_bytes
        exchange = partial(self.cluster.all_to_all_seconds, size=self.degrees.experts, stride=self.degrees.tensor)
        return exchange(0.0) + 2 * exchange(sent)

    def _part_reduce_seconds(self, part: PartCount, op: Op, length: Any) -> Any:
        """Returns the time of all-reduces between tensor-parallel ranks: of a layer's two outputs or two gradients.
        Where they share tokens it is that of reduce-scatters and all-gathers, as many bytes in all."""
        in_layer = self._num_regions(part)
        times = {Op.F: in_layer or int(part is self.model.embedding)}
        times |= {Op.I: in_layer or int(part is self.model.head)} if part.has_backward else {}
        return times.get(op, 0) * self.cluster.all_reduce_seconds(self._hidden_bytes(length), self.degrees.tensor)

    def attention_seconds(self, call: AttentionCall, op: Op, length: Any, context: Any) -> Any:
        """Returns the time of an attention call's scores in F, I or W, without the projections around it; and, in
        proportion to the context, of adding the gradients of its keys and values to those that are there."""
        if op is Op.W or (op is Op.I and not call.has_gradient):
            return 0.0
        device = self.cluster.device
        operations = self.attention_operations(call, op, length, context)
        rate = device.attention_flops(self.model.dtype, self.microbatch_size * self._queries(length))
        computed = operations / rate
        if op is Op.F:
            return computed
        read = call.window.context_keys(context)
        numbers = self.microbatch_size * read * self._key_heads(call) * (call.key_width + call.value_width)
        # a kernel writes them; then they are read, and the sums in float32 are read and written
        return computed + numbers * (2 * self.model.dtype_bytes + 2 * 4) / device.bytes_per_second

    def uneven_seconds(self, layers: Stage, length: int) -> float:
        """Returns by how much longer than on average a whole sequence's attention takes on the rank with the last
        queries, forward and backward; 0 unless keys are gathered."""
        if not self._gathers_keys:
            return 0.0
        even = replace(self, degrees=self.degrees._replace(exchange="heads"))
        total = 0.0
        for count, part in self.model.counted(layers):
            for call, op in product(part.attentions, (Op.F, Op.I)):
                seconds = [costs.attention_seconds(call, op, length, 0) for costs in (self, even)]
                total += count * max(0.0, float(seconds[0] - seconds[1]))
        return total

    @property
    def gradient_bytes(self) -> float:
        return StateBytes.of(self.model.dtype).gradients

    @property
    def gathered_bytes(self) -> float:
        return StateBytes.of(self.model.dtype).weights

    def spread_seconds(self, shared: float, in_experts: float, copies: int) -> float:
        """Returns the time of exchanges between ranks that are tensor_parallel apart."""
        apart = self.degrees.tensor
        ranks = self.degrees.experts
        once = self.cluster.exchange_seconds(shared, copies, apart)
        return float(once + self.cluster.exchange_seconds(in_experts, copies // ranks, apart * ranks))

    def update_seconds(self, trained: float, optimized: float) -> float:
        """Returns the time in which AdamW reads and writes the trained parameters and its state, and reads
        gradients."""
        state = StateBytes.of(self.model.dtype)
        written = state.weights * trained + state.optimizer * optimized
        return (2 * written + state.gradients * trained) / self.cluster.device.bytes_per_second

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
            stride=self.degrees.tensor * self.degrees.context * data_parallel,
            tensor_parallel=1 if self.sequence_parallel else self.degrees.tensor,
        )
