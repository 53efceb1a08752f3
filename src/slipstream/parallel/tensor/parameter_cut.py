"""Describes how one parameter is cut over the tensor ranks, and which ranks have the same part of it."""

from __future__ import annotations

from dataclasses import dataclass

from slipstream.parallel.parameter_share import ParameterShare


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
        ranges, offset = [], 0
        for size in self.matrices:
            start, stop = part_bounds(size, self.num_parts, part)
            ranges.append((offset + start, offset + stop))
            offset += size
        return ParameterShare(self.shape, self.dim, tuple(ranges), copy)

    def holders(self, rank: int, num_ranks: int) -> tuple[int, ...]:
        """Returns the tensor ranks that have the same part as `rank`, including itself."""
        copies = num_ranks // self.num_parts
        first = rank // copies * copies
        return tuple(range(first, first + copies))


def part_bounds(size: int, num_parts: int, part: int) -> tuple[int, int]:
    """Returns the [start, stop) of one part."""
    each, rest = divmod(size, num_parts)
    start = part * each + min(part, rest)
    return start, start + each + (part < rest)
