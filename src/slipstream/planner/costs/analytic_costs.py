"""The costs of stages on described hardware, computed from counted operations: no device is needed.

A slice of n tokens (all sequences of the microbatch together) after a context takes, on one of t tensor-parallel ranks:

    matrix products   max(FLOPs / t / rate(n), bytes / t / bandwidth)      weights are read however short the slice
    other kernels     bytes / bandwidth                                    as wide as the hidden state: on every rank
    attention         FLOPs of the scores under the mask / t / rate        see `AttentionKernel`
    all-reduces       two a layer forward, two backward                    Megatron's g and f (PTD-P section 2.3)

but at least the number of its kernels times the shortest time of one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np

from slipstream.errors import SlipstreamError
from slipstream.planner.costs.cluster import Cluster, LinkKind
from slipstream.planner.costs.operation_counts import AttentionCall, ModelCount, OpCount, PartCount
from slipstream.planner.costs.stage_costs import ActionSeconds, StageCosts, StateBytes
from slipstream.schedule import Action, Op
from slipstream.simulator import TableCost


class AttentionKernel(StrEnum):
    """The kernel that computes attention."""

    FUSED = "fused"
    """FlashAttention: only the scores under the mask, recomputed in the backward, never written to memory."""
    UNFUSED = "unfused"
    """As before FlashAttention: all scores of slice by context, also masked ones, are written to memory."""


# How often an unfused kernel reads or writes the scores. Forward: product, softmax (2), dropout (2), product. Backward:
# dP (2), dropout (2), softmax (3), dQ, dK. The softmax, its copy after dropout, and the mask at a byte each are kept.
_SCORE_PASSES = {Op.F: 6, Op.I: 9}


@dataclass(frozen=True)
class ClusterCost(TableCost):
    """A TableCost whose messages take the links between the ranks' devices.

    Rank r of the pipeline is on the devices r · stride and following: tensor-parallel ranks next to each other, then
    data-parallel ones. Each tensor-parallel rank sends its part of a message, and the receiving node's ranks gather it
    (PTD-P section 4.1).
    """

    cluster: Cluster | None = None
    stride: int = 1
    tensor_parallel: int = 1

    def link_seconds(self, send: Action, source: int, destination: int) -> float:
        return self._link(source, destination).latency + self.link_occupied(send, source, destination)

    def link_occupied(self, send: Action, source: int, destination: int) -> float:
        assert self.cluster is not None
        senders = min(self.stride, self.cluster.devices_per_node)
        sent = self.message_bytes[send.slice] / self.tensor_parallel
        gathered = (self.tensor_parallel - 1) * sent / self.cluster.inside.rate()
        return sent / self._link(source, destination).rate(senders) + gathered

    def _link(self, source: int, destination: int) -> LinkKind:
        assert self.cluster is not None
        size = self.cluster.devices_per_node
        same_node = source * self.stride // size == destination * self.stride // size
        return self.cluster.inside if same_node else self.cluster.between


@dataclass(frozen=True)
class AnalyticCosts(StageCosts):
    """The costs of a counted model's stages on a cluster.

    Args:
        tensor_parallel: ranks that share every layer, next to each other.
        microbatch_size: sequences of a microbatch.
        attention: the kernel that computes attention.
        state: bytes per parameter. Default: gradients and AdamW's two moments in the parameters' dtype.

    Raises:
        SlipstreamError: where tensor_parallel doesn't divide the attention heads, or a number is below 1.
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
        for num_heads in {call.num_heads for part in self.model.layers for call in part.attentions}:
            if num_heads % self.tensor_parallel:
                raise SlipstreamError(
                    f"tensor_parallel={self.tensor_parallel} doesn't divide the model's {num_heads} attention heads: "
                    f"use one of {', '.join(str(n) for n in range(1, num_heads + 1) if num_heads % n == 0)}."
                )

    @property
    def num_layers(self) -> int:
        return len(self.model.kinds)

    # --- seconds -----------------------------------------------------------------------------------------------------

    def seconds(self, layers: range, op: Op, length: Any, context: Any) -> Any:
        parts = self.model.counted(layers)
        return sum(number * self.part_seconds(part, op, length, context) for number, part in parts)

    def part_seconds(self, part: PartCount, op: Op, length: Any, context: Any) -> Any:
        """Returns the seconds of one op of one part of the model; B is I and W, R is F."""
        if op is Op.B:
            return sum(self.part_seconds(part, each, length, context) for each in (Op.I, Op.W))
        op = Op.F if op is Op.R else op
        device, tokens, count = self.cluster.device, self.microbatch_size * length, part.ops[op]
        products = np.maximum(
            count.flops.at(tokens) / self.tensor_parallel / device.matmul_flops(self.model.dtype, tokens),
            count.matmul_bytes.at(tokens) / self.tensor_parallel / device.bytes_per_second,
        )
        scores = sum(self._attention_seconds(call, op, length, context) for call in part.attentions)
        busy = products + self._elementwise_seconds(count, tokens) + scores
        busy = np.maximum(busy, count.num_kernels * device.kernel_seconds)
        return busy + self._part_reduce_seconds(part, op, length)

    def replay_seconds(self, layers: range, recompute: str, length: Any, context: Any) -> Any:
        """The time of R: that of F, or with "selective" of its kernels other than matrix products and attention."""
        if recompute != "selective":
            return self.seconds(layers, Op.F, length, context)
        total: Any = 0.0
        for number, part in self.model.counted(layers):
            count = part.ops[Op.F]
            moved = self._elementwise_seconds(count, self.microbatch_size * length)
            shortest = (count.num_kernels - count.num_matmuls) * self.cluster.device.kernel_seconds
            total = total + number * np.maximum(moved, shortest)
        return total

    def _elementwise_seconds(self, count: OpCount, tokens: Any) -> Any:
        """The time of the kernels other than matrix products and attention, which only move bytes."""
        wide = count.wide_bytes.per_token * tokens + count.wide_bytes.constant / self.tensor_parallel
        return (wide + count.other_bytes.at(tokens) / self.tensor_parallel) / self.cluster.device.bytes_per_second

    def reduce_seconds(self, layers: range, op: Op, length: Any) -> Any:
        parts = self.model.counted(layers)
        return sum(number * self._part_reduce_seconds(part, op, length) for number, part in parts)

    def _part_reduce_seconds(self, part: PartCount, op: Op, length: Any) -> Any:
        """The all-reduces between tensor-parallel ranks: of a layer's two outputs, and of its two gradients."""
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
        """The scores of one head, for all sequences of the microbatch."""
        if self.attention is AttentionKernel.UNFUSED:
            return self.microbatch_size * length * (context + length)
        return self.microbatch_size * (call.window.scores(context + length) - call.window.scores(context))

    def optimizer_step_seconds(self, layers: range, shards: int = 1) -> float:
        """An AdamW step: parameters and its state are read and written, gradients are read."""
        written = self.parameter_bytes(layers) + self.optimizer_bytes(layers, shards)
        return (2 * written + self.gradient_bytes(layers)) / self.cluster.device.bytes_per_second

    def gradient_seconds(self, layers: range, data_parallel: int) -> float:
        """The all-reduce of a stage's gradients between the replicas, whose ranks are tensor_parallel apart."""
        return float(self.cluster.all_reduce_seconds(self.gradient_bytes(layers), data_parallel, self.tensor_parallel))

    # --- bytes of one rank -------------------------------------------------------------------------------------------

    def num_parameters(self, layers: range) -> float:
        return sum(number * part.num_parameters for number, part in self.model.counted(layers)) / self.tensor_parallel

    def parameter_bytes(self, layers: range) -> float:
        """The parameters of a stage on one of its tensor-parallel ranks."""
        return self._state.weights * self.num_parameters(layers)

    def gradient_bytes(self, layers: range) -> float:
        """The gradients of these parameters."""
        return self._state.gradients * self.num_parameters(layers)

    def optimizer_bytes(self, layers: range, shards: int = 1) -> float:
        """AdamW's state, of which each of `shards` replicas keeps a part."""
        return self._state.optimizer * self.num_parameters(layers) / shards

    @property
    def _state(self) -> StateBytes:
        size = self.model.dtype_bytes
        return self.state or StateBytes(size, size, 2 * size)

    def activation_bytes(self, layers: range, length: int, context: int = 0) -> float:
        """The activations that a slice's F keeps for its backward.

        Every tensor-parallel rank has the whole of tensors as wide as the hidden state, and a part of all others.
        """
        total = 0.0
        for number, part in self.model.counted(layers):
            norm_inputs = 2.0 * self.model.hidden_size * self.model.dtype_bytes
            wide = min(norm_inputs, part.activation_bytes)
            per_token = wide + (part.activation_bytes - wide) / self.tensor_parallel
            total += number * self.microbatch_size * length * per_token
            if self.attention is AttentionKernel.UNFUSED:
                scores = sum(c.num_heads * self._num_scores(c, length, context) for c in part.attentions)
                total += number * (2 * self.model.dtype_bytes + 1) * scores / self.tensor_parallel
        return total

    def kept_bytes(self, layers: range, recompute: str, length: int) -> float:
        """The stage's input, which for the first stage are tokens; with "selective" also the outputs of matrix products
        and attention."""
        kept = float(self.message_bytes(length)) if layers.start else 0.0
        if recompute == "selective":
            products = sum(number * part.product_bytes for number, part in self.model.counted(layers))
            kept += self.microbatch_size * length * products / self.tensor_parallel
        return kept

    def context_bytes(self, layers: range, length: int) -> float:
        per_token = sum(number * part.context_bytes for number, part in self.model.counted(layers))
        return self.microbatch_size * length * per_token / self.tensor_parallel

    def context_gradient_bytes(self, layers: range, length: int) -> float:
        return self.context_bytes(layers, length) * 4 / self.model.dtype_bytes  # in float32

    def logits_gradient_bytes(self, layers: range, length: int) -> float:
        if layers.stop < self.num_layers:
            return 0.0
        vocabulary = self.model.head_weight / self.model.hidden_size
        return 4 * self.microbatch_size * length * vocabulary / self.tensor_parallel

    def message_bytes(self, length: Any) -> Any:
        return self.microbatch_size * length * self.model.hidden_size * self.model.dtype_bytes

    def action_costs(self, times: ActionSeconds, slices: Sequence[int], data_parallel: int = 1) -> ClusterCost:
        return ClusterCost(
            times=times,
            message_bytes=[float(self.message_bytes(length)) for length in slices],
            cluster=self.cluster,
            stride=self.tensor_parallel * data_parallel,
            tensor_parallel=self.tensor_parallel,
        )
