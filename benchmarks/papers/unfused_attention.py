"""Counted costs with the attention of the time before FlashAttention, which the papers measured."""

from __future__ import annotations

from typing import Any

import numpy as np

from slipstream.array_types import Floats
from slipstream.cost import AttentionCall, CountedCosts
from slipstream.schedule import Op

# How often the kernels read or write the scores. Forward: product, softmax (2), dropout (2), product. Backward: dP (2),
# dropout (2), softmax (3), dQ, dK.
_SCORE_PASSES = {Op.F: 6, Op.I: 9}
_SCORE_BYTES = 2.5  # elements that a score keeps for the backward: of softmax, of dropout, and half a one for its mask


class UnfusedCosts(CountedCosts):
    """Costs where all scores of slice by context, also masked ones, are computed, written to memory and kept."""

    def attention_seconds(self, call: AttentionCall, op: Op, length: Any, context: Any) -> Any:
        if op is Op.W:
            return 0.0
        device, heads = self.cluster.device, call.num_heads / self.degrees.tensor
        scores = heads * (self.microbatch_size * length * (context + length))
        width = (call.key_width + call.value_width) * (1 if op is Op.F else 2)  # backward: dP, dV, dQ, dK
        computed = 2 * scores * width / (device.flops[self.model.dtype] * device.attention_efficiency)
        return computed + _SCORE_PASSES[op] * scores * self.model.dtype_bytes / device.bytes_per_second

    def each_activation(self, lengths: Any) -> Floats:
        """Returns the bytes with the scores of a slice without context: of a whole sequence."""
        heads = self._each(lambda part: sum(call.num_heads for call in part.attentions))
        scores = np.outer(heads / self.degrees.tensor * self.microbatch_size, lengths**2)
        return super().each_activation(lengths) + _SCORE_BYTES * self.model.dtype_bytes * scores
