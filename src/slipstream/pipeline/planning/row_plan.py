"""The order and the slices of rows of one length on stages that stay where they are, by the stages' rates.

Given settings are kept and open ones searched: slices by local search with the simulator, orders by `find_order`. The
costs are those of a `StageRates`: measured before the first step, or fitted to the timelines of steps that ran.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import inf

import numpy as np

from slipstream.array_types import Floats
from slipstream.cost import OPS
from slipstream.cost.fit import fit_relative
from slipstream.errors import SlipstreamError
from slipstream.planner.ragged import StageRates
from slipstream.schedule import Op, Schedule, SliceCounts, in_flushes, join_backwards, slice_lengths, split_backwards
from slipstream.simulator import TableCost, activation_peaks, step_seconds
from slipstream.timeline import Timeline

_GRANULARITY = 64  # tokens: matrix products like multiples of it
_MOST_SLICES = (16, 10, 7, 5)  # for each, the best slices of at most this many are searched for
_COUNTS, _SHARES = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16), (0.0, 0.25, 0.5)  # of slices; of attention in their equal times
_SIMULATIONS, _FEWEST_SIMULATIONS = 400, 100  # for each of the numbers, or it is left to slices of equal times
_SIMULATED = 2400  # microbatches on stages: more are simulated less often
_ORDERED = 5  # slicings that get orders of their own
_QUICK = 2e6  # of find_order's effort, to compare slicings by
_EFFORT = 1e7  # of find_order's effort, for the order that runs
_OBSERVED = (8, 4)  # numbers of slices whose times are observed
_LEAST = 1e-9  # seconds of any action


def granularity_for(length: int) -> int:
    """Returns the number of tokens at whose multiples slices of rows of this length begin."""
    return min(_GRANULARITY, max(1, length // max(_MOST_SLICES)))


@dataclass(frozen=True)
class RowProblem:
    """The problem of a plan for rows of one length.

    Args:
        length: tokens of a row.
        placement: the rank of each stage.
        num_microbatches: of a step, or of each of its flushes.
        slices: tokens of each slice. None: they are searched for.
        named: returns the schedule that is given, or to start from, for numbers of microbatches and of slices.
        reorders: whether the order is searched for.
        splits: whether backwards may be split into input and weight gradients.
    """

    length: int
    placement: tuple[int, ...]
    num_microbatches: int
    slices: tuple[int, ...] | None
    named: Callable[[int, SliceCounts], Schedule]
    reorders: bool
    splits: bool

    def start(self, slices: Sequence[int]) -> Schedule:
        """Returns the schedule that is given, or to start from."""
        return self.named(self.num_microbatches, len(slices))

    def frugal(self, slices: Sequence[int]) -> Schedule:
        """Returns the order that holds least: with whole backwards, one microbatch after the other. Of a schedule that
        is given there is one order."""
        if not self.reorders:
            return self.start(slices)
        return in_flushes(join_backwards(self.named(1, len(slices))), self.num_microbatches)

    def fixed_slices(self, count: int) -> tuple[int, ...]:
        """Returns the slices that are given, or nearly equal ones."""
        if self.slices is not None:
            return self.slices
        step = granularity_for(self.length)
        slices = [units * step for units in slice_lengths(min(count, self.length // step), self.length // step)]
        return (*slices[:-1], slices[-1] + self.length % step)


@dataclass(frozen=True)
class RowPlan:
    """The order and the slices that were found, and the simulated seconds of a step, or of each of its flushes."""

    schedule: Schedule
    slices: tuple[int, ...]
    seconds: float


def find_row_plan(problem: RowProblem, rates: StageRates, room: Sequence[float] | None = None) -> RowPlan:
    """Returns the plan with the shortest simulated step that is found. The same arguments give the same plan.

    `room` are the bytes of activations that each rank may hold. Where no plan keeps to it, the one with the least
    memory is returned.
    """
    search = _RowSearch(problem, rates, room)
    plans = [plan for slices in search.slicings() if (plan := search.plan(slices, _QUICK))]
    if not plans:
        return frugal_plan(problem, rates, problem.fixed_slices(max(_OBSERVED)))
    best = min(plans, key=lambda plan: plan.seconds)
    better = search.plan(best.slices, _EFFORT) if problem.reorders else None
    return better if better and better.seconds < best.seconds else best


def frugal_plan(problem: RowProblem, rates: StageRates, slices: tuple[int, ...]) -> RowPlan:
    """Returns the plan in these slices that holds least."""
    schedule = problem.frugal(slices)
    return RowPlan(schedule, slices, step_seconds(schedule, cost_of(rates, slices)))


class _RowSearch:
    def __init__(self, problem: RowProblem, rates: StageRates, room: Sequence[float] | None) -> None:
        self._problem, self._rates, self._room = problem, rates, room

    def slicings(self) -> list[tuple[int, ...]]:
        """Returns the slices that are worth an order of their own."""
        from slipstream.planner.slicing import equal_time_slices, slice_for_schedule  # load compiled code

        problem = self._problem
        if problem.slices is not None:
            return [problem.slices]
        step = granularity_for(problem.length)
        simulations = min(_SIMULATIONS, _SIMULATED // (problem.num_microbatches * len(problem.placement)))
        counts = [count for count in _COUNTS if count <= problem.length // step]
        tried = {equal_time_slices(problem.length, count, share, step) for count in counts for share in _SHARES}
        tried |= set(map(problem.fixed_slices, _OBSERVED))
        if simulations >= _FEWEST_SIMULATIONS:
            for most in _MOST_SLICES:
                limits: dict[str, int] = {"max_slices": most, "max_simulations": simulations}
                tried.add(tuple(slice_for_schedule(self._started, problem.length, granularity=step, **limits).slices))
        return sorted(tried, key=lambda slices: (step_seconds(*self._started(slices)), slices))[:_ORDERED]

    def _started(self, slices: tuple[int, ...]) -> tuple[Schedule, TableCost]:
        return self._problem.start(slices), cost_of(self._rates, slices)

    def plan(self, slices: tuple[int, ...], effort: float) -> RowPlan | None:
        """Returns these slices in the best order, or in the one that is given; None where that holds too much."""
        from slipstream.planner.order.order_search import find_order  # loads compiled code

        problem, cost = self._problem, cost_of(self._rates, slices)
        schedule = problem.start(slices)
        if problem.reorders:
            counts = problem.placement, problem.num_microbatches, len(slices)
            try:
                schedule = find_order(*counts, cost, memory_limit=self._room, split=problem.splits, effort=effort)
            except SlipstreamError:  # no room for one microbatch
                return None
        held = zip(activation_peaks(schedule, cost), self._room or [inf] * schedule.num_ranks, strict=True)
        fits = all(peak <= room * (1 + 1e-9) for peak, room in held)
        return RowPlan(schedule, slices, step_seconds(schedule, cost)) if fits else None


def cost_of(rates: StageRates, slices: Sequence[int]) -> TableCost:
    """Returns the simulator's costs of the stages on slices of a row."""
    tokens, ends = np.array(slices, np.int64), np.array([0, *accumulate(slices)], np.int64)
    return rates.table(tokens, rates.action_seconds(tokens, np.diff(rates.scores(ends), axis=0)))


class ObservedSteps:
    """The steps whose actions are timed where costs can't be measured before.

    They run in two numbers of slices, where slices are open, and with backwards whole and split, where they may be.
    """

    def __init__(self, problem: RowProblem, is_limited: bool) -> None:
        """`is_limited` is whether ranks have a memory limit, so that only orders that hold least are run."""
        slicings = dict.fromkeys(problem.fixed_slices(count) for count in _OBSERVED)
        orders = [(problem.frugal if is_limited else problem.start)(lengths) for lengths in slicings]
        whole = [join_backwards(order) if problem.reorders or problem.splits else order for order in orders]
        pairs = [*zip(whole, slicings, strict=True)]
        if problem.splits:
            split = [(split_backwards(order, everywhere=True), slices) for order, slices in pairs]
            pairs = [pair for variants in zip(split, pairs, strict=True) for pair in variants]
        self._left = [pairs[0], *pairs]  # the first step warms up
        self._points: defaultdict[tuple[int, Op], list[tuple[int, int, float]]] = defaultdict(list)
        self._latencies: list[float] = []
        self._num_stages, self._is_warm = len(problem.placement), False

    @property
    def next(self) -> tuple[Schedule, tuple[int, ...]] | None:
        """The schedule and slices of the next step; None once all have been observed."""
        return self._left[0] if self._left else None

    def add(self, timeline: Timeline) -> None:
        """Notes the seconds of the actions of the step that was next."""
        _, slices = self._left.pop(0)
        if not self._is_warm:
            self._is_warm = True
            return
        contexts = [*accumulate(slices, initial=0)]
        shortest: defaultdict[tuple[int, int, Op], float] = defaultdict(lambda: inf)
        for span in timeline.compute_spans:
            key = span.action.stage, span.action.slice, span.action.op
            shortest[key] = min(shortest[key], span.seconds)
        for (stage, index, op), seconds in shortest.items():
            self._points[stage, op].append((slices[index], contexts[index], seconds))
        self._latencies += [message.seconds for message in timeline.messages]

    def rates(self) -> StageRates:
        """Returns the rates with the least squared relative error to all observed times.

        Where no backward is split, I and W are what a backward would be made of, if it could; where recomputation runs
        as an action of its own, it is part of the backward.
        """
        stages = range(self._num_stages)
        seconds = {op: np.array([fit_slice_times(self._points[stage, op]) for stage in stages]) for op in (*OPS, Op.R)}
        again = seconds.pop(Op.R)
        seconds |= {op: seconds[op] + again for op in (Op.B, Op.I)}
        return StageRates(seconds, np.zeros((self._num_stages, 2)), latency=max(0.0, min(self._latencies, default=0.0)))


def fit_slice_times(points: Sequence[tuple[int, int, float]]) -> Floats:
    """Returns a0, a1 and a2 of t(i, j) = a0 + a1 i + a2 (i j + i (i + 1) / 2), none below 0."""
    if not points:
        return np.zeros(3)
    length, context, seconds = np.array(points, float).T
    features = np.stack([np.ones_like(length), length, length * context + length * (length + 1) / 2], axis=1)
    return fit_relative(features, seconds, _LEAST)


def microbatch_bytes(problem: RowProblem, rates: StageRates) -> list[float]:
    """Returns the bytes of one microbatch's activations on each rank: the least that any order holds."""
    of_stages = rates.held_bytes(np.array([problem.length], np.int64))[:, 0]
    return [float(num_bytes) for num_bytes in np.bincount(problem.placement, of_stages)]


def rates_of_rows(rates: StageRates, num_rows: int) -> StageRates:
    """Returns the rates of microbatches of so many rows, given those of one row."""
    more = np.array([1.0, *(num_rows for _ in rates.windows), num_rows])
    seconds = {op: seconds * more for op, seconds in rates.seconds.items()}
    held = rates.activation_bytes * np.array([1.0, num_rows])
    return replace(rates, seconds=seconds, activation_bytes=held, message_bytes=num_rows * rates.message_bytes)


def with_activations(rates: StageRates, held: Mapping[tuple[int, int], float], slices: Sequence[int]) -> StageRates:
    """Returns the rates with the bytes that are known of slices of a row, by stage and slice, for each token."""
    per_token = np.zeros((rates.num_stages, 2))
    for (stage, index), size in held.items():
        per_token[stage, 1] = max(per_token[stage, 1], size / slices[index])
    return replace(rates, activation_bytes=per_token)
