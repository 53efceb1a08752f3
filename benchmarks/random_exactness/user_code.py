"""Code of a user's own that cases draw: attention in transformers' registry, and losses with weights."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from slipstream.model import causal_cross_entropy

ATTENTION = "sharper"


def sharper(module: nn.Module, query: Tensor, *others: Any, **options: Any) -> Any:
    """Attends as the model's own file does, with larger scores."""
    eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", sdpa_attention_forward)
    return eager(module, 1.3 * query, *others, **options)


AttentionInterface.register(ATTENTION, sharper)
AttentionMaskInterface.register(ATTENTION, ALL_MASK_ATTENTION_FUNCTIONS["eager"])


class WeightedLoss:
    """Cross-entropy with weights of classes, by whose sum it is divided."""

    def __init__(self, vocabulary: int) -> None:
        self.weights = 10 ** torch.linspace(-1, 1, vocabulary, dtype=torch.float64)

    def __call__(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        weights = functional.pad(self.weights, (0, outputs.shape[-1] - len(self.weights)), value=1.0)
        flat = outputs.flatten(0, 1), targets.flatten()
        return functional.cross_entropy(*flat, weights.to(outputs), reduction="sum"), self.divisor(targets)

    def divisor(self, targets: Tensor) -> Tensor:
        """Returns the sum of the weights of targets that count."""
        return self.weights[targets[targets != -100]].sum()


class ScaledLoss(nn.Module):
    """Cross-entropy of logits that a parameter of the loss scales."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.25, dtype=torch.float64))

    def forward(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Returns (sum, count)."""
        return causal_cross_entropy(outputs * self.scale, targets)

    def take_gradients(self) -> dict[str, Tensor]:
        """Returns the gradients by name, and removes them."""
        found = {f"loss_fn.{name}": each.grad for name, each in self.named_parameters() if each.grad is not None}
        self.zero_grad()
        return found
