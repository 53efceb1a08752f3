"""The default losses of a slice: `cross_entropy` of an nn.Sequential, `causal_cross_entropy` of a causal LM."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

IGNORED = -100  # transformers' label for "predict nothing here"


def cross_entropy(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Returns (sum, number of valid targets) of outputs (b, classes, ...) and integer targets (b, ...)."""
    wide = outputs.to(torch.promote_types(outputs.dtype, torch.float32))
    total = functional.cross_entropy(wide, targets, ignore_index=IGNORED, reduction="sum")
    return total, (targets != IGNORED).sum()


def causal_cross_entropy(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Returns (sum, number of valid targets) over tokens, of logits (b, T, vocabulary) and targets (b, T)."""
    return cross_entropy(logits.flatten(0, 1), targets.flatten())


def token_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Returns each token's loss (b, T), zero where none counts, of logits (b, T, vocabulary) and targets (b, T)."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32)).flatten(0, 1)
    losses = functional.cross_entropy(wide, targets.flatten(), ignore_index=IGNORED, reduction="none")
    return losses.view_as(targets)
