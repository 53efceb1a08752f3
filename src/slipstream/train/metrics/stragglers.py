"""Names the ranks that have become slow, and the cut that would be best for them."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from slipstream.planner.joint import JointPlan, SlicedUnits
from slipstream.planner.joint.slowed_step import SlowedStep
from slipstream.train.config import Config

_FACTOR = 1.3  # times the peers' median
_STEPS = 20  # steps in a median, and high medians in a row
# A step has to be slower by these seconds: below them the noise of a clock and a scheduler counts.
_LEAST_SECONDS = 0.005


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
        self._peers = peers
        self._hosts = hosts
        self._last = [deque[dict[str, float]](maxlen=_STEPS) for _ in peers]
        self._usual: list[float] = []  # each rank's own usual seconds, once known
        self._in_a_row = [0] * len(peers)

    def add(self, step: int, phases: Sequence[dict[str, float]]) -> list[Straggler]:
        """Takes the seconds of a step's phases on every rank, without waits; returns the ranks that have become
        slow."""
        for last, measured in zip(self._last, phases, strict=True):
            last.append(measured)
        if len(self._last[0]) < _STEPS:
            return []
        medians = [statistics.median(sum(by_phase.values()) for by_phase in last) for last in self._last]
        if not self._usual:
            self._usual = medians
        stragglers = []
        for rank, mine in enumerate(medians):
            usual = self._of_peers(rank, medians)
            is_slow = mine > _FACTOR * usual and mine - usual > _LEAST_SECONDS
            self._in_a_row[rank] = self._in_a_row[rank] + 1 if is_slow else 0
            if self._in_a_row[rank] == _STEPS:
                stragglers.append(Straggler(rank, mine / usual, self._describe(rank, step, mine, usual)))
        return stragglers

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
        mine = statistics.median(by_phase.get(phase, 0.0) for by_phase in self._last[rank])
        theirs = [statistics.median(by_phase.get(phase, 0.0) for by_phase in self._last[peer]) for peer in others]
        return mine - (statistics.median(theirs) if theirs else 0.0)


_LEAST_GAIN = 0.03  # the least share of a step's time above noise


def cut_advice(config: Config, plan: JointPlan | None, rank: int, place: int, slowness: float) -> list[str]:
    """Returns a line about the best cut for a rank at a place of the pipeline that computes so many times as long.

    There is none where nothing is known: it needs the costs of the run's own plan, with a whole head, and without a
    memory limit, which another cut might break.
    """
    if plan is None or plan.costs is None or plan.head == "spread" or config.memory.limit is not None:
        return []
    units = SlicedUnits(plan.costs, plan.slices, plan.costs.link(plan.schedule.num_ranks), plan.recompute)
    slowed = SlowedStep(units, plan.schedule, {place: slowness})
    seconds = slowed.seconds(plan.partition)
    (cut, best) = slowed.best_cut(plan.partition)
    # The other replicas wait for the slow one, but lose by the cut.
    if config.parallel.data > 1:
        best = max(best, SlowedStep(units, plan.schedule, {}).seconds(cut))
    slow = f"rank {rank} computes {slowness:.2g} times as slowly"
    if best > (1 - _LEAST_GAIN) * seconds:
        return [f"{slow}: no other cut would save {_LEAST_GAIN:.0%} of the step's time"]
    layers, tokens = (",".join(f"{size:g}" for size in numbers) for numbers in (cut, plan.slices))
    return [
        f"{slow}: the cut {layers} would take {best / seconds:.2f} of the step's time; to go on with it from a "
        f"checkpoint, type --checkpoint.resume=latest --pipeline.schedule={config.folder.planned_schedule} "
        f"--pipeline.slices=[{tokens}] --pipeline.partition=[{layers}]"
    ]
