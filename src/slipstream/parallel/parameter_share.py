"""Which part of an unsplit model's parameter a rank holds: what sharding, export and checkpoints go by."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class ParameterShare:
    """The ranges of a parameter along `dim` whose concatenation is this rank's tensor.

    One range where a weight is cut evenly; several where it holds several matrices (query, key and value, or gate and
    up), of each of which this rank has its part. `copy` numbers the ranks that hold the very same share, from 0: of a
    whole parameter all of the tensor axis, of grouped keys and values those that serve the same head.
    """

    shape: tuple[int, ...]  # of the whole parameter
    dim: int
    ranges: tuple[tuple[int, int], ...]
    copy: int = 0

    @classmethod
    def whole(cls, shape: tuple[int, ...], copy: int = 0) -> ParameterShare:
        """All of it."""
        return cls(shape, 0, ((0, shape[0] if shape else 1),), copy)

    @property
    def is_whole(self) -> bool:
        return not self.shape or self.ranges == ((0, self.shape[self.dim]),)

    def take(self, whole: Tensor) -> Tensor:
        """This rank's tensor, in memory of its own unless it is all of it."""
        if self.is_whole:
            return whole
        return torch.cat([whole.narrow(self.dim, start, stop - start) for start, stop in self.ranges], self.dim)

    def put(self, part: Tensor, whole: Tensor) -> None:
        """Copy this rank's tensor to its places in the whole one."""
        if not self.shape:
            whole.copy_(part)
            return
        position = 0
        for start, stop in self.ranges:
            whole.narrow(self.dim, start, stop - start).copy_(part.narrow(self.dim, position, stop - start))
            position += stop - start

    def boxes(self, part: Tensor, first_row: int = 0) -> Iterator[tuple[tuple[int, ...], Tensor]]:
        """The rows of `part` as (offsets in the whole parameter, a view of the tensor there), one a contiguous box.

        `part` is this rank's tensor from its row (dim 0) `first_row` on, and need not go to the end: the rows of one
        rank of several that share an optimizer's state.
        """
        if not self.shape:
            yield (), part
            return
        position = 0  # of the range along dim, in this rank's tensor
        for start, stop in self.ranges:
            offsets = [0] * len(self.shape)
            offsets[self.dim] = start
            if self.dim == 0:
                low, high = max(position, first_row), min(position + stop - start, first_row + part.shape[0])
                if low < high:
                    offsets[0] = start + low - position
                    yield tuple(offsets), part[low - first_row : high - first_row]
            elif part.shape[0]:
                offsets[0] = first_row
                yield tuple(offsets), part.narrow(self.dim, position, stop - start)
            position += stop - start
