"""Counts the bytes that a rank sends, by the axis of the mesh."""

from __future__ import annotations

from collections.abc import Mapping

from slipstream.parallel import RankGroup


class Traffic:
    """The bytes that this rank sends in collectives, step by step.

    A collective is taken to send as much as a ring of n ranks does, which is the least possible: (n-1)/n of the bytes
    of a gathered or scattered tensor, and twice that in an all-reduce, which does both (PTD-P section 3.3.1). In an
    all-to-all it sends as much as it receives.
    """

    def __init__(self, axes: Mapping[str, RankGroup]) -> None:
        """Begins to count; `axes` are groups by name, such as {"dp": ..., "tp": ...}."""
        self._axes = dict(axes)
        self._before = {name: _ring_bytes(group) for name, group in axes.items()}

    def of_step(self, pipeline_bytes: int) -> dict[str, int]:
        """Returns the bytes by axis since the last call; the transport of the pipeline has counted its own."""
        now = {name: _ring_bytes(group) for name, group in self._axes.items()}
        sent = {name: round(now[name] - self._before[name]) for name in now}
        self._before = now
        return {"pp": pipeline_bytes, **sent}


def _ring_bytes(group: RankGroup) -> float:
    """Returns the bytes that this rank has sent in all collectives of the group so far."""
    part = (group.size - 1) / group.size
    # Of an all-to-all only the numbers for other ranks are counted.
    shares = {"all_reduce": 2 * part, "all_to_all": 1}
    return sum(shares.get(name, part) * size for name, size in group.payload.items())
