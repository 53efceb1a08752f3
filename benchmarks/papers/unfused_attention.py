"""Analytic costs with the attention of the time before FlashAttention, which the papers measured."""

from __future__ import annotations

from typing import Any

from slipstream.planner.costs import AnalyticCosts, AttentionCall
from slipstream.schedule import Op

# How often the kernels read or write the scores. Forward: product, softmax (2), dropout (2), product. Backward: dP (2),
# dropout (2), softmax (3), dQ, dK.
_SCORE_PASSES = {Op.F: 6, Op.I: 9}


class UnfusedCosts(AnalyticCosts):
    """Costs where all scores of slice by context, also masked ones, are computed and written to memory."""

    def attention_seconds(self, call: AttentionCall, op: Op, length: Any, context: Any) -> Any:
        if op is Op.W:
            return 0.0
        device, heads = self.cluster.device, call.num_heads / self.tensor_parallel
        scores = heads * (self.microbatch_size * length * (context + length))
        width = (call.key_width + call.value_width) * (1 if op is Op.F else 2)  # backward: dP, dV, dQ, dK
        computed = 2 * scores * width / (device.flops[self.model.dtype] * device.attention_efficiency)
        return computed + _SCORE_PASSES[op] * scores * self.model.dtype_bytes / device.bytes_per_second
