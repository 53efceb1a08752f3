"""schedule="auto" and slices="auto": the first steps of a run are measured, and the rest run what suits them best."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Generator, Sequence
from itertools import accumulate
from statistics import median
from typing import NamedTuple

import numpy as np

from slipstream.cost import TableCost
from slipstream.errors import SlipstreamError
from slipstream.pipeline.batch import slice_lengths
from slipstream.schedule.action import Op, Schedule
from slipstream.schedule.flushes import in_flushes
from slipstream.schedule.generators import make_schedule
from slipstream.schedule.lowering import split_backwards
from slipstream.timeline import Timeline

_WARM_UP = 2  # steps: the first ones pay for memory that is touched for the first time
_OBSERVED = 2  # steps of each kind
_COUNTS = (8, 4)  # slices whose times are measured
_MOST_SLICES = (16, 10, 7, 5)  # the best slicing of at most so many is run for real
_GRANULARITY = 64  # tokens: matrix products like multiples of it
_MAX_SLICES = max(_MOST_SLICES)
_Key = tuple[int, int, Op]  # stage, slice, op


class Trial(NamedTuple):
    """What a step runs: compute actions, and the length of every slice."""

    schedule: Schedule
    slices: tuple[int, ...]


Maker = Callable[[int], Schedule]  # number of slices -> the schedule to start from, on the wanted placement
Tuning = Generator[Trial, Timeline, Trial]  # yields what to run next, takes the step's timeline, returns its choice


class Decision(NamedTuple):
    """What the next step runs, and whether all others will."""

    trial: Trial
    is_last: bool


class Tuner:
    """What the next step runs: always the same, or with "auto" whatever there is still to learn from.

    Raises SlipstreamError for settings that don't fit together.
    """

    def __init__(
        self,
        schedule: str | Schedule,
        num_ranks: int,
        num_microbatches: int,
        stages_per_rank: int,
        slices: int | Sequence[int] | str,
        num_flushes: int = 1,
        compiled: Sequence[str] = (),
    ) -> None:
        """`compiled` names modules whose backward is one piece, so that none is split."""
        self._reorders = schedule == "auto"
        self._reslices = slices == "auto"
        _check(schedule, slices)
        _check_flushes(schedule, num_microbatches, num_flushes)
        if self._reorders:
            schedule = "1f1b" if stages_per_rank == 1 else "interleaved-1f1b"
        self._counts = (num_ranks, num_microbatches // num_flushes, stages_per_rank)
        self._num_flushes = num_flushes
        self._given, self._splits = schedule, not compiled
        self.slices: int | Sequence[int] = _COUNTS[0] if isinstance(slices, str) else slices
        if isinstance(schedule, Schedule) and isinstance(slices, int):
            self.slices = schedule.num_slices
        count = self.slices if isinstance(self.slices, int) else len(self.slices)
        if not isinstance(schedule, Schedule):
            schedule = in_flushes(_maybe_split(self._make(count), self._splits), num_flushes)
        self.schedule = schedule
        _check_whole(schedule, compiled)
        self._tuning: Tuning | None = None
        self._length = 0  # of the sequences that are tuned for
        self._has_learned = self._is_settled = False

    @property
    def is_tuning(self) -> bool:
        """Whether there is something to learn, from the first step on."""
        return (self._reorders or self._reslices) and not self._is_settled

    def begin(self, length: int) -> Schedule:
        """The schedule of the next step, whose sequences have `length` tokens.

        Tuning is for the length of the first step that is learned from.
        """
        if self.is_tuning and not self._has_learned and length != self._length:
            self._length = length
            if self._reslices:
                self._tuning = tune_slices(self._make, length, self._reorders, self._splits)
            else:
                self._tuning = tune_order(self._make, slice_lengths(self.slices, length), self._splits)
            self._run(next(self._tuning))
        return self.schedule

    def listens_to(self, length: int) -> bool:
        """Whether the timeline of a step on sequences of `length` tokens is wanted."""
        return self.is_tuning and length == self._length

    def decide(self, timeline: Timeline) -> Decision:
        """What to run next, given what was measured: one rank's business, whose decision all ranks `follow`.

        Two machines may fit the same times to other last digits, and so choose differently.
        """
        assert self._tuning is not None
        try:
            return Decision(self._tuning.send(timeline), is_last=False)
        except StopIteration as end:
            return Decision(end.value, is_last=True)

    def follow(self, decision: Decision) -> Schedule:
        """Returns the schedule of the step that comes next."""
        self._has_learned, self._is_settled = True, decision.is_last
        self._run(decision.trial)
        return self.schedule

    def lengths(self, length: int) -> list[int]:
        """The slices of such a sequence; slices found for another length are taken as their number."""
        found_for_another = self._reslices and length != self._length
        count = self.slices if isinstance(self.slices, int) else len(self.slices)
        return slice_lengths(count if found_for_another else self.slices, length)

    def _run(self, trial: Trial) -> None:
        self.schedule = in_flushes(trial.schedule, self._num_flushes)
        if self._reslices:
            self.slices = trial.slices

    def _make(self, num_slices: int) -> Schedule:
        assert isinstance(self._given, str)
        num_ranks, num_microbatches, stages_per_rank = self._counts
        return make_schedule(self._given, num_ranks, num_microbatches, num_slices, stages_per_rank)


def _check(schedule: str | Schedule, slices: object) -> None:
    if isinstance(schedule, Schedule) and slices == "auto":
        raise SlipstreamError(
            f"slices='auto' with the schedule {schedule.name!r}, which has {schedule.num_slices} slices: give their "
            "lengths, or a schedule by its name."
        )
    if slices != "auto" and (not isinstance(slices, (int, Sequence)) or isinstance(slices, str)):
        raise SlipstreamError(
            f"slices={slices!r}: give a count, such as 8, the token lengths, such as [512, 512], or 'auto'."
        )


def _check_flushes(schedule: str | Schedule, num_microbatches: int, num_flushes: int) -> None:
    if isinstance(schedule, Schedule) and num_flushes != 1:
        raise SlipstreamError(
            f"num_flushes={num_flushes} with the schedule {schedule.name!r}: repeat it by "
            f"slipstream.schedule.in_flushes(schedule, {num_flushes}), or give a schedule by its name."
        )
    if num_flushes < 1 or num_microbatches % num_flushes:
        allowed = [count for count in range(1, num_microbatches + 1) if num_microbatches % count == 0]
        raise SlipstreamError(
            f"num_flushes={num_flushes} for {num_microbatches} microbatches: each flush has as many. Choose one of "
            f"{', '.join(map(str, allowed))}."
        )


def _check_whole(schedule: Schedule, compiled: Sequence[str]) -> None:
    if compiled and any(action.op is Op.I for action in schedule.positions):
        raise SlipstreamError(
            f"{compiled[0]} is compiled, so its backward is one piece, but the schedule {schedule.name!r} splits "
            "backwards into input and weight gradients. Compile norms and activations alone, or use a schedule of "
            "whole backwards: gpipe, 1f1b, interleaved-1f1b or breadth-first."
        )


def tune_order(make: Maker, slices: Sequence[int], splits: bool) -> Tuning:
    """The best order of the given slices; with `splits` backwards may be I and W."""
    start = make(len(slices))
    samples = yield from _observe(start, tuple(slices), splits)
    return Trial(_best_order(start, samples.cost(), splits), tuple(slices))


def tune_slices(make: Maker, length: int, reorders: bool, splits: bool) -> Tuning:
    """The best slices of `length` tokens; with `reorders` each slicing gets its own best order.

    Two slicings are measured, and times are fitted to them: a constant, a part for every token and one for every pair
    of tokens that attend. The slicings that are best by simulation, and the measured ones, are then run and timed.
    """
    granularity = min(_GRANULARITY, max(1, length // _MAX_SLICES))
    fitted, tried = _Fit(), {}
    for count in [count for count in _COUNTS if count <= length] or [1]:
        slices = _nearly_equal(length, count, granularity)
        samples = yield from _observe(make(count), slices, splits)
        fitted.add(samples, slices)
        tried[slices] = samples.cost()
    for slices in _promising(lambda count: _maybe_split(make(count), splits), fitted, length, granularity):
        tried.setdefault(slices, fitted.cost(slices))
    seconds: dict[Trial, float] = {}
    for slices, cost in tried.items():
        start = make(len(slices))
        order = _best_order(start, cost, splits) if reorders else _maybe_split(start, splits)
        trial = Trial(order, slices)
        timelines: list[Timeline] = []
        for _ in range(1 + _OBSERVED):
            timelines.append((yield trial))
        seconds[trial] = median(timeline.makespan for timeline in timelines[1:])
    return min(seconds, key=seconds.__getitem__)


class Samples:
    """Seconds of actions in some steps, over all microbatches, and of messages."""

    def __init__(self) -> None:
        self.actions: defaultdict[_Key, list[float]] = defaultdict(list)
        self.messages: list[float] = []

    def add(self, timeline: Timeline) -> None:
        for span in timeline.compute_spans:
            self.actions[span.action.stage, span.action.slice, span.action.op].append(span.seconds)
        self.messages += [message.seconds for message in timeline.messages]

    @property
    def latency(self) -> float:
        """A message's shortest time: longer ones had a receiver that came late."""
        return max(0.0, min(self.messages, default=0.0))

    def cost(self) -> TableCost:
        return TableCost({key: median(seconds) for key, seconds in self.actions.items()}, latency=self.latency)


class _Fit:
    """Per stage and op: t(i, j) = a0 + a1 i + a2 (i j + i^2/2) for a slice of i tokens after j others."""

    def __init__(self) -> None:
        self._points: defaultdict[tuple[int, Op], list[tuple[int, int, float]]] = defaultdict(list)
        self._latency = float("inf")

    def add(self, samples: Samples, slices: Sequence[int]) -> None:
        contexts = list(accumulate(slices, initial=0))
        for (stage, index, op), seconds in samples.actions.items():
            self._points[stage, op].append((slices[index], contexts[index], median(seconds)))
        self._latency = min(self._latency, samples.latency)

    def cost(self, slices: Sequence[int]) -> TableCost:
        times: dict[_Key, float] = {}
        contexts = list(accumulate(slices, initial=0))[:-1]
        for (stage, op), points in self._points.items():
            length, context, seconds = np.array(points, float).T
            features = _features(length, context) / seconds[:, None]  # relative errors count alike
            solution = np.linalg.lstsq(features, np.ones(len(points)), rcond=None)[0]
            predicted = _features(np.array(slices, float), np.array(contexts, float)) @ solution
            times |= {(stage, i, op): max(float(t), 1e-6) for i, t in enumerate(predicted)}
        return TableCost(times, latency=self._latency)


def _features(length: np.ndarray, context: np.ndarray) -> np.ndarray:
    return np.stack([np.ones_like(length), length, length * context + length**2 / 2], axis=1)


def _observe(start: Schedule, slices: tuple[int, ...], splits: bool) -> Generator[Trial, Timeline, Samples]:
    """Run whole and split backwards, some steps each, and note how long everything takes."""
    samples = Samples()
    warm_ups = {split_backwards(start, everywhere=True): _WARM_UP, start: 1} if splits else {start: _WARM_UP}
    for schedule, warm_up in warm_ups.items():
        for step in range(warm_up + _OBSERVED):
            timeline = yield Trial(schedule, slices)
            if step >= warm_up:
                samples.add(timeline)
    return samples


def _maybe_split(schedule: Schedule, splits: bool) -> Schedule:
    return split_backwards(schedule) if splits else schedule


def _best_order(start: Schedule, cost: TableCost, splits: bool) -> Schedule:
    from slipstream.planner.ordering import find_order  # its compiled code takes a while to load

    return find_order(start.placement, start.num_microbatches, start.num_slices, cost, split=splits)


def _promising(make: Maker, fitted: _Fit, length: int, granularity: int) -> list[tuple[int, ...]]:
    """The slicings of the shortest simulated steps, of different numbers of slices, best first."""
    from slipstream.planner.schedule_slicing import slice_for_schedule

    def candidate(slices: tuple[int, ...]) -> tuple[Schedule, TableCost]:
        return make(len(slices)), fitted.cost(slices)

    found: dict[tuple[int, ...], float] = {}
    for most in _MOST_SLICES:
        slicing = slice_for_schedule(candidate, length, granularity=granularity, max_slices=most)
        found[tuple(slicing.slices)] = slicing.latency
    return sorted(found, key=found.__getitem__)


def _nearly_equal(length: int, count: int, granularity: int) -> tuple[int, ...]:
    """Slices that begin at multiples of the granularity."""
    slices = [units * granularity for units in slice_lengths(count, length // granularity)]
    slices[-1] += length % granularity
    return tuple(slices)
