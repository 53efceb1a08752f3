"""A rectangle of a tensor, and what two of them have in common."""

from __future__ import annotations

from math import prod
from typing import NamedTuple


class Box(NamedTuple):
    """Where it begins and how long it is along each dim of the whole tensor; () and () for a scalar."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def num_elements(self) -> int:
        """Of a scalar 1."""
        return prod(self.sizes)

    def overlap(self, other: Box) -> Box | None:
        """What lies in both, None where nothing does."""
        starts = tuple(max(pair) for pair in zip(self.offsets, other.offsets, strict=True))
        stops = tuple(min(pair) for pair in zip(self._stops, other._stops, strict=True))
        sizes = tuple(stop - start for start, stop in zip(starts, stops, strict=True))
        return Box(starts, sizes) if all(size > 0 for size in sizes) else None

    def inside(self, outer: Box) -> tuple[slice, ...]:
        """The indices of this box in a tensor that holds `outer`, of which it is a part."""
        starts = [mine - theirs for mine, theirs in zip(self.offsets, outer.offsets, strict=True)]
        return tuple(slice(start, start + size) for start, size in zip(starts, self.sizes, strict=True))

    @property
    def _stops(self) -> list[int]:
        return [offset + size for offset, size in zip(self.offsets, self.sizes, strict=True)]
