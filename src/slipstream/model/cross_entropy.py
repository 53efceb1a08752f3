"""The default losses of a slice, as a sum over its tokens and their number."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

IGNORED = -100  # transformers' label for "predict nothing here"


def cross_entropy(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """An nn.Sequential's: (sum, number of valid targets) of outputs (b, classes, ...) and integer targets (b, ...)."""
    wide = outputs.to(torch.promote_types(outputs.dtype, torch.float32))
    total = functional.cross_entropy(wide, targets, ignore_index=IGNORED, reduction="sum")
    return total, (targets != IGNORED).sum()


def causal_cross_entropy(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """A causal LM's: (sum over tokens, number of valid tokens) of logits (b, T, vocabulary), targets (b, T)."""
    return cross_entropy(logits.flatten(0, 1), targets.flatten())
