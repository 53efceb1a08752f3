"""The search for the plan of a step: groups and slices by their lower bounds, orders by list scheduling."""

from __future__ import annotations

from itertools import product

import numpy as np

from slipstream.errors import SlipstreamError
from slipstream.planner.order.list_scheduling import MeasuredOrder, PriorityRule
from slipstream.planner.steps.step_candidates import candidates, lower_bound
from slipstream.planner.steps.step_orders import StepOrders
from slipstream.planner.steps.step_plan import StepPlan
from slipstream.planner.steps.step_problem import StepProblem

_FIRST = (
    PriorityRule("sent", 0.5, -1.0, 0.0),
    PriorityRule("none", 0.5, -1.0, 0.0),
    PriorityRule("none", 1.0, 0.5, 0.0),
)  # of every candidate
_LAGS, _HURRIES, _PATIENCES = (0.5, 1.0, 2.0, 0.0), (-1.0, 0.0, 0.25, 0.5, 1.0), (0.0, 0.5)
_NAMED = 5  # as many times as long a schedule that has a name takes to make


class NothingFitsError(SlipstreamError):
    """No plan that was searched fits the memory; the message says why."""


def find_step_plan(problem: StepProblem) -> StepPlan:
    """Returns the plan with the shortest simulated step that the search finds. The same problem gives the same plan.

    Sequences are packed into microbatches of one, two and four slices' work, long ones left alone, and all cut into
    slices of equal planned time. Those that can't beat the best known by their lower bound aren't scheduled. The best
    is scheduled by many rules; or each in the order of `problem.schedule`.

    Raises:
        NothingFitsError: where a sequence is too long for a rank's memory: which, and how long it may be.
    """
    return _StepSearch(problem).plan()


class _StepSearch:
    """The best order so far, and the effort that is left."""

    def __init__(self, problem: StepProblem) -> None:
        self.problem, self.effort = problem, problem.effort
        self.best: tuple[MeasuredOrder, StepOrders] | None = None

    def plan(self) -> StepPlan:
        """Returns the best order's plan."""
        problem, steps = self.problem, [*candidates(self.problem)]
        bounds = [lower_bound(problem, step) for step in steps]
        rules = [rule for rule in _FIRST if problem.split or rule.splitting == "none"]
        for number in np.argsort(bounds, kind="stable").tolist():
            if self.best and (bounds[number] >= self.best[0].seconds or self.effort < problem.effort / 3):
                break
            self._try(StepOrders(problem, steps[number]), rules)
        if self.best is None:
            raise _nothing_fits(self.problem)
        if self.problem.schedule is None:
            self._try(self.best[1], self._all_rules())
        found, orders = self.best
        return orders.plan(found)

    def _try(self, orders: StepOrders, rules: list[PriorityRule]) -> None:
        if self.problem.schedule is not None:
            self.effort -= _NAMED * orders.num_actions
            self._offer(orders.named(self.problem.schedule), orders)
            return
        for rule in rules:
            if self.effort < orders.num_actions:
                return
            self.effort -= orders.num_actions
            self._offer(orders.by(rule), orders)

    def _offer(self, found: MeasuredOrder | None, orders: StepOrders) -> None:
        if found is not None and (self.best is None or found.seconds < self.best[0].seconds):
            self.best = found, orders

    def _all_rules(self) -> list[PriorityRule]:
        names = ("sent", "none", "all") if self.problem.split else ("none",)
        every = (PriorityRule(*each) for each in product(names, _LAGS, _HURRIES, _PATIENCES))
        return [rule for rule in every if rule.splitting != "none" or rule.patience == 0]


def _nothing_fits(problem: StepProblem) -> NothingFitsError:
    """Says which sequence is too long, or which microbatch too large, for the memory of some rank."""
    number = int(np.argmax(problem.lengths))
    length, most = problem.lengths[number], int(max(problem.most_tokens, 0))
    if length > most:
        return NothingFitsError(
            f"inputs[{number}] has {length} tokens, but the memory limit leaves room for {most} in a "
            "microbatch. Cut it, or give more memory, more ranks or memory.recompute='full'."
        )
    name = "" if problem.schedule is None else f" in the order of {problem.schedule!r}"
    return NothingFitsError(
        f"nothing that was searched for {len(problem.lengths)} sequences of up to {length} tokens (sequence {number}) "
        f"fits the memory limit{name}. Leave the schedule, the microbatches and the slices to the plan, or give fewer "
        "or shorter sequences."
    )
