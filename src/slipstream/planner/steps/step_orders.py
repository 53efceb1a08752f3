"""Orders of a sliced step: by the rules of list scheduling, or one that has a name."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from slipstream.array_types import Floats
from slipstream.errors import SlipstreamError
from slipstream.planner.order.list_scheduling import ListScheduler, MeasuredOrder, PriorityRule, measure_order
from slipstream.planner.order.makespan_bounds import longest_paths
from slipstream.planner.order.ordering_problem import ROUNDING, StepActions, UnitTimes
from slipstream.planner.steps.sliced_step import SlicedStep
from slipstream.planner.steps.step_plan import StepPlan
from slipstream.planner.steps.step_problem import StepProblem
from slipstream.schedule import Op, make_schedule, split_backwards


@dataclass(frozen=True, eq=False)
class StepOrders:
    """The orders of one step's slices."""

    problem: StepProblem
    step: SlicedStep

    @cached_property
    def _actions(self) -> StepActions:
        return StepActions(self.problem.placement, self.step.counts.tolist())

    @cached_property
    def _times(self) -> UnitTimes:
        step = self.step
        return UnitTimes.of_slices(step.seconds, step.links, step.held, self.problem.rates.num_frozen)

    @property
    def _limits(self) -> Floats:
        limits: Floats = self.problem.limits * (1 + ROUNDING)
        return limits

    @property
    def num_actions(self) -> int:
        """The number of actions with whole backwards."""
        return 2 * self._actions.num_units

    @cached_property
    def _scheduler(self) -> ListScheduler:
        """List scheduling by each action's start if its microbatch ran alone and each stage had a rank, with whole
        backwards, and by the busiest rank's work of all microbatches before."""
        problem, step, actions = self.problem, self.step, self._actions
        forward, whole = step.seconds[Op.F], step.seconds[Op.B]
        work = np.zeros((problem.num_ranks, len(step.counts)))
        np.add.at(work, problem.ranks, np.add.reduceat(forward + whole, step.firsts, axis=1))
        busiest = work[work.sum(axis=1).argmax()]
        none = np.zeros(actions.num_units, np.bool_)
        return ListScheduler(
            actions,
            self._times,
            self._limits,
            problem.split,
            alone=longest_paths(actions.graph_of(self._times, self._limits, none)),
            before=(np.cumsum(busiest) - busiest)[actions.microbatch],
            period=1.0,
        )

    def by(self, rule: PriorityRule) -> MeasuredOrder:
        """Returns the order of a rule of list scheduling, which fits the memory."""
        return self._scheduler.place(rule)

    def named(self, name: str) -> MeasuredOrder | None:
        """Returns the order of a schedule that has a name; None where it doesn't fit the memory.

        Raises:
            SlipstreamError: where it places the stages on other ranks.
        """
        problem, counts = self.problem, self.step.counts.tolist()
        schedule = make_schedule(name, problem.num_ranks, len(counts), counts, len(problem.ranks) // problem.num_ranks)
        if schedule.placement != problem.placement:
            raise SlipstreamError(
                f"schedule={name!r} has its stages on the ranks {[*schedule.placement]}, but the pipeline on "
                f"{[*problem.placement]}. Make them equal."
            )
        if problem.split and Op.W not in schedule.ops:
            schedule = split_backwards(schedule)
        return measure_order(self._actions, self._times, self._limits, schedule)

    def plan(self, found: MeasuredOrder) -> StepPlan:
        """Returns the plan of the step in an order."""
        schedule = self._actions.schedule(found.order, found.split)
        return StepPlan(self.step.rows.groups, self.step.slices, schedule, found.seconds)
