"""How many bytes a step sends along each axis of the mesh."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from slipstream.parallel import RankGroup


class Traffic:
    """What this rank has sent along the axes of collectives since it was last asked.

    A collective sends what a ring of n ranks does, the least there is: (n-1)/n of the bytes of a gathered or scattered
    tensor, and of an all-reduce, which is one after the other, twice that (PTD-P section 3.3.1).
    """

    def __init__(self, axes: Mapping[str, RankGroup]) -> None:
        """`axes` such as {"dp": ..., "tp": ...}: those whose groups count their collectives."""
        self._axes = dict(axes)
        self._before = {name: ring_bytes(group) for name, group in axes.items()}

    def of_step(self, pipeline_bytes: int) -> dict[str, int]:
        """Bytes by axis; those of the pipeline are its transport's own count."""
        now = {name: ring_bytes(group) for name, group in self._axes.items()}
        sent = {name: round(now[name] - self._before[name]) for name in now}
        self._before = now
        return {"pp": pipeline_bytes, **sent}


def ring_bytes(group: RankGroup) -> float:
    """Bytes that this rank has sent in all collectives of the group so far."""
    part = (group.size - 1) / group.size
    return sum((2 if name == "all_reduce" else 1) * part * size for name, size in group.payload.items())


def add_up(ranks: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Bytes by axis of all ranks together."""
    total: Counter[str] = Counter()
    for sent in ranks:
        total.update(sent)
    return dict(total)
