"""List scheduling with look-ahead and a memory limit, compiled, and the rules by which it chooses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from slipstream.array_types import Flags, Floats, Ints
from slipstream.numba_jit import compiled
from slipstream.planner.order.ordering_problem import StepActions, UnitTimes
from slipstream.schedule import Schedule
from slipstream.simulator.action_graph import ActionGraph, ActionOrder
from slipstream.simulator.time_kernel import makespan, peak, start_times

_NEVER = np.inf


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

    splitting: str  # which backwards are split: "all", those "sent" to another rank, "none"
    lag: float
    hurry: float
    patience: float
    window: float = 0  # in mean times of an action


class ListScheduler:
    """The orders of a step's actions by rules.

    Args:
        actions: of the step.
        times: their costs.
        limits: the bytes of each rank.
        split: whether backwards may be split.
        alone: the start of each action if its microbatch ran alone, or its function of the graph of whole backwards.
            None: `alone_starts` does.
        before: the periods of the microbatches before each action's. None: one for each.
        period: the busiest rank's work in one. None: its mean work of a microbatch.
    """

    def __init__(
        self,
        actions: StepActions,
        times: UnitTimes,
        limits: Sequence[float] | Floats,
        split: bool,
        alone: Floats | Callable[[ActionGraph], Floats] | None = None,
        before: Floats | Ints | None = None,
        period: float | None = None,
    ) -> None:
        self._actions, self._times, self._limits = actions, times, limits
        self.splittings = actions.splittings(split)
        self._graphs: dict[str, ActionGraph] = {}
        self.alone = self._alone(split) if alone is None else alone(self.graph("none")) if callable(alone) else alone
        self._before = actions.microbatch if before is None else before
        self._backward = np.arange(len(self.alone)) >= actions.num_units
        if period is None:
            graph = self.graph("none")
            period = float(np.bincount(graph.rank, graph.seconds).max()) / actions.num_microbatches
        self._period, self._trip = period, float(self.alone.max())

    def graph(self, splitting: str) -> ActionGraph:
        """Returns the arrays of the actions with the backwards that a splitting splits."""
        if splitting not in self._graphs:
            self._graphs[splitting] = self._actions.graph_of(self._times, self._limits, self.splittings[splitting])
        return self._graphs[splitting]

    def _alone(self, split: bool) -> Floats:
        actions, whole = self._actions, self.graph("all" if split else "none")
        return alone_starts(whole, actions.microbatch, actions.num_microbatches)

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
    if any(peak(graph, order, rank) > limit for rank, limit in enumerate(graph.limits)):
        return None
    return MeasuredOrder(makespan(graph, start_times(graph, order)), order, split)


def alone_starts(graph: ActionGraph, microbatch: Ints, num_microbatches: int) -> Floats:
    """Returns each action's start if its microbatch ran alone, in the order of the numbers and without a limit."""
    graph = graph._replace(limits=np.full(len(graph.limits), _NEVER))
    costs = np.stack([graph.seconds, graph.link_seconds, graph.link_occupied])
    starts_by_costs: dict[bytes, Floats] = {}  # the starts in a microbatch of these costs
    alone = np.empty(len(microbatch))
    for index in range(num_microbatches):
        mine = microbatch == index
        if (costs_here := costs[:, mine].tobytes()) not in starts_by_costs:
            alone_graph = graph._replace(exists=graph.exists & mine)
            starts_by_costs[costs_here] = place(alone_graph, np.arange(float(len(mine))), 0.0, 0.0)[1][mine]
        alone[mine] = starts_by_costs[costs_here]
    return alone


@compiled
def _update_room(limit: float, held: Floats, missing_bytes: Floats, open_actions: Ints, room: Floats) -> None:
    """Updates room[x]: the bytes that a forward of chain x may take on a rank so that every older chain can still end.

    Oldest first: chain k can end if the bytes that it lacks, and those that it and all younger chains hold, fit.
    """
    younger, least = held.sum(), _NEVER
    for chain in range(len(held)):
        room[chain] = least
        if open_actions[chain]:
            least = min(least, limit - younger - missing_bytes[chain])
        younger -= held[chain]


@compiled
def _empty(num_ranks: int, longest: int) -> ActionOrder:
    return ActionOrder(np.empty((num_ranks, longest), np.int64), np.zeros(num_ranks, np.int64))


@compiled
def _append(order: ActionOrder, rank: int, number: int) -> None:
    order.rows[rank, order.lengths[rank]] = number
    order.lengths[rank] += 1


@compiled
def place(graph: ActionGraph, priority: Floats, window: float, patience: float) -> tuple[ActionOrder, Floats]:
    """Returns the order of list scheduling and its start times. It always ends, within the memory limits.

    The rank that can start an action first does. Of the forwards and backwards that it could start within
    `window` seconds of the earliest, it takes the one with the lowest `priority`. Weight gradients, first in
    first out, fill gaps of at least `patience` times their length.

    A forward is admitted only if every older chain's remaining forwards still fit once the chains older than
    that one have ended. So the oldest unfinished chain always fits and can continue on every rank.
    """
    num_ranks, num_channels, num_chains, longest = graph.counts
    size = len(graph.seconds)
    num_units = size // 3
    missing = graph.first_before[1:] - graph.first_before[:-1]
    ready, start = np.zeros(size), np.full(size, -1.0)
    free, line_free = np.zeros(num_ranks), np.zeros(num_channels)
    order, candidates, fillers = _empty(num_ranks, longest), _empty(num_ranks, longest), _empty(num_ranks, longest)
    first_filler = np.zeros(num_ranks, np.int64)
    held, missing_bytes = np.zeros((num_ranks, num_chains)), np.zeros((num_ranks, num_chains))
    open_actions = np.zeros((num_ranks, num_chains), np.int64)
    for action in range(size):
        if graph.exists[action]:
            rank, chain = graph.rank[action], graph.chain[action]
            missing_bytes[rank, chain] += graph.acquired[action]
            open_actions[rank, chain] += 1
            if missing[action] == 0:
                _append(candidates, rank, action)
    room = np.full((num_ranks, num_chains), _NEVER)
    chosen, chosen_start = np.zeros(num_ranks, np.int64), np.zeros(num_ranks)
    stale = np.ones(num_ranks, np.bool_)
    for _ in range(graph.exists.sum()):
        now = 0
        for rank in range(num_ranks):
            if stale[rank]:
                stale[rank] = False
                if graph.limits[rank] < _NEVER:
                    _update_room(graph.limits[rank], held[rank], missing_bytes[rank], open_actions[rank], room[rank])
                waiting = candidates.rows[rank, : candidates.lengths[rank]]
                chosen[rank], chosen_start[rank] = _choice(
                    graph, waiting, free[rank], ready, room[rank], priority, window
                )
                if first_filler[rank] < fillers.lengths[rank]:
                    filler, gap = fillers.rows[rank, first_filler[rank]], chosen_start[rank] - free[rank]
                    if gap > 0 and gap >= patience * graph.seconds[filler]:
                        chosen[rank], chosen_start[rank] = filler, free[rank]
            if chosen_start[rank] < chosen_start[now]:
                now = rank
        action, chain = chosen[now], graph.chain[chosen[now]]
        _append(order, now, action)
        stale[now] = True
        start[action] = chosen_start[now]
        end = free[now] = start[action] + graph.seconds[action]
        if action >= 2 * num_units:
            first_filler[now] += 1
        else:
            for k in range(candidates.lengths[now]):
                if candidates.rows[now, k] == action:
                    candidates.lengths[now] -= 1
                    candidates.rows[now, k] = candidates.rows[now, candidates.lengths[now]]
                    break
        held[now, chain] += graph.acquired[action] - graph.released[action]
        missing_bytes[now, chain] -= graph.acquired[action]
        open_actions[now, chain] -= 1
        arrival = end
        line = graph.channel[action]
        if line >= 0:
            leaves = max(end, line_free[line])
            line_free[line] = leaves + graph.link_occupied[action]
            arrival = leaves + graph.link_seconds[action]
        for after in graph.after[graph.first_after[action] : graph.first_after[action + 1]]:
            if graph.exists[after]:
                there = graph.rank[after]
                ready[after] = max(ready[after], end if there == now else arrival)
                missing[after] -= 1
                if missing[after] == 0:
                    stale[there] = True
                    _append(fillers if after >= 2 * num_units else candidates, there, after)
    return order, start


@compiled
def _choice(
    graph: ActionGraph, waiting: Ints, free: float, ready: Floats, room: Floats, priority: Floats, window: float
) -> tuple[int, float]:
    """Returns the next forward or backward of a rank that is free from `free` on, and its start; or (-1, never)."""
    earliest = _NEVER
    for action in waiting:
        if graph.acquired[action] <= room[graph.chain[action]]:
            earliest = min(earliest, ready[action])
    latest = max(earliest, free) + window
    chosen, best = -1, _NEVER
    for action in waiting:
        fits = graph.acquired[action] <= room[graph.chain[action]]
        if fits and ready[action] <= latest and priority[action] < best:
            chosen, best = action, priority[action]
    return (chosen, max(free, ready[chosen])) if chosen >= 0 else (-1, _NEVER)
