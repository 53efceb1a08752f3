"""List scheduling with look-ahead and a memory limit: the rules by which it chooses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from slipstream.array_types import Flags, Floats, Ints
from slipstream.planner.order.ordering_problem import StepActions, UnitTimes
from slipstream.schedule import Schedule
from slipstream.schedule.compiled_sweep import makespan, peak, place, start_times
from slipstream.schedule.sweep import ActionGraph, ActionOrder


class MeasuredOrder(NamedTuple):
    """An order, the seconds it takes, and which backwards it splits."""

    seconds: float
    order: ActionOrder
    split: Flags


class PriorityRule(NamedTuple):
    """The priorities of list scheduling in numbers; see `place` for the last two.

    An action's priority is its start if its microbatch ran alone, `lag` times the busiest rank's work of the
    microbatches before it later, and for backwards `hurry` round trips earlier: lag 0 is breadth first, a large one
    depth first; hurry 1 tends to 1F1B, -1 to a flush.
    """

    splitting: str  # backwards to split: "all", "sent" (to another rank) or "none"
    lag: float
    hurry: float
    patience: float
    window: float = 0  # mean times of an action


class ListScheduler:
    """The orders of a step's actions by rules.

    Args:
        actions: of the step.
        times: their costs.
        limits: the bytes of each rank.
        split: whether backwards may be split.
        alone: returns the start of each action if its microbatch ran alone, from the graph of whole backwards. None:
            `alone_starts` does, with backwards split where they may be.
        before: the periods of the microbatches before each action's. None: one for each.
        period: the busiest rank's work in one. None: its mean work of a microbatch.
    """

    def __init__(
        self,
        actions: StepActions,
        times: UnitTimes,
        limits: Sequence[float] | Floats,
        split: bool,
        alone: Callable[[ActionGraph], Floats] | None = None,
        before: Floats | Ints | None = None,
        period: float | None = None,
    ) -> None:
        self._actions = actions
        self._times = times
        self._limits = limits
        self.splittings = actions.splittings(split)
        self._graphs: dict[str, ActionGraph] = {}
        whole = self.graph("none")
        microbatch = actions.arrays.microbatch
        self.alone = alone(whole) if alone else alone_starts(self.graph("all") if split else whole, microbatch)
        self._before = microbatch if before is None else before
        self._backward = np.arange(len(self.alone)) >= actions.num_units
        if period is None:
            period = float(np.bincount(whole.rank, whole.seconds).max()) / actions.num_microbatches
        self._period, self._trip = period, float(self.alone.max())

    def graph(self, splitting: str) -> ActionGraph:
        """Returns the arrays of the actions with the backwards that a splitting splits."""
        if splitting not in self._graphs:
            self._graphs[splitting] = self._actions.graph_of(self._times, self._limits, self.splittings[splitting])
        return self._graphs[splitting]

    def priority(self, rule: PriorityRule) -> Floats:
        """Returns the priority of each action."""
        late = rule.lag * self._period * self._before
        priority: Floats = self.alone + late - rule.hurry * self._trip * self._backward
        return priority

    def place(self, rule: PriorityRule, priority: Floats | None = None, window: float = 0.0) -> MeasuredOrder:
        """Returns the order of a rule, which keeps to the limits; by default with its own priorities."""
        graph = self.graph(rule.splitting)
        order, start = place(graph, self.priority(rule) if priority is None else priority, window, rule.patience)
        return MeasuredOrder(makespan(graph, start), order, self.splittings[rule.splitting])


def measure_order(
    actions: StepActions, times: UnitTimes, limits: Sequence[float] | Floats, schedule: Schedule
) -> MeasuredOrder | None:
    """Returns a schedule's order and its seconds; None if it doesn't fit the memory."""
    order, split = actions.order(schedule)
    graph = actions.graph_of(times, limits, split)
    if (peaks(graph, order) > graph.limits).any():
        return None
    return MeasuredOrder(makespan(graph, start_times(graph, order)), order, split)


def peaks(graph: ActionGraph, order: ActionOrder) -> Floats:
    """Returns each rank's peak of activations in an order, in bytes."""
    return np.array([peak(graph, order, rank) for rank in range(len(graph.limits))])


def alone_starts(graph: ActionGraph, microbatch: Ints) -> Floats:
    """Returns each action's start if its microbatch ran alone, in the order of the numbers and without a limit."""
    graph = graph._replace(limits=np.full(len(graph.limits), np.inf))
    costs = np.stack([graph.seconds, graph.link_seconds, graph.link_occupied])
    starts_by_costs: dict[bytes, Floats] = {}  # costs of a microbatch -> starts in it
    alone = np.empty(len(microbatch))
    for mine in np.split(np.argsort(microbatch, kind="stable"), np.cumsum(np.bincount(microbatch))[:-1]):
        if (costs_here := costs[:, mine].tobytes()) not in starts_by_costs:
            exists = np.zeros_like(graph.exists)
            exists[mine] = graph.exists[mine]
            alone_graph = graph._replace(exists=exists)
            starts_by_costs[costs_here] = place(alone_graph, np.arange(float(len(alone))), 0.0, 0.0)[1][mine]
        alone[mine] = starts_by_costs[costs_here]
    return alone
