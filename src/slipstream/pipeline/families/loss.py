"""The loss of a slice, as a sum over its tokens and their number."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from slipstream.pipeline.batch import IGNORED


def causal_cross_entropy(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The default loss: (sum over tokens, number of valid tokens) of logits (b, T, vocabulary), targets (b, T)."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    total = functional.cross_entropy(wide.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum")
    return total, (targets != IGNORED).sum()
