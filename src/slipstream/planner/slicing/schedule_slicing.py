"""Slices for any schedule: its actions' costs on slices, and local search by the simulator from equal-time cuts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import accumulate
from math import inf

from slipstream.errors import SlipstreamError
from slipstream.planner.cuts import Cuts
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
_STARTS = 3  # numbers of slices to improve


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
    shortest = 1 if min_slice is None else min_slice
    if min(length, granularity, shortest, max_slices) < 1 or shortest > length:
        raise SlipstreamError(
            f"length={length}, granularity={granularity}, min_slice={min_slice}, max_slices={max_slices}: all are 1 or "
            "more, and min_slice at most length."
        )
    search = _SliceSearch(candidate, length, Cuts(granularity, None, shortest, max_slices), max_simulations)
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
    cuts: Cuts
    max_simulations: int
    known: dict[tuple[int, ...], float] = field(default_factory=dict)

    def seconds(self, slices: tuple[int, ...]) -> float:
        """Returns the seconds of the simulated step; infinite once the simulations are used up."""
        if slices not in self.known:
            if len(self.known) >= self.max_simulations:
                return inf
            self.known[slices] = step_seconds(*self.candidate(slices))
        return self.known[slices]

    def starts(self) -> Iterator[tuple[int, ...]]:
        """Yields the best equal-time cuts of each count."""
        for count in self.cuts.counts(self.length):
            slicings = dict.fromkeys(equal_time_slices(self.length, count, share, self.cuts) for share in _SHARES)
            if candidates := [slices for slices in slicings if self.cuts.allows(slices)]:
                yield min(candidates, key=self.seconds)

    def descend(self, slices: tuple[int, ...]) -> None:
        """Changes the slices as long as that helps, in ever smaller portions."""
        granules = max(1, self.length // (4 * self.cuts.granularity * len(slices)))
        while True:
            better = self._first_better(slices, granules)
            if better is not None:
                slices = better
            elif granules > 1:
                granules //= 2
            else:
                return

    def _first_better(self, slices: tuple[int, ...], granules: int) -> tuple[int, ...] | None:
        now = self.seconds(slices)
        changes = self._changes(slices, granules)
        return next((changed for changed in changes if self.seconds(changed) < now), None)

    def _changes(self, slices: tuple[int, ...], granules: int) -> Iterator[tuple[int, ...]]:
        """Yields the slices with tokens moved to a neighbour, then farther; then with slices halved or joined."""
        count = len(slices)
        pairs = (
            (giver, taker)
            for distance in range(1, count)
            for giver in range(count)
            for taker in (giver - distance, giver + distance)
            if 0 <= taker < count
        )
        yield from self.cuts.moved(slices, granules, pairs)
        yield from self.cuts.halved(slices)
        yield from self.cuts.joined(slices)
