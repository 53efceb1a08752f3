"""schedule="auto": the search for the shortest order, by hand-written schedules, list scheduling and local search."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from copy import copy
from itertools import product

import numpy as np

from slipstream.array_types import Floats
from slipstream.planner.order.list_scheduling import ListScheduler, MeasuredOrder, PriorityRule, measure_order, peaks
from slipstream.planner.order.local_search import anneal
from slipstream.planner.order.makespan_bounds import makespan_bound
from slipstream.planner.order.ordering_problem import ROUNDING, OrderingProblem
from slipstream.schedule import SCHEDULES, Op, Schedule, SliceCounts, make_schedule, split_backwards
from slipstream.schedule.compiled_sweep import makespan, start_times
from slipstream.schedule.sweep import ActionOrder
from slipstream.simulator import CostModel

_MAX_TRIALS, _MAX_STEPS, _MAX_JOINS = 400, 15_000, 64  # enough for small problems, whatever effort is left
_HEATS = (0.005, 0.001)
_ALIKE = 1e-3  # share of a step; costs are measured to about a hundredth
# Shares of the bytes that are held, in which an order is looked for, the smallest first; a limit above `_WORTH` of them
# isn't worth a search. Each takes an eighth of the effort, and at most that of so many orders.
_SHARES = (0.5, 0.25)
_WORTH = 0.8
_MOST_LESS = 1800


def hand_written(problem: OrderingProblem) -> Iterator[Schedule]:
    """Yields every hand-written schedule for this placement, whole and with its backwards split."""
    per_rank = len(problem.placement) // problem.num_ranks
    counts = (problem.num_ranks, problem.num_microbatches, problem.slice_counts, per_rank)
    every = (make_schedule(name, *counts) for name in SCHEDULES if per_rank in SCHEDULES[name].stages_per_rank)
    for schedule in (each for each in every if each.placement == problem.placement):
        splits = Op.W in schedule.ops
        if problem.split or not splits:
            yield schedule
        if problem.split and not splits:
            yield split_backwards(schedule)


class OrderSearch:
    """The search: the best order so far, and the effort that is left. It ends with an order of `enough` seconds, by
    default a lower bound."""

    def __init__(self, problem: OrderingProblem, effort: float, enough: float | None = None) -> None:
        self.problem = problem
        self.effort = effort
        self.size = 3 * problem.num_units
        self.bound = makespan_bound(problem) if enough is None else enough
        self.random = np.random.default_rng(0)
        self.scheduler = ListScheduler(problem, problem.times, problem.limits, problem.split)
        self.best = MeasuredOrder(np.inf, *problem.order(problem.whole))
        self.rules: dict[PriorityRule, float] = {}
        self.mean = float(self.scheduler.graph("none").seconds[: 2 * problem.num_units].mean())

    def may_improve(self, effort: float = 0) -> bool:
        """Returns whether a better order may exist, and more than this effort is left."""
        return self.effort > effort and self.best.seconds > self.bound * (1 + ROUNDING)

    def compare_hand_written(self) -> None:
        """Tries the hand-written schedules."""
        for schedule in [self.problem.whole, *hand_written(self.problem)]:
            if candidate := measure_order(self.problem, self.problem.times, self.problem.limits, schedule):
                self._offer(candidate)

    def _offer(self, candidate: MeasuredOrder) -> None:
        if candidate.seconds < self.best.seconds * (1 - 1e-12):
            self.best = candidate

    def compare_rules(self) -> None:
        """Tries list scheduling by a grid of rules."""
        for lag, hurry, patience in product((0, 0.25, 0.5, 1, 2, 4), (-1, 0, 0.25, 0.5, 1, 2), (0.0, 0.5, 1.0)):
            for splitting in self.scheduler.splittings:
                if self.may_improve() and (splitting != "none" or patience == 0):
                    rule = PriorityRule(splitting, lag, hurry, patience)
                    self.rules[rule] = self._try(rule, self._priority(rule))

    def _priority(self, rule: PriorityRule) -> Floats:
        priority: Floats = self.scheduler.priority(rule) + 1e-9 * self.mean * np.arange(self.size)
        return priority

    def _try(self, rule: PriorityRule, priority: Floats) -> float:
        candidate = self.scheduler.place(rule, priority, rule.window * self.mean)
        self.effort -= self.size
        self._offer(candidate)
        return candidate.seconds

    def vary(self) -> None:
        """Tries list scheduling by rules near the best ones, and by the best order's times, both with noise."""
        left = self.effort / 2
        for _ in range(_MAX_TRIALS):
            if not self.may_improve(left):
                return
            best = heapq.nsmallest(4, self.rules, key=self.rules.__getitem__)
            rule = best[self.random.integers(len(best))]
            rule = rule._replace(
                lag=abs(rule.lag + self.random.normal(0, 0.3)),
                hurry=rule.hurry + self.random.normal(0, 0.2),
                patience=abs(rule.patience + self.random.normal(0, 0.3)),
                window=self.random.choice((0, 0, 0.25, 1)),
            )
            noise = self.mean * self.random.choice((0, 0.3, 1, 3)) * self.random.normal(size=self.size)
            if self.random.random() < 0.5:
                self.rules[rule] = self._try(rule, self._priority(rule) + noise)
            else:
                splits = {name: (flags == self.best.split).mean() for name, flags in self.scheduler.splittings.items()}
                start = start_times(self.problem.graph(self.best.split), self.best.order)
                self._try(rule._replace(splitting=max(splits, key=splits.__getitem__)), start + noise)

    def anneal(self, heats: Sequence[float] = _HEATS) -> None:
        """Improves the best order by local search, each time at a lower temperature."""
        times = np.stack([self.problem.times.seconds[op] for op in (Op.B, Op.I, Op.W)])
        if not self.problem.split:
            times[1:] = np.inf
        for seed, heat in enumerate(heats):
            num_steps = min(int(self.effort / (len(heats) - seed) / self.size * 2), _MAX_STEPS)
            if not self.may_improve() or not num_steps:
                return
            _, order, split = self.best
            annealed = anneal(self.problem.graph(split), order, split, times, num_steps, heat, seed)
            self.effort -= num_steps * self.size / 2
            self._offer(MeasuredOrder(*annealed))

    def join(self) -> None:
        """Merges I and W that follow each other into B where that costs nothing."""
        num_units = self.problem.num_units
        units = []
        for row in self.best.order.by_rank():
            follows = (row[1:] >= 2 * num_units) & (row[:-1] == row[1:] - num_units)
            units += (row[:-1][follows] - num_units).tolist()
        waiting = [units]
        for joined in waiting:
            split = self.best.split.copy()
            split[joined] = False
            graph = self.problem.graph(split)
            rows = [row[graph.exists[row]] for row in self.best.order.by_rank()]
            order = ActionOrder.of(rows, self.problem.longest_row)
            seconds = makespan(graph, start_times(graph, order))
            middle = len(joined) // 2
            if seconds <= self.best.seconds * (1 + 1e-12):
                self.best = MeasuredOrder(seconds, order, split)
            elif middle and len(waiting) < _MAX_JOINS:
                waiting += [joined[:middle], joined[middle:]]


def find_order(
    placement: Sequence[int],
    num_microbatches: int,
    num_slices: SliceCounts,
    cost: CostModel,
    *,
    memory_limit: Sequence[float] | None = None,
    reach: Sequence[Sequence[int]] | None = None,
    split: bool = True,
    effort: float = 2e7,
) -> Schedule:
    """Returns a compute-only schedule named "auto", as short in the simulator as the search can make it.

    It is never slower than any hand-written schedule, whole or with its backwards split, that has this placement and
    fits the memory. The same arguments give the same schedule on every rank.

    Args:
        placement: the rank that holds each stage.
        num_slices: token slices of every microbatch, or of each.
        cost: seconds of F, B, I and W (only F and B without `split`), of messages, and bytes of activations.
        memory_limit: bytes of activations of each rank, counted as in `simulate`: from the start of F to the end of B
            or W. None: no limit.
        reach: the first slice to which each slice of each microbatch attends, as in `Schedule`. None: slice 0.
        split: whether a backward may be split into I and W.
        effort: how many actions may be placed or simulated; 5 million take about a second.

    Raises:
        SlipstreamError: where no order fits the memory: on which rank, and the least limit that would do.
    """
    problem = OrderingProblem(placement, num_microbatches, num_slices, cost, memory_limit, reach, split)
    search = OrderSearch(problem, effort)
    search.compare_hand_written()
    search.compare_rules()
    search.vary()
    search.anneal()
    search.join()
    # It is valid: all actions of an order that takes finite seconds can start.
    assert search.best.seconds < np.inf
    return problem.schedule(search.best.order, search.best.split)


def hold_less(problem: OrderingProblem, schedule: Schedule, seconds: float, effort: float) -> Schedule:
    """Returns an order with less memory on the schedule's fullest rank that takes at most a thousandth longer than its
    `seconds`, or the schedule itself."""
    longest = seconds * (1 + _ALIKE)
    shares = [*_SHARES]
    order, split = problem.order(schedule)
    held = peaks(problem.graph(split), order)
    less = copy(problem)
    while shares:
        less.limits = np.maximum(shares.pop() * held, problem.least_memory) * (1 + ROUNDING)
        if max(less.limits) >= _WORTH * max(held):
            continue
        search = OrderSearch(less, min(effort / 8, _MOST_LESS * 3 * problem.num_units), longest)
        search.compare_rules()
        search.anneal(_HEATS[-1:])
        if search.best.seconds <= longest:
            search.join()
            held = peaks(problem.graph(search.best.split), search.best.order)
            shares = [*_SHARES]
            schedule = problem.schedule(search.best.order, search.best.split)
    return schedule


def step_lower_bound(
    placement: Sequence[int],
    num_microbatches: int,
    num_slices: SliceCounts,
    cost: CostModel,
    *,
    memory_limit: Sequence[float] | None = None,
    reach: Sequence[Sequence[int]] | None = None,
    split: bool = True,
) -> float:
    """Returns a lower bound of the step, in seconds, for any order of these actions.

    The arguments are those of `find_order`.

    Every backward counts as a part d = min(B, I), after which the input gradient can leave, and a rest
    w = min(B, I+W) - d. A *chain* is a microbatch (with reach: slices of it that attend to each other); its
    *turn* is the start of the last stage's first backward. All its forwards precede its turn, all its
    backwards follow it, and at its turn every rank holds it whole. For an action, head is the longest path before
    it and tail the longest path after it, messages included. J(actions) is the makespan of the best preemptive
    schedule of one rank or channel under the heads and tails (Jackson 1955, Carlier 1982): for all sets of
    actions, the least head + the sum of times + the least tail. The bound is the largest of

    1. head(turn) + tail(turn), where a head is at least J of the chain's forwards, and a tail at least J of its
       backwards, on every rank and channel; heads and tails of all the chain's actions grow with its turn's;
    2. J of all actions of a rank, and of all messages of a channel, with these heads and tails;
    3. for a rank with limit L: least head + sum(bytes · time held)/L + least tail, a unit being held at
       least for the path from its forward by its chain's turn to the end of its w;
    4. for such a rank: least head(turn) + (chains-1)/k · gap(k) + least tail(turn), where gap(k) is the time from
       a turn to the k-th turn after it. Bytes of k+1 chains above L must be freed after the one turn and
       taken before the other: gap(1) is J of the backwards that must have freed and the forwards that wait
       for it, with heads from one turn and tails to the next.
    """
    return makespan_bound(OrderingProblem(placement, num_microbatches, num_slices, cost, memory_limit, reach, split))
