"""Describes the tensors that travel between two stages before they exist."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from slipstream.model.storages import storage_id, storage_ids

Tensors = tuple[Tensor, ...]


class TensorSpec(NamedTuple):
    """The shape and type of a tensor that one stage sends to another."""

    shape: torch.Size
    dtype: torch.dtype
    needs_gradient: bool = True  # whether its gradient comes back
    peer: int | None = None  # the other stage, for a skip between stages that aren't neighbours

    @property
    def num_bytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize


def copied_from_messages(tensors: Tensors, messages: Tensors) -> Tensors:
    """Returns the tensors, with detached copies of those that share memory with a message.

    A message's buffer is released before such a tensor is.
    """
    held = storage_ids(messages)
    return tuple(_copy(tensor) if storage_id(tensor) in held else tensor for tensor in tensors)


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)
