"""Orders of a sliced step: by the rules of list scheduling, or one that has a name."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from slipstream.array_types import Flags, Floats
from slipstream.errors import SlipstreamError
from slipstream.planner.order.list_scheduling import place
from slipstream.planner.order.local_search import makespan, peak, start_times
from slipstream.planner.order.order_search import PriorityRule
from slipstream.planner.order.ordering_problem import ActionGraph, ActionOrder
from slipstream.planner.steps.alone_times import alone_starts
from slipstream.planner.steps.sliced_step import SlicedStep
from slipstream.planner.steps.step_graph import StepGraph
from slipstream.planner.steps.step_problem import StepProblem
from slipstream.schedule import Op, make_schedule, split_backwards


@dataclass(frozen=True, eq=False)
class StepOrder:
    """An order of a step's actions, and its simulated seconds."""

    seconds: float
    step: SlicedStep
    order: ActionOrder
    split: Flags  # whose backwards are I and W


class StepOrders:
    """The orders of one step's slices."""

    def __init__(self, problem: StepProblem, step: SlicedStep) -> None:
        self.problem, self.step = problem, step
        self.graph = StepGraph(step, problem.ranks, problem.limits)
        self._splittings = self.graph.splittings(problem.split)
        self._graphs: dict[str, ActionGraph] = {}

    @property
    def num_actions(self) -> int:
        """The number of actions with whole backwards."""
        return 2 * self.graph.num_units

    def by(self, rule: PriorityRule) -> StepOrder:
        """Returns the order of a rule of list scheduling, which fits the memory."""
        split = self._splittings[rule.splitting]
        if rule.splitting not in self._graphs:
            self._graphs[rule.splitting] = self.graph.with_split(split)
        graph = self._graphs[rule.splitting]
        alone, before, backward = self._priorities
        priority = alone + rule.lag * before - rule.hurry * alone.max() * backward
        order, start = place(graph, priority, 0.0, rule.patience)
        return StepOrder(float((start + graph.seconds)[graph.exists].max()), self.step, order, split)

    @cached_property
    def _priorities(self) -> tuple[Floats, Floats, Flags]:
        """Each action's start if its microbatch ran alone; the busiest rank's work of all microbatches before; and
        whether it is of the backward."""
        problem, step = self.problem, self.step
        forward, whole = step.seconds[Op.F], step.seconds[Op.B]
        crosses = np.diff(problem.ranks, prepend=problem.ranks[0]) != 0
        starts = alone_starts(forward, whole, step.links[0], crosses, self.graph.microbatch)
        alone = np.concatenate([starts.ravel(), (starts[1] + whole).ravel()])
        work = np.zeros((problem.num_ranks, len(step.counts)))
        np.add.at(work, problem.ranks, np.add.reduceat(forward + whole, step.firsts, axis=1))
        busiest = work[work.sum(axis=1).argmax()]
        before = np.tile((np.cumsum(busiest) - busiest)[self.graph.microbatch], 3 * len(forward))
        return alone, before, np.arange(len(alone)) >= self.graph.num_units

    def named(self, name: str) -> StepOrder | None:
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
        order, split = self.graph.order(schedule)
        graph = self.graph.with_split(split)
        if any(peak(graph, order, rank) > limit for rank, limit in enumerate(graph.limits)):
            return None
        return StepOrder(makespan(graph, start_times(graph, order)), self.step, order, split)
