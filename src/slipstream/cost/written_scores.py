"""Attention of the time before FlashAttention: all scores are computed, masked ones too, written to memory and kept."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from slipstream.array_types import Floats
from slipstream.cost.operation_counts import AttentionCall
from slipstream.schedule import Op

if TYPE_CHECKING:
    from slipstream.cost.counted import CountedCosts

# How often the kernels read or write the scores. Forward: product, softmax (2), dropout (2), product. Backward: dP (2),
# dropout (2), softmax (3), dQ, dK.
_SCORE_PASSES = {Op.F: 6, Op.I: 9}
_SCORE_BYTES = 2.5  # elements that a score keeps for the backward: of softmax, of dropout, and half a one for its mask


def written_score_seconds(costs: CountedCosts, call: AttentionCall, op: Op, length: Any, context: Any) -> Any:
    """Returns the seconds of the scores of an attention call in F or I."""
    device, heads = costs.cluster.device, call.num_heads / costs.degrees.tensor
    scores = heads * (costs.microbatch_size * length * (context + length))
    width = (call.key_width + call.value_width) * (1 if op is Op.F else 2)  # backward: dP, dV, dQ, dK
    computed = 2 * scores * width / (device.flops[costs.model.dtype] * device.attention_efficiency)
    return computed + _SCORE_PASSES[op] * scores * costs.model.dtype_bytes / device.bytes_per_second


def kept_score_bytes(costs: CountedCosts, lengths: Any) -> Floats:
    """Returns the bytes of scores that slices without context keep, (kinds, slices)."""
    heads = np.array([sum(call.num_heads for call in part.attentions) for part in costs.model.of_kind], float)
    scores = np.outer(heads / costs.degrees.tensor * costs.microbatch_size, np.square(lengths))
    kept: Floats = _SCORE_BYTES * costs.model.dtype_bytes * scores
    return kept
