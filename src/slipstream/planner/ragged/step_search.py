"""The search for the plan of a step: groups and slices by their lower bounds, orders by list scheduling."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import inf

import numpy as np

from slipstream.array_types import Floats, Ints
from slipstream.planner.best_first import BestFirst
from slipstream.planner.order.given_order import given_order
from slipstream.planner.order.list_scheduling import MeasuredOrder, PriorityRule
from slipstream.planner.order.makespan_bounds import longest_paths, rank_bounds
from slipstream.planner.order.ordering_problem import StepActions, UnitTimes
from slipstream.planner.order.quick_orders import GIVEN, QuickOrders, rules_of
from slipstream.planner.ragged.packing import groupings
from slipstream.planner.ragged.sliced_step import PackedRows, SlicedStep
from slipstream.planner.ragged.step_problem import StepPlan, StepProblem
from slipstream.planner.room import OutOfMemoryError
from slipstream.schedule import Op


def candidates(problem: StepProblem) -> Iterator[SlicedStep]:
    """Yields groups in slices of equal planned time that fit the ranks' memory, each once."""
    seen = set()
    for groups, slice_work in groupings(problem):
        rows = PackedRows(groups, problem.lengths, problem.rates, problem.cuts)
        step = SlicedStep(rows, rows.cut(_slice_counts(problem, rows.work, slice_work)))
        if (groups, step.slices) not in seen and fits(problem, step):
            seen.add((groups, step.slices))
            yield step


def _slice_counts(problem: StepProblem, work: Floats, slice_work: float) -> Ints:
    """Returns the number of slices of each microbatch."""
    given = problem.given
    wanted = work / slice_work if given.is_open("num_slices") else given.num_slices * work / work.max()
    counts: Ints = np.maximum(np.round(wanted), 1).astype(np.int64)
    return counts


def fits(problem: StepProblem, step: SlicedStep) -> bool:
    """Returns whether every rank can hold all slices of each microbatch, as any order needs."""
    if problem.room is None:
        return True
    held = np.zeros((problem.num_ranks, len(step.counts)))
    np.add.at(held, problem.ranks, np.add.reduceat(step.held, step.firsts, axis=1))
    return bool((held <= problem.limits[:, None]).all())


def lower_bound(problem: StepProblem, step: SlicedStep) -> float:
    """Returns seconds that no order of these slices beats."""
    bounds = rank_bounds(
        step.seconds,
        problem.ranks,
        step.firsts,
        step.links[0],
        sends_back=problem.rates.sends_back,
        split=problem.may_split,
    )
    return float(np.max(bounds))


def orders_of(problem: StepProblem, step: SlicedStep) -> QuickOrders:
    """Returns the orders of one step's slices: the one that is given, or those of list scheduling by each action's
    start if its microbatch ran alone and each stage had a rank, with whole backwards, and by the busiest rank's work of
    all microbatches before.

    Raises:
        SlipstreamError: where the given order has its stages on other ranks.
    """
    counts = step.counts.tolist()
    given = None
    if not problem.given.is_open("schedule"):
        given = given_order(problem.given.schedule, problem.placement, len(counts), counts, problem.split)
    work = np.zeros((problem.num_ranks, len(counts)))
    np.add.at(work, problem.ranks, np.add.reduceat(step.seconds[Op.F] + step.seconds[Op.B], step.firsts, axis=1))
    busiest = work[work.sum(axis=1).argmax()]
    actions = StepActions(problem.placement, counts)
    return QuickOrders(
        actions,
        UnitTimes.of_slices(step.seconds, step.links, step.held, problem.rates.sends_back),
        problem.limits,
        problem.split,
        given,
        alone=longest_paths,
        before=(np.cumsum(busiest) - busiest)[actions.arrays.microbatch],
        period=1.0,
    )


_FIRST = (
    PriorityRule("sent", 0.5, -1.0, 0.0),
    PriorityRule("none", 0.5, -1.0, 0.0),
    PriorityRule("none", 1.0, 0.5, 0.0),
)  # rules tried on every candidate
_LAGS = (0.5, 1.0, 2.0, 0.0)
_HURRIES = (-1.0, 0.0, 0.25, 0.5, 1.0)
_PATIENCES = (0.0, 0.5)
_NAMED = 5  # time of a named schedule, as a multiple of a rule's


def search_rows(problem: StepProblem) -> StepPlan:
    """Returns the plan with the shortest simulated step of all rows that are tried within the problem's room.

    Sequences are packed into microbatches of one, two and four slices' work, long ones left alone, and all cut into
    slices of equal planned time. Those that can't beat the best known by their lower bound aren't scheduled. The best
    is scheduled by many rules; or each in the order that is given.

    Raises:
        OutOfMemoryError: where a sequence is too long for a rank's memory: which, and how long it may be.
    """
    return _StepSearch(problem).plan()


class _StepSearch:
    """The best order so far, and the effort that is left."""

    def __init__(self, problem: StepProblem) -> None:
        self.problem = problem
        self.effort = problem.effort
        self.best: tuple[MeasuredOrder, SlicedStep, QuickOrders] | None = None

    def plan(self) -> StepPlan:
        """Returns the best order's plan."""
        problem = self.problem
        waiting = BestFirst[SlicedStep]()
        for step in candidates(problem):
            waiting.add(lower_bound(problem, step), step)
        is_given = not problem.given.is_open("schedule")
        rules = [rule for rule in _FIRST if problem.split or rule.splitting == "none"]
        while (self.best is None or self.effort >= problem.effort / 3) and (
            found := waiting.next_below(inf if self.best is None else self.best[0].seconds)
        ):
            _, step = found
            self._try(step, orders_of(problem, step), (GIVEN,) if is_given else rules)
        if self.best is None:
            raise _nothing_fits(self.problem)
        if not is_given:
            names = ("sent", "none", "all") if problem.split else ("none",)
            self._try(*self.best[1:], rules_of(names, _LAGS, _HURRIES, _PATIENCES))
        order, step, orders = self.best
        schedule = orders.actions.schedule(order.order, order.split)
        return StepPlan(step.rows.groups, step.slices, schedule, order.seconds)

    def _try(self, step: SlicedStep, orders: QuickOrders, rules: Sequence[PriorityRule]) -> None:
        effort = 2 * orders.actions.num_units  # actions with whole backwards
        for rule in rules:
            if rule is not GIVEN and self.effort < effort:
                return
            self.effort -= effort * (_NAMED if rule is GIVEN else 1)
            found = orders.by(rule)
            if found is not None and (self.best is None or found.seconds < self.best[0].seconds):
                self.best = found, step, orders


def _nothing_fits(problem: StepProblem) -> OutOfMemoryError:
    """Says which sequence is too long, or which microbatch too large, for the memory of some rank."""
    longest = int(np.argmax(problem.lengths))
    length = problem.lengths[longest]
    most = int(max(problem.most_tokens, 0))
    if length > most:
        return OutOfMemoryError(
            f"inputs[{longest}] has {length} tokens, but the memory limit leaves room for {most} in a "
            "microbatch. Cut it, or give more memory or more ranks, or let memory.recompute keep less."
        )
    name = "" if problem.given.is_open("schedule") else f" in the order of {problem.given.schedule!r}"
    return OutOfMemoryError(
        f"nothing that was searched for {len(problem.lengths)} sequences of up to {length} tokens (sequence {longest}) "
        f"fits the memory limit{name}. Leave the schedule, the microbatches and the slices to the plan, or give fewer "
        "or shorter sequences."
    )
