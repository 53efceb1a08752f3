"""Analytic costs with the attention of the time before FlashAttention, which the papers measured."""

from __future__ import annotations

from typing import Any

from slipstream.cost import AnalyticCosts, AttentionCall, Stage
from slipstream.schedule import Op

# How often the kernels read or write the scores. Forward: product, softmax (2), dropout (2), product. Backward: dP (2),
# dropout (2), softmax (3), dQ, dK.
_SCORE_PASSES = {Op.F: 6, Op.I: 9}
_SCORE_BYTES = 2.5  # elements that a score keeps for the backward: of softmax, of dropout, and half a one for its mask


class UnfusedCosts(AnalyticCosts):
    """Costs where all scores of slice by context, also masked ones, are computed, written to memory and kept."""

    def attention_seconds(self, call: AttentionCall, op: Op, length: Any, context: Any) -> Any:
        if op is Op.W:
            return 0.0
        device, heads = self.cluster.device, call.num_heads / self.tensor_parallel
        scores = heads * (self.microbatch_size * length * (context + length))
        width = (call.key_width + call.value_width) * (1 if op is Op.F else 2)  # backward: dP, dV, dQ, dK
        computed = 2 * scores * width / (device.flops[self.model.dtype] * device.attention_efficiency)
        return computed + _SCORE_PASSES[op] * scores * self.model.dtype_bytes / device.bytes_per_second

    def activation_bytes(self, layers: Stage, length: int) -> float:
        """Returns them with the scores of a slice without context: of a whole sequence."""
        heads = sum(n * call.num_heads for n, part in self.model.counted(layers) for call in part.attentions)
        scores = heads / self.tensor_parallel * self.microbatch_size * length**2
        return super().activation_bytes(layers, length) + _SCORE_BYTES * self.model.dtype_bytes * scores
