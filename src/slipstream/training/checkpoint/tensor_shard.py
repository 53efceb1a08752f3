"""What a rank hands over to be saved or to be filled: a tensor, and where it lies in the whole one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from slipstream.parallel import ParameterShare


class Box(NamedTuple):
    """A rectangle: where it begins and how long it is along each dim of the whole tensor; () and () for a scalar."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    def is_inside(self, shape: tuple[int, ...]) -> bool:
        """Of the whole tensor's."""
        return all(start + size <= end for start, size, end in zip(self.offsets, self.sizes, shape, strict=True))


@dataclass(frozen=True)
class TensorShard:
    """Rows `first_row` to `first_row + len(tensor)` of this rank's share of the tensor called `key`.

    The key is the same on every rank and every mesh: `model.layers.0.mlp.up_proj.weight`,
    `optimizer.exp_avg.model.layers.0.mlp.up_proj.weight`. `writes` is False where another rank saves the same
    elements; when loading it makes no difference.
    """

    key: str
    share: ParameterShare
    tensor: Tensor
    first_row: int = 0
    writes: bool = True

    @property
    def dtype(self) -> str:
        """The tensor's, as torch calls it: `float32`."""
        return dtype_name(self.tensor.dtype)

    def boxes(self) -> Iterator[tuple[Box, Tensor]]:
        """Its rectangles of the whole tensor, each with a view of the tensor's own memory; none is empty."""
        for offsets, view in self.share.boxes(self.tensor.detach(), self.first_row):
            if view.numel():
                yield Box(offsets, tuple(view.shape)), view


def dtype_name(dtype: torch.dtype) -> str:
    """`float32`."""
    return str(dtype).removeprefix("torch.")
