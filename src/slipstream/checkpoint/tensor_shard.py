"""A rank's part of a tensor, to be saved or to be filled, and its place in the whole tensor."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

from slipstream.parallel import ParameterShare


class Box(NamedTuple):
    """A rectangle of a tensor: its start and its length along each dim; () and () for a scalar."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    def is_inside(self, shape: tuple[int, ...]) -> bool:
        """Returns whether it lies inside a tensor of this shape."""
        along_dims = zip(self.offsets, self.sizes, shape, strict=True)
        return all(0 <= start <= start + size <= end for start, size, end in along_dims)

    def as_chunk(self) -> ChunkStorageMetadata:
        """Returns the box as `torch.distributed.checkpoint` describes one."""
        return ChunkStorageMetadata(torch.Size(self.offsets), torch.Size(self.sizes))


@dataclass(frozen=True)
class TensorShard:
    """Rows `first_row` to `first_row + len(tensor)` of this rank's share of a tensor.

    Attributes:
        key: the name of the tensor, the same on every rank and every mesh: `model.layers.0.mlp.up_proj.weight`,
            `optimizer.exp_avg.model.layers.0.mlp.up_proj.weight`.
        share: which part of the whole tensor this rank has.
        tensor: the rows.
        first_row: where they begin in the share.
        writes: False where another rank saves the same elements; it makes no difference for loading.
    """

    key: str
    share: ParameterShare
    tensor: Tensor
    first_row: int = 0
    writes: bool = True

    def boxes(self) -> Iterator[tuple[Box, Tensor]]:
        """Yields its rectangles of the whole tensor, none empty, each with a view of the memory of `tensor`."""
        for offsets, view in self.share.boxes(self.tensor.detach(), self.first_row):
            if view.numel():
                yield Box(offsets, tuple(view.shape)), view


def dtype_name(tensor: Tensor) -> str:
    """Returns the name of a tensor's dtype in torch, such as `float32`."""
    return str(tensor.dtype).removeprefix("torch.")
