"""Finds ranks that are slower than their peers, step after step, from how long each computes."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

_FACTOR = 1.3  # times the peers' median
_STEPS = 20  # of which the median is taken; and as many medians in a row have to be high
_LEAST_SECONDS = 0.005  # of a step by which it is slower: below that the noise of a clock and a scheduler counts


class Straggler(NamedTuple):
    """A rank that has become slow, how many times as long it computes as it should, and a line about that."""

    rank: int
    slowness: float
    line: str


class Stragglers:
    """Compares each rank with those that do the same work: the same stages in other replicas, the same layers by tensor
    ranks; without such peers, a rank with its own past.

    A step alone says little on a machine that others use. A rank is named when the median of its last 20 steps is 1.3
    times that of its peers, in 20 steps in a row, and once until it has caught up.
    """

    def __init__(self, peers: Sequence[Sequence[int]], hosts: Sequence[str]) -> None:
        """`peers` has for each rank the ranks that do the same work, with itself; `hosts` the machine of each."""
        self._peers, self._hosts = peers, hosts
        self._last = [deque[dict[str, float]](maxlen=_STEPS) for _ in peers]
        self._usual: list[float] = []  # of each rank by itself, once it is known
        self._in_a_row = [0] * len(peers)

    def add(self, step: int, phases: Sequence[dict[str, float]]) -> list[Straggler]:
        """Takes the seconds of a step's phases on every rank, without waits; returns the ranks that have become
        slow."""
        for last, measured in zip(self._last, phases, strict=True):
            last.append(measured)
        if len(self._last[0]) < _STEPS:
            return []
        medians = [statistics.median(sum(each.values()) for each in last) for last in self._last]
        if not self._usual:
            self._usual = medians
        found = []
        for rank, mine in enumerate(medians):
            usual = self._of_peers(rank, medians)
            is_slow = mine > _FACTOR * usual and mine - usual > _LEAST_SECONDS
            self._in_a_row[rank] = self._in_a_row[rank] + 1 if is_slow else 0
            if self._in_a_row[rank] == _STEPS:
                found.append(Straggler(rank, mine / usual, self._describe(rank, step, mine, usual)))
        return found

    def _of_peers(self, rank: int, medians: Sequence[float]) -> float:
        others = [medians[peer] for peer in self._peers[rank] if peer != rank]
        if others:
            return statistics.median(others)
        # All stages of a machine that has become busier are slower alike, and none of them is to blame.
        pace = statistics.median(now / before for now, before in zip(medians, self._usual, strict=True))
        return self._usual[rank] * max(1.0, pace)

    def _describe(self, rank: int, step: int, mine: float, usual: float) -> str:
        others = [peer for peer in self._peers[rank] if peer != rank]
        phase = max(self._last[rank][-1], key=lambda name: self._excess(rank, name, others))
        against = f"its peers' ({', '.join(f'rank {peer}' for peer in others)})" if others else "its own before"
        return (
            f"step {step}: rank {rank} ({self._hosts[rank]}) is slow in {phase.replace('_', ' ')}: it computes for "
            f"{mine:.3f} s a step, {mine / usual:.2f} times {against}"
        )

    def _excess(self, rank: int, phase: str, others: Sequence[int]) -> float:
        """Returns by how much a phase is longer than the peers'; alone, how long it is."""
        mine = statistics.median(each.get(phase, 0.0) for each in self._last[rank])
        theirs = [statistics.median(each.get(phase, 0.0) for each in self._last[peer]) for peer in others]
        return mine - (statistics.median(theirs) if theirs else 0.0)
