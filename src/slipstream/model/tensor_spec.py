"""What a tensor between two stages will be, before it is there."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

Tensors = tuple[Tensor, ...]


class TensorSpec(NamedTuple):
    """Of a tensor that one stage hands to another."""

    shape: torch.Size
    dtype: torch.dtype
    needs_gradient: bool = True  # whether a gradient of it comes back
    peer: int | None = None  # the stage at the other end, where that isn't the one before or after: of a skip

    @property
    def num_bytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize
