"""What a tensor between two stages will be, before it is there."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from slipstream.model.storages import storage_id, storage_ids

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


def copied_from_messages(tensors: Tensors, messages: Tensors) -> Tensors:
    """With copies, outside any graph, of those in the memory of a message, which is given back before they are."""
    held = storage_ids(messages)
    return tuple(_copy(tensor) if storage_id(tensor) in held else tensor for tensor in tensors)


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)
