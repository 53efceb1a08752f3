"""The search for an order: hand-written schedules, list scheduling by many rules, local search."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from itertools import product
from typing import NamedTuple

import numpy as np

from slipstream.array_types import Flags, Floats
from slipstream.planner.order.list_scheduling import place
from slipstream.planner.order.local_search import anneal, makespan, peak, start_times
from slipstream.planner.order.makespan_bounds import makespan_bound
from slipstream.planner.order.ordering_problem import ROUNDING, ActionOrder, OrderingProblem
from slipstream.schedule import GENERATORS, STAGES_PER_RANK, Op, Schedule, make_schedule, split_backwards

_MAX_TRIALS, _MAX_STEPS, _MAX_JOINS = 600, 15_000, 64  # enough for small problems, whatever effort is left
_HEATS = (0.005, 0.001)


def hand_written(problem: OrderingProblem) -> Iterator[Schedule]:
    """Yields every hand-written schedule for this placement, whole and with its backwards split."""
    per_rank = len(problem.placement) // problem.num_ranks
    counts = (problem.num_ranks, problem.num_microbatches, problem.slice_counts, per_rank)
    every = (make_schedule(name, *counts) for name in GENERATORS if per_rank in STAGES_PER_RANK[name])
    for schedule in every:
        if schedule.placement != problem.placement:
            continue
        splits = Op.W in schedule.ops
        if problem.split or not splits:
            yield schedule
        if problem.split and not splits:
            yield split_backwards(schedule)


class MeasuredOrder(NamedTuple):
    """An order, the seconds it takes, and which backwards it splits."""

    seconds: float
    order: ActionOrder
    split: Flags


def measure_order(problem: OrderingProblem, schedule: Schedule) -> MeasuredOrder | None:
    """Returns the schedule's order and its seconds; None if it doesn't fit the memory."""
    order, split = problem.order(schedule)
    graph = problem.graph(split)
    if any(peak(graph, order, rank) > limit for rank, limit in enumerate(problem.limits)):
        return None
    return MeasuredOrder(makespan(graph, start_times(graph, order)), order, split)


class PriorityRule(NamedTuple):
    """The priorities of list scheduling in numbers; see `place` for the last two.

    An action's priority is its start if its microbatch ran alone, `lag` periods later for every microbatch
    before it, and for backwards `hurry` round trips earlier: lag 0 is breadth first, a large one depth first;
    hurry 1 tends to 1F1B, -1 to a flush.
    """

    splitting: str  # which backwards are split: "all", those "sent" to another rank, "none"
    lag: float
    hurry: float
    patience: float
    window: float = 0  # in mean times of an action


class OrderSearch:
    """The search: the best order so far, and the effort that is left."""

    def __init__(self, problem: OrderingProblem, effort: float) -> None:
        self.problem, self.effort = problem, effort
        self.size = 3 * problem.num_units
        self.bound = makespan_bound(problem)
        self.random = np.random.default_rng(0)
        self.splittings = splittings(problem)
        self.graphs = {name: problem.graph(split) for name, split in self.splittings.items()}
        self.best = MeasuredOrder(np.inf, *problem.order(problem.whole))
        self.rules: dict[PriorityRule, float] = {}
        self._measure_times()

    def _measure_times(self) -> None:
        """Measures each action's start if its microbatch ran alone, that run, and a rank's work per microbatch."""
        problem = self.problem
        microbatches = np.repeat(np.arange(problem.num_microbatches), problem.slice_counts)
        self.microbatch = np.tile(microbatches, 3 * len(problem.placement))
        graph = self.graphs["all" if problem.split else "none"]
        graph = graph._replace(limits=np.full(problem.num_ranks, np.inf))
        costs = np.stack([graph.seconds, graph.link_seconds, graph.link_occupied])
        found: dict[bytes, Floats] = {}  # the starts in a microbatch of these costs
        self.alone = np.empty(self.size)
        for number in range(problem.num_microbatches):
            mine = self.microbatch == number
            if (costs_here := costs[:, mine].tobytes()) not in found:
                alone = graph._replace(exists=graph.exists & mine)
                found[costs_here] = place(alone, np.arange(float(self.size)), 0.0, 0.0)[1][mine]
            self.alone[mine] = found[costs_here]
        self.trip = float(self.alone.max())
        self.backward = np.arange(self.size) >= problem.num_units
        graph = self.graphs["none"]
        self.period = float(np.bincount(graph.rank, graph.seconds).max()) / problem.num_microbatches
        self.mean = float(graph.seconds[: 2 * problem.num_units].mean())

    def may_improve(self, effort: float = 0) -> bool:
        """Returns whether a better order may exist, and more than this effort is left."""
        return self.effort > effort and self.best.seconds > self.bound * (1 + ROUNDING)

    def compare_hand_written(self) -> None:
        """Tries the hand-written schedules."""
        for schedule in [self.problem.whole, *hand_written(self.problem)]:
            if candidate := measure_order(self.problem, schedule):
                self._offer(candidate)

    def _offer(self, candidate: MeasuredOrder) -> None:
        if candidate.seconds < self.best.seconds * (1 - 1e-12):
            self.best = candidate

    def compare_rules(self) -> None:
        """Tries list scheduling by a grid of rules."""
        for lag, hurry, patience in product((0, 0.25, 0.5, 1, 2, 4), (-1, 0, 0.25, 0.5, 1, 2), (0.0, 0.5, 1.0)):
            for splitting in self.splittings:
                if self.may_improve() and (splitting != "none" or patience == 0):
                    rule = PriorityRule(splitting, lag, hurry, patience)
                    self.rules[rule] = self._try(rule, self._priority(rule))

    def _priority(self, rule: PriorityRule) -> Floats:
        priority: Floats = (
            self.alone
            + rule.lag * self.period * self.microbatch
            - rule.hurry * self.trip * self.backward
            + 1e-9 * self.mean * np.arange(self.size)
        )
        return priority

    def _try(self, rule: PriorityRule, priority: Floats) -> float:
        graph = self.graphs[rule.splitting]
        order, start = place(graph, priority, rule.window * self.mean, rule.patience)
        self.effort -= self.size
        candidate = MeasuredOrder(makespan(graph, start), order, self.splittings[rule.splitting])
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
                splits = {name: (flags == self.best.split).mean() for name, flags in self.splittings.items()}
                start = start_times(self.problem.graph(self.best.split), self.best.order)
                self._try(rule._replace(splitting=max(splits, key=splits.__getitem__)), start + noise)

    def anneal(self) -> None:
        """Improves the best order by local search, each time at a lower temperature."""
        times = np.stack([self.problem.seconds[op] for op in (Op.B, Op.I, Op.W)])
        if not self.problem.split:
            times[1:] = np.inf
        for seed, heat in enumerate(_HEATS):
            num_steps = min(int(self.effort / (len(_HEATS) - seed) / self.size * 2), _MAX_STEPS)
            if not self.may_improve() or not num_steps:
                return
            _, order, split = self.best
            graph = self.problem.graph(split)
            found = anneal(graph, order, split, times, num_steps, heat, seed)
            self.effort -= num_steps * self.size / 2
            self._offer(MeasuredOrder(*found))

    def join(self) -> None:
        """Merges I and W that follow each other into B where that costs nothing."""
        num_units, units = self.problem.num_units, []
        for row in self.best.order.by_rank():
            follows = (row[1:] >= 2 * num_units) & (row[:-1] == row[1:] - num_units)
            units += (row[:-1][follows] - num_units).tolist()
        waiting = [units] if units else []
        for _ in range(_MAX_JOINS):
            if not waiting:
                return
            units = waiting.pop()
            joined = self._joined(units)
            if joined.seconds <= self.best.seconds * (1 + 1e-12):
                self.best = joined
            elif len(units) > 1:
                middle = len(units) // 2
                waiting += [units[:middle], units[middle:]]

    def _joined(self, units: list[int]) -> MeasuredOrder:
        split = self.best.split.copy()
        split[units] = False
        graph = self.problem.graph(split)
        rows = [row[graph.exists[row]] for row in self.best.order.by_rank()]
        order = ActionOrder.of(rows, self.problem.longest_row)
        return MeasuredOrder(makespan(graph, start_times(graph, order)), order, split)


def splittings(problem: OrderingProblem) -> dict[str, Flags]:
    """Returns the choices of which backwards list scheduling splits."""
    none = np.zeros(problem.num_units, np.bool_)
    if not problem.split:
        return {"none": none}
    sent = problem.graph(none).channel[problem.num_units : 2 * problem.num_units] >= 0
    return {"all": ~none, "sent": sent, "none": none}
