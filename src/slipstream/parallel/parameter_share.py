"""Describes how a parameter is cut over ranks, and which part a rank holds, for sharding, export and checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from math import ceil

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class ParameterShare:
    """The ranges of a parameter along `dim` whose concatenation is this rank's tensor.

    It has one range where a weight is cut evenly, and several where it holds several matrices (query, key and value, or
    gate and up), of each of which this rank has its part. `copy` numbers the ranks that hold the same share, from 0:
    for a whole parameter all ranks of the tensor axis, for grouped keys and values those that serve the same head.
    """

    shape: tuple[int, ...]  # the whole parameter's
    dim: int
    ranges: tuple[tuple[int, int], ...]
    copy: int = 0

    @classmethod
    def whole(cls, shape: tuple[int, ...], copy: int = 0) -> ParameterShare:
        """Returns the share of a rank that holds all of a parameter."""
        return cls(shape, 0, ((0, shape[0] if shape else 1),), copy)

    @property
    def is_whole(self) -> bool:
        """Whether this rank holds all of the parameter."""
        return not self.shape or self.ranges == ((0, self.shape[self.dim]),)

    def take(self, whole: Tensor) -> Tensor:
        """Returns this rank's tensor, a copy unless it is all of `whole`."""
        if self.is_whole:
            return whole
        return torch.cat([whole.narrow(self.dim, start, stop - start) for start, stop in self.ranges], self.dim)

    def put(self, part: Tensor, whole: Tensor) -> None:
        """Copies this rank's tensor to its places in the whole one."""
        for offsets, box in self.boxes(part):
            place = tuple(slice(first, first + size) for first, size in zip(offsets, box.shape, strict=True))
            whole[place].copy_(box)

    def boxes(self, part: Tensor, first_row: int = 0) -> Iterator[tuple[tuple[int, ...], Tensor]]:
        """Yields the rows of `part` as contiguous boxes: (offsets in the whole parameter, a view of the tensor there).

        `part` is this rank's tensor from its row (dim 0) `first_row` on, and need not reach the end: several ranks that
        share an optimizer's state have some rows each.
        """
        if not self.shape:
            yield (), part
            return
        position = 0  # beginning of the range in this rank's tensor
        for start, stop in self.ranges:
            offsets = [0] * len(self.shape)
            offsets[self.dim] = start
            if self.dim == 0:
                low = max(position, first_row)
                high = min(position + stop - start, first_row + part.shape[0])
                if low < high:
                    offsets[0] = start + low - position
                    yield tuple(offsets), part[low - first_row : high - first_row]
            elif part.shape[0]:
                offsets[0] = first_row
                yield tuple(offsets), part.narrow(self.dim, position, stop - start)
            position += stop - start


@dataclass(frozen=True)
class ParameterCut:
    """Cuts each of the matrices that lie one after the other along `dim` into `num_parts`.

    There are as many parts as tensor ranks, or fewer where several neighbouring ranks have the same part: a key and
    value head that serves the query heads of all of them. Where the division leaves a remainder, the first parts are
    longer by one, as in torch.tensor_split.
    """

    shape: tuple[int, ...]  # the whole parameter's
    dim: int
    matrices: tuple[int, ...]  # their sizes along dim
    num_parts: int

    def share(self, rank: int, num_ranks: int) -> ParameterShare:
        """Returns the share of tensor rank `rank`."""
        part, copy = divmod(rank, num_ranks // self.num_parts)
        ranges = []
        for offset, size in zip(accumulate(self.matrices, initial=0), self.matrices, strict=False):
            start, stop = part_bounds(size, self.num_parts, part)
            ranges.append((offset + start, offset + stop))
        return ParameterShare(self.shape, self.dim, tuple(ranges), copy)

    def holders(self, rank: int, num_ranks: int) -> tuple[int, ...]:
        """Returns the tensor ranks that have the same part as `rank`, including itself."""
        copies = num_ranks // self.num_parts
        first = rank // copies * copies
        return tuple(range(first, first + copies))


def part_length(length: int, num_parts: int) -> int:
    """Returns the length of each of `num_parts` equal parts, the last ones padded."""
    return ceil(length / num_parts)


def part_bounds(size: int, num_parts: int, part: int) -> tuple[int, int]:
    """Returns the [start, stop) of one part."""
    size_each, rest = divmod(size, num_parts)
    start = part * size_each + min(part, rest)
    return start, start + size_each + (part < rest)


@dataclass(frozen=True)
class ParameterShard:
    """The rows of one parameter that this rank's optimizer updates: rows of its share, from `first_row` on."""

    name: str
    parameter: nn.Parameter
    share: ParameterShare
    first_row: int
    leads: bool  # True on one of the ranks with exactly these rows

    @property
    def is_whole(self) -> bool:
        """Whether they are all of the parameter."""
        return self.share.is_whole and tuple(self.parameter.shape) == self.share.shape

    @property
    def begins(self) -> bool:
        """Whether they have the parameter's first element."""
        return self.first_row == 0 and self.share.ranges[0][0] == 0
