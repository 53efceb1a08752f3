"""Slices for any schedule: its actions' costs on slices, and local search by the simulator from equal-time cuts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import accumulate
from math import inf

from slipstream.errors import SlipstreamError
from slipstream.planner.slicing.equal_stage_slicing import Slicing, equal_time_slices
from slipstream.schedule import COMMUNICATION, Op, Schedule
from slipstream.simulator import CostModel, TableCost, step_seconds

ActionTime = Callable[[int, Op, int, int], float]  # (stage, op, slice_length, context_length) -> seconds


def schedule_costs(
    schedule: Schedule,
    slices: tuple[int, ...],
    time: ActionTime,
    *,
    bytes_per_token: float = 0,
    latency: float = 0,
    bandwidth: float | None = None,
) -> TableCost:
    """Returns the costs of a schedule's actions on slices of these lengths under plain causal attention.

    Args:
        schedule: a schedule with as many slices as there are lengths.
        slices: tokens, first to last.
        time: (stage, op, slice_length, context_length) -> seconds, called for each of F, B, I, W, R in the schedule.
        bytes_per_token: bytes of a message between stages, per token.
        latency: seconds of a message, however short.
        bandwidth: bytes per second; None: messages take only `latency`.
    """
    contexts = list(accumulate(slices, initial=0))
    timed = schedule.ops - COMMUNICATION - {Op.REDUCE_GRAD}
    wanted = {(action.stage, action.slice, action.op) for action in schedule.positions if action.op in timed}
    times = {(stage, i, op): time(stage, op, slices[i], contexts[i]) for stage, i, op in wanted}
    return TableCost(times, [bytes_per_token * tokens for tokens in slices], latency, bandwidth)


ScheduleForSlices = Callable[[tuple[int, ...]], tuple[Schedule, CostModel]]

_SHARES = (0.0, 0.1, 0.25, 0.5, 0.75, 1.0)  # attention's share of the time, for the first cuts
_STARTS = 3  # how many counts of slices are improved


def slice_for_schedule(
    candidate: ScheduleForSlices,
    length: int,
    *,
    granularity: int = 1,
    min_slice: int | None = None,
    max_slices: int = 16,
    max_simulations: int = 1500,
) -> Slicing:
    """Returns the slices with the shortest simulated step that a local search finds, for any schedule and costs.

    For each count of slices the search starts from the best of some equal-time cuts. From the best counts, it moves
    tokens from one slice to another, large portions first, and halves and joins slices. This is a heuristic: the result
    is at least as good as every start, and no single such change improves it, unless `max_simulations` ended the
    search.

    Args:
        candidate: slice lengths -> the schedule for that many slices and its costs (see `schedule_costs`). Only the
            compute actions matter for the order; one without communication is
            simulated in a hundredth of the time.
        length: tokens of the sequence.
        granularity: slices begin at multiples of this many tokens.
        min_slice: tokens every slice has at least.
        max_slices: the largest count tried.
        max_simulations: simulations, at most; each takes milliseconds, in proportion to the schedule's actions.
    """
    search = _SliceSearch(candidate, length, granularity, min_slice or 1, max_slices, max_simulations)
    if not search.allowed((length,)):
        raise SlipstreamError(
            f"length={length}, granularity={granularity}, min_slice={min_slice}, max_slices={max_slices}: all are 1 or "
            "more, and min_slice at most length."
        )
    starts = sorted(search.starts(), key=search.seconds)
    for slices in starts[:_STARTS]:
        search.descend(slices)
    best = min(search.known, key=search.seconds, default=())
    return Slicing(best, search.seconds(best))


@dataclass
class _SliceSearch:
    """A local search that remembers its simulations."""

    candidate: ScheduleForSlices
    length: int
    granularity: int
    min_slice: int
    max_slices: int
    max_simulations: int
    known: dict[tuple[int, ...], float] = field(default_factory=dict)

    def seconds(self, slices: tuple[int, ...]) -> float:
        """Returns the seconds of the simulated step; infinite once the simulations are used up."""
        if slices not in self.known:
            if len(self.known) >= self.max_simulations:
                return inf
            self.known[slices] = step_seconds(*self.candidate(slices))
        return self.known[slices]

    def allowed(self, slices: tuple[int, ...]) -> bool:
        return min(*slices, self.granularity, self.max_slices - len(slices) + 1) >= 1 and min(slices) >= self.min_slice

    def starts(self) -> Iterator[tuple[int, ...]]:
        """Yields the best equal-time cuts of each count."""
        units = -(-self.length // self.granularity)
        for count in range(1, min(self.max_slices, units) + 1):
            cuts = {equal_time_slices(self.length, count, share, self.granularity): None for share in _SHARES}
            if candidates := [slices for slices in cuts if self.allowed(slices)]:
                yield min(candidates, key=self.seconds)

    def descend(self, slices: tuple[int, ...]) -> None:
        """Changes the slices as long as that helps, in ever smaller portions."""
        portion = self.granularity * max(1, self.length // (4 * self.granularity * len(slices)))
        while True:
            better = self._first_better(slices, portion)
            if better is not None:
                slices = better
            elif portion > self.granularity:
                portion = self.granularity * (portion // self.granularity // 2)
            else:
                return

    def _first_better(self, slices: tuple[int, ...], portion: int) -> tuple[int, ...] | None:
        now = self.seconds(slices)
        changes = filter(self.allowed, self._changes(slices, portion))
        return next((changed for changed in changes if self.seconds(changed) < now), None)

    def _changes(self, slices: tuple[int, ...], portion: int) -> Iterable[tuple[int, ...]]:
        """Yields the slices with a portion moved to a neighbour, then farther; then with slices halved or joined."""
        count = len(slices)
        for distance in range(1, count):
            for giver in range(count):
                for taker in (giver - distance, giver + distance):
                    if 0 <= taker < count:
                        yield tuple(n + portion * ((i == taker) - (i == giver)) for i, n in enumerate(slices))
        for i, tokens in enumerate(slices):
            half = tokens // 2 // self.granularity * self.granularity
            yield (*slices[:i], half, tokens - half, *slices[i + 1 :])
        for i in range(count - 1):
            yield (*slices[:i], slices[i] + slices[i + 1], *slices[i + 2 :])
