"""The segments of pinned memory that tensors are cut from, as a matter of sizes.

PyTorch pins powers of two, nearly twice what a tensor of a little more needs. So tensors share a segment:

    13 13 13 13 13 13 13 13 13 13 13 13 13 13 13 13 13 13 13 .     19 of 256, in place of one of 16 each
"""

from __future__ import annotations

from typing import Any

import numpy as np

LARGEST_SEGMENT = 2.0**30
"""Bytes of a segment of many tensors, at most."""
_TENSORS = 16  # tensors of a segment, at least, unless it would be larger


def segment_of(size: Any) -> tuple[Any, Any]:
    """Returns the bytes of the segment that tensors of a size are cut from, and how many of them it has: a single one
    where that leaves no more unused."""
    own = np.maximum(np.asarray(size, float), 1.0)
    mantissa, exponent = np.frexp(own)
    alone = np.ldexp(1.0, exponent - (mantissa == 0.5))
    shared = np.maximum(alone, np.minimum(_TENSORS * alone, LARGEST_SEGMENT))
    segment = np.where(alone <= shared / (shared // own), alone, shared)
    return segment, segment // own


def pinned_bytes(sizes: Any) -> Any:
    """Returns the bytes of pinned memory that each of some tensors takes, given their sizes."""
    segment, num_tensors = segment_of(sizes)
    return np.where(np.asarray(sizes) > 0, segment / num_tensors, 0.0)
