"""From counted operations and a cluster's description to seconds and bytes: costs for hardware that isn't here.

A slice of n tokens (all sequences of the microbatch together) after a context takes, on one of t tensor-parallel ranks:

    matrix products   max(FLOPs / t / rate(n), bytes / t / bandwidth)      weights are read however short the slice
    other kernels     bytes / bandwidth                                    as wide as the hidden state: on every rank
    attention         FLOPs of the scores under the mask / t / rate        see `AttentionKernel`
    all-reduces       two a layer forward, two backward                    Megatron's g and f (PTD-P section 2.3)

but no less than the number of its kernels times the shortest time of one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from slipstream.errors import SlipstreamError
from slipstream.planner.costs.cluster import Cluster, LinkKind
from slipstream.planner.costs.operation_counts import AttentionCall, ModelCount, PartCount
from slipstream.schedule import Action, Op
from slipstream.simulator import TableCost


class AttentionKernel(StrEnum):
    """How attention is computed."""

    FUSED = "fused"  # FlashAttention: the scores under the mask, computed again in backward, never in memory
    UNFUSED = "unfused"  # every score of slice by context, masked ones too, written to memory: before FlashAttention


# How often the scores are read or written without a fused kernel. Forward: product, softmax (2), dropout (2), product.
# Backward: dP (2), dropout (2), softmax (3), dQ, dK. Kept: the softmax, its dropped copy, and the mask at a byte each.
_SCORE_PASSES = {Op.F: 6, Op.I: 9}


@dataclass(frozen=True)
class StateBytes:
    """Bytes per parameter of what training keeps. bfloat16 trains with a float32 master weight and two moments."""

    weights: float
    gradients: float
    optimizer: float

    @classmethod
    def of(cls, dtype: str) -> StateBytes:
        return cls(4, 4, 8) if dtype == "float32" else cls(2, 4, 12)


@dataclass(frozen=True)
class ClusterCost(TableCost):
    """A TableCost whose messages take the links between the ranks' devices, and as many at once as there are.

    Rank r of the pipeline is on the devices r · stride .. (tensor-parallel ranks next to each other, then
    data-parallel ones). With `scattered` each tensor-parallel rank sends its part only, and the other node's ranks
    gather it (PTD-P section 4.1); otherwise each sends all of it.
    """

    cluster: Cluster | None = None
    stride: int = 1
    tensor_parallel: int = 1
    scattered: bool = True

    def link_seconds(self, send: Action, source: int, destination: int) -> float:
        return self._between(source, destination).latency + self.link_occupied(send, source, destination)

    def link_occupied(self, send: Action, source: int, destination: int) -> float:
        assert self.cluster is not None
        parts = self.tensor_parallel if self.scattered else 1
        senders = min(self.stride, self.cluster.devices_per_node)
        sent = self.message_bytes[send.slice] / parts
        gathered = (parts - 1) * sent / self.cluster.inside.rate()
        return sent / self._between(source, destination).rate(senders) + gathered

    def _between(self, source: int, destination: int) -> LinkKind:
        assert self.cluster is not None
        size = self.cluster.devices_per_node
        same_node = source * self.stride // size == destination * self.stride // size
        return self.cluster.inside if same_node else self.cluster.between


@dataclass(frozen=True)
class AnalyticCosts:
    """Costs of a counted model's stages on a cluster.

    Args:
        tensor_parallel: ranks that share every layer, next to each other.
        microbatch_size: sequences of a microbatch.
        attention: see `AttentionKernel`.
        state: bytes per parameter. Default: gradients and AdamW's two moments are in the parameters' dtype.
    """

    model: ModelCount
    cluster: Cluster
    tensor_parallel: int = 1
    microbatch_size: int = 1
    attention: AttentionKernel = AttentionKernel.FUSED
    state: StateBytes | None = None

    def __post_init__(self) -> None:
        if self.tensor_parallel < 1 or self.microbatch_size < 1:
            raise SlipstreamError(
                f"tensor_parallel={self.tensor_parallel}, microbatch_size={self.microbatch_size}: both are 1 or more."
            )
        heads = {call.num_heads for part in self.model.layers for call in part.attentions}
        for num_heads in heads:
            if num_heads % self.tensor_parallel:
                raise SlipstreamError(
                    f"tensor_parallel={self.tensor_parallel} doesn't divide the model's {num_heads} attention heads: "
                    f"use one of {', '.join(str(n) for n in range(1, num_heads + 1) if num_heads % n == 0)}."
                )

    # --- seconds -----------------------------------------------------------------------------------------------------

    def seconds(self, layers: range, op: Op, length: Any, context: Any) -> Any:
        """Of one op on the stage with these layers; ints or integer arrays. B is I and W, R is F."""
        parts = self.model.counted(layers)
        return sum(number * self.part_seconds(part, op, length, context) for number, part in parts)

    def part_seconds(self, part: PartCount, op: Op, length: Any, context: Any) -> Any:
        """The same of one part."""
        if op is Op.B:
            ops = (Op.I, Op.W)
            return sum(self.part_seconds(part, each, length, context) for each in ops)
        op = Op.F if op is Op.R else op
        device, tokens, count = self.cluster.device, self.microbatch_size * length, part.ops[op]
        rate, share = device.bytes_per_second, self.tensor_parallel
        products = np.maximum(
            count.flops.at(tokens) / share / device.matmul_flops(self.model.dtype, tokens),
            count.matmul_bytes.at(tokens) / share / rate,
        )
        wide = count.wide_bytes.per_token * tokens + count.wide_bytes.constant / share
        moved = (wide + count.other_bytes.at(tokens) / share) / rate
        scores = sum(self._attention_seconds(call, op, length, context) for call in part.attentions)
        busy = np.maximum(products + moved + scores, count.num_kernels * device.kernel_seconds)
        return busy + self.reduce_seconds(part, op, length)

    def replay_seconds(self, layers: range, recompute: str, length: Any, context: Any) -> Any:
        """Of R: all of F, or with "selective" its kernels other than matrix products and attention."""
        if recompute != "selective":
            return self.seconds(layers, Op.F, length, context)
        tokens, share = self.microbatch_size * length, self.tensor_parallel
        total: Any = 0.0
        for number, part in self.model.counted(layers):
            count = part.ops[Op.F]
            wide = count.wide_bytes.per_token * tokens + count.wide_bytes.constant / share
            moved = (wide + count.other_bytes.at(tokens) / share) / self.cluster.device.bytes_per_second
            shortest = (count.num_kernels - count.num_matmuls) * self.cluster.device.kernel_seconds
            total = total + number * np.maximum(moved, shortest)
        return total

    def reduce_seconds(self, part: PartCount, op: Op, length: Any) -> Any:
        """Of the all-reduces between tensor-parallel ranks: of a layer's two outputs, and of its two gradients."""
        in_layer = 2 if part.attentions else 0
        times = {Op.F: in_layer or int(part is self.model.embedding), Op.I: in_layer or int(part is self.model.head)}
        return times.get(op, 0) * self.cluster.all_reduce_seconds(self.message_bytes(length), self.tensor_parallel)

    def _attention_seconds(self, call: AttentionCall, op: Op, length: Any, context: Any) -> Any:
        if op is Op.W:
            return 0.0
        device, heads = self.cluster.device, call.num_heads / self.tensor_parallel
        scores = heads * self._num_scores(call, length, context)
        keys, values = call.key_width, call.value_width
        if self.attention is AttentionKernel.FUSED:
            width = keys + values if op is Op.F else 3 * keys + 2 * values  # backward: S, dP, dV, dQ, dK
        else:
            width = (keys + values) * (1 if op is Op.F else 2)  # backward: dP, dV, dQ, dK
        seconds = 2 * scores * width / (device.flops[self.model.dtype] * device.attention_efficiency)
        if self.attention is AttentionKernel.UNFUSED:
            seconds = seconds + _SCORE_PASSES[op] * scores * self.model.dtype_bytes / device.bytes_per_second
        return seconds

    def _num_scores(self, call: AttentionCall, length: Any, context: Any) -> Any:
        """Of one head, for all sequences of the microbatch."""
        if self.attention is AttentionKernel.UNFUSED:
            return self.microbatch_size * length * (context + length)
        return self.microbatch_size * (call.window.scores(context + length) - call.window.scores(context))

    def optimizer_seconds(self, layers: range, shards: int = 1) -> float:
        """An AdamW step: parameters and its state read and written, gradients read."""
        written = self.parameter_bytes(layers) + self.optimizer_bytes(layers, shards)
        return (2 * written + self.gradient_bytes(layers)) / self.cluster.device.bytes_per_second

    def gradient_seconds(self, layers: range, data_parallel: int) -> float:
        """The all-reduce of a stage's gradients between the replicas, whose ranks are tensor_parallel apart."""
        found: float = self.cluster.all_reduce_seconds(
            self.gradient_bytes(layers), data_parallel, stride=self.tensor_parallel
        )
        return found

    # --- bytes of one rank -------------------------------------------------------------------------------------------

    def parameter_bytes(self, layers: range) -> float:
        """Parameters of a stage on one of its tensor-parallel ranks."""
        return self._state.weights * self.num_parameters(layers)

    def num_parameters(self, layers: range) -> float:
        """How many these are."""
        return sum(number * part.num_parameters for number, part in self.model.counted(layers)) / self.tensor_parallel

    def gradient_bytes(self, layers: range) -> float:
        """Their gradients."""
        return self._state.gradients * self.num_parameters(layers)

    def optimizer_bytes(self, layers: range, shards: int = 1) -> float:
        """AdamW's state, of which each of `shards` replicas keeps its part."""
        return self._state.optimizer * self.num_parameters(layers) / shards

    @property
    def _state(self) -> StateBytes:
        size = self.model.dtype_bytes
        return self.state or StateBytes(size, size, 2 * size)

    def activation_bytes(self, layers: range, length: int, context: int = 0) -> float:
        """What a slice's F leaves for its backward, keys and values aside.

        Tensors as wide as the hidden state are on every tensor-parallel rank; what is inside the layer is divided.
        """
        total = 0.0
        for number, part in self.model.counted(layers):
            wide = min(
                2.0 * self.model.hidden_size * self.model.dtype_bytes, part.activation_bytes
            )  # both norms' inputs
            per_token = wide + (part.activation_bytes - wide) / self.tensor_parallel
            total += number * self.microbatch_size * length * per_token
            if self.attention is AttentionKernel.UNFUSED:
                scores = sum(c.num_heads * self._num_scores(c, length, context) for c in part.attentions)
                total += number * (2 * self.model.dtype_bytes + 1) * scores / self.tensor_parallel
        return total

    def kept_bytes(self, layers: range, recompute: str, length: int) -> float:
        """What F leaves of it until R: the stage's input, which for the first stage are tokens; with "selective" also
        the outputs of matrix products and attention."""
        kept = float(self.message_bytes(length)) if layers.start else 0.0
        if recompute == "selective":
            products = sum(number * part.product_bytes for number, part in self.model.counted(layers))
            kept += self.microbatch_size * length * products / self.tensor_parallel
        return kept

    def context_bytes(self, layers: range, length: int) -> float:
        """Keys and values of `length` tokens."""
        per_token = sum(number * part.context_bytes for number, part in self.model.counted(layers))
        return self.microbatch_size * length * per_token / self.tensor_parallel

    def logits_gradient_bytes(self, layers: range, length: int) -> float:
        """Of a slice's logits, in float32, on the stage with the head; the vocabulary is divided."""
        if layers.stop < len(self.model.kinds):
            return 0.0
        vocabulary = self.model.head_weight / self.model.hidden_size
        return 4 * self.microbatch_size * length * vocabulary / self.tensor_parallel

    def message_bytes(self, length: Any) -> Any:
        """What a slice sends to the next stage, b T h, and its gradient back."""
        return self.microbatch_size * length * self.model.hidden_size * self.model.dtype_bytes

    # --- a pipeline --------------------------------------------------------------------------------------------------

    def cost(
        self, partition: Sequence[int], slices: Sequence[int], *, data_parallel: int = 1, scattered: bool = True
    ) -> ClusterCost:
        """The simulator's costs of a pipeline with these layers per stage and tokens per slice.

        Raises SlipstreamError where they don't add up to the model's layers, or no slice has tokens.
        """
        stages = self.stages_of(partition)
        if min(slices, default=0) < 1:
            raise SlipstreamError(f"slices={list(slices)}: give at least one, each of 1 token or more.")
        pieces = list(enumerate(zip(slices, accumulate(slices, initial=0), strict=False)))
        times: dict[tuple[int, int, Op], float] = {}
        activations: dict[tuple[int, int], float] = {}
        for g, layers in enumerate(stages):
            for s, (length, context) in pieces:
                found = {op: float(self.seconds(layers, op, length, context)) for op in (Op.F, Op.I, Op.W)}
                found |= {Op.R: found[Op.F], Op.B: found[Op.I] + found[Op.W]}
                times |= {(g, s, op): seconds for op, seconds in found.items()}
                activations[g, s] = self.activation_bytes(layers, length, context)
        return ClusterCost(
            times=times,
            message_bytes=[self.message_bytes(length) for length in slices],
            activations=activations,
            kept={
                (g, s): self.kept_bytes(layers, "full", n) for g, layers in enumerate(stages) for s, (n, _) in pieces
            },
            cluster=self.cluster,
            stride=self.tensor_parallel * data_parallel,
            tensor_parallel=self.tensor_parallel,
            scattered=scattered,
        )

    def stages_of(self, partition: Sequence[int]) -> tuple[range, ...]:
        """The layers of every stage; SlipstreamError where they are not the model's."""
        if min(partition, default=0) < 1 or sum(partition) != len(self.model.kinds):
            raise SlipstreamError(
                f"partition={list(partition)} has {sum(partition)} layers; give every stage at least one, and the "
                f"model's {len(self.model.kinds)} in all."
            )
        return tuple(range(a, b) for a, b in pairwise(accumulate(partition, initial=0)))
