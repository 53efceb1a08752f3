"""How one parameter is cut over the tensor ranks, and which ranks have the same of it."""

from __future__ import annotations

from dataclasses import dataclass

from slipstream.parallel.parameter_share import ParameterShare


@dataclass(frozen=True)
class ParameterCut:
    """Each of the matrices that lie one after the other along `dim` is cut into `num_parts`.

    As many parts as tensor ranks, or fewer where several neighbouring ranks have the same part: a key and value head
    that serves the query heads of all of them. Where the division leaves a rest, the first parts are longer by one, as
    in torch.tensor_split.
    """

    shape: tuple[int, ...]  # of the whole parameter
    dim: int
    matrices: tuple[int, ...]  # their sizes along dim
    num_parts: int

    def share(self, rank: int, num_ranks: int) -> ParameterShare:
        """What tensor rank `rank` has."""
        part, copy = divmod(rank, num_ranks // self.num_parts)
        ranges, offset = [], 0
        for size in self.matrices:
            start, stop = part_bounds(size, self.num_parts, part)
            ranges.append((offset + start, offset + stop))
            offset += size
        return ParameterShare(self.shape, self.dim, tuple(ranges), copy)

    def holders(self, rank: int, num_ranks: int) -> tuple[int, ...]:
        """The tensor ranks that have the same part as `rank`, itself among them."""
        copies = num_ranks // self.num_parts
        first = rank // copies * copies
        return tuple(range(first, first + copies))


def part_bounds(size: int, num_parts: int, part: int) -> tuple[int, int]:
    """The [start, stop) of one part."""
    each, rest = divmod(size, num_parts)
    start = part * each + min(part, rest)
    return start, start + each + (part < rest)
