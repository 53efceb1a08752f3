"""Modules that stand in a stage's model for what other stages compute."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class Placeholder(nn.Module):
    """A module without weights that keeps the plain attributes of the one it replaces.

    Models read some of them: `layer.attention_type`, for example, selects a layer's mask.
    """

    def __init__(self, original: nn.Module) -> None:
        super().__init__()
        for name, value in vars(original).items():
            if not name.startswith("_") and isinstance(value, (str, int, float, bool, type(None))):
                setattr(self, name, value)


class PassThrough(Placeholder):
    """Replaces another stage's layer, norm or head, and returns the first tensor it is given."""

    def __init__(self, original: nn.Module, tuple_length: int = 0) -> None:
        super().__init__(original)
        self.tuple_length = tuple_length

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        found = self._instead_of(next(value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)))
        return (found, *[None] * (self.tuple_length - 1)) if self.tuple_length else found

    def _instead_of(self, tensor: Tensor) -> Tensor:
        return tensor


class ZeroBranch(PassThrough):
    """Replaces another stage's half of a layer, so that its residual connection adds nothing.

    It returns -0.0, since x + -0.0 is x to the bit for every x, and x + 0.0 is not for x = -0.0.
    """

    def _instead_of(self, tensor: Tensor) -> Tensor:
        return tensor.new_full((), -0.0).expand(tensor.shape)  # takes no memory


class EmptyEmbedding(nn.Module):
    """Replaces the first stage's embedding: its output has the right shape, takes no memory and is never used."""

    def __init__(self, original: nn.Module, width: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.embedding_dim = width
        self.padding_idx = getattr(original, "padding_idx", None)
        # models read the device and dtype of their embedding's weight
        self.register_buffer("weight", torch.zeros((), dtype=dtype, device=device), persistent=False)
        self.weight: Tensor

    def forward(self, ids: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return self.weight.expand(*ids.shape, self.embedding_dim)  # (b, T, hidden)
