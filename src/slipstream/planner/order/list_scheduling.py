"""List scheduling with look-ahead and a memory limit, compiled, and the rules by which it chooses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from slipstream.array_types import Flags, Floats, Ints
from slipstream.numba_jit import compiled, compiled_in_place
from slipstream.planner.order.ordering_problem import StepActions, UnitTimes
from slipstream.schedule import Schedule
from slipstream.simulator.action_graph import ActionGraph, ActionOrder
from slipstream.simulator.time_kernel import GraphRun, makespan, no_progress, peak, run, start_times

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
        self._actions, self._times, self._limits = actions, times, limits
        self.splittings = actions.splittings(split)
        self._graphs: dict[str, ActionGraph] = {}
        whole, microbatch = self.graph("none"), actions.arrays.microbatch
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
    """Returns the most bytes of activations that each rank holds in an order."""
    return np.array([peak(graph, order, rank) for rank in range(len(graph.limits))])


def alone_starts(graph: ActionGraph, microbatch: Ints) -> Floats:
    """Returns each action's start if its microbatch ran alone, in the order of the numbers and without a limit."""
    graph = graph._replace(limits=np.full(len(graph.limits), _NEVER))
    costs = np.stack([graph.seconds, graph.link_seconds, graph.link_occupied])
    starts_by_costs: dict[bytes, Floats] = {}  # the starts in a microbatch of these costs
    alone = np.empty(len(microbatch))
    for mine in np.split(np.argsort(microbatch, kind="stable"), np.cumsum(np.bincount(microbatch))[:-1]):
        if (costs_here := costs[:, mine].tobytes()) not in starts_by_costs:
            exists = np.zeros_like(graph.exists)
            exists[mine] = graph.exists[mine]
            alone_graph = graph._replace(exists=exists)
            starts_by_costs[costs_here] = place(alone_graph, np.arange(float(len(alone))), 0.0, 0.0)[1][mine]
        alone[mine] = starts_by_costs[costs_here]
    return alone


class _Memory(NamedTuple):
    """The bytes that decide which forwards the ranks may run; most are (ranks, chains)."""

    held: Floats
    missing: Floats  # that a chain's remaining forwards take
    open_actions: Ints  # of a chain that haven't run
    room: Floats  # the bytes that a forward of a chain may take so that every older chain can still end
    total: Floats  # held by each rank
    least: Floats  # the bytes of each rank's smallest forward
    oldest: Ints  # the oldest open chain of each rank
    reach: Ints  # the first chain of each rank that, as all younger ones, hasn't even room for the smallest forward


class _Choices(NamedTuple):
    """Each rank's next action."""

    candidates: ActionOrder  # forwards and backwards whose predecessors were placed
    fillers: ActionOrder  # weight gradients, first in, first out
    num_filled: Ints  # of the fillers
    chosen: Ints  # the place of the action among the rank's candidates; -1 for the next filler
    start: Floats  # of the action; never where there is none
    is_known: Flags  # False where another action may be better by now


@compiled
def place(graph: ActionGraph, priority: Floats, window: float, patience: float) -> tuple[ActionOrder, Floats]:
    """Returns the order of list scheduling and its start times. It always ends, within the memory limits.

    The rank that can start an action first does. Of the forwards and backwards that it could start within
    `window` seconds of the earliest, it takes the one with the lowest `priority`; of equal ones any, but in the same
    problem always the same. Weight gradients, first in, first out, fill gaps of at least `patience` times their length.

    A forward is admitted only if every older chain's remaining forwards still fit once the chains older than
    that one have ended. So the oldest unfinished chain always fits and can continue on every rank.
    """
    num_ranks, _, num_chains, longest = graph.counts
    shape = num_ranks, num_chains
    held, missing, room = np.zeros(shape), np.zeros(shape), np.full(shape, _NEVER)
    total, least = np.zeros(num_ranks), np.full(num_ranks, _NEVER)
    oldest, reach = np.zeros(num_ranks, np.int64), np.full(num_ranks, num_chains)
    memory = _Memory(held, missing, np.zeros(shape, np.int64), room, total, least, oldest, reach)
    candidates = ActionOrder(np.empty((num_ranks, longest), np.int64), np.zeros(num_ranks, np.int64))
    fillers = ActionOrder(np.empty((num_ranks, longest), np.int64), np.zeros(num_ranks, np.int64))
    order = ActionOrder(np.empty((num_ranks, longest), np.int64), np.zeros(num_ranks, np.int64))
    num_filled, chosen = np.zeros(num_ranks, np.int64), np.zeros(num_ranks, np.int64)
    start, is_known = np.zeros(num_ranks), np.zeros(num_ranks, np.bool_)
    choices, progress = _Choices(candidates, fillers, num_filled, chosen, start, is_known), no_progress(graph)
    _place_all(graph, (priority, window, patience), order, progress, choices, memory)
    return order, progress.start


_Rule = tuple[Floats, float, float]  # priority, window and patience


@compiled_in_place
def _place_all(
    graph: ActionGraph, rule: _Rule, order: ActionOrder, progress: GraphRun, choices: _Choices, memory: _Memory
) -> None:
    """Places all actions for `place`."""
    num_units, num_ranks, candidates = len(graph.seconds) // 3, graph.counts[0], choices.candidates
    for action in range(len(graph.seconds)):
        if graph.exists[action]:
            rank, chain, acquired = graph.rank[action], graph.chain[action], graph.acquired[action]
            memory.missing[rank, chain] += acquired
            memory.open_actions[rank, chain] += 1
            if acquired > 0:
                memory.least[rank] = min(memory.least[rank], acquired)
            if progress.missing[action] == 0:
                _append(candidates, rank, action)
    for rank in range(num_ranks):
        _update_room(graph.limits[rank], rank, memory)
    for _ in range(graph.exists.sum()):
        now = 0
        for rank in range(num_ranks):
            if not choices.is_known[rank]:
                _choose(graph, rank, rule, progress, choices, memory.room)
            if choices.start[rank] < choices.start[now]:
                now = rank
        if choices.chosen[now] < 0:
            action = choices.fillers.rows[now, choices.num_filled[now]]
            choices.num_filled[now] += 1
        else:
            action = candidates.rows[now, choices.chosen[now]]
            candidates.lengths[now] -= 1
            candidates.rows[now, choices.chosen[now]] = candidates.rows[now, candidates.lengths[now]]
        chain, choices.is_known[now] = graph.chain[action], False
        _append(order, now, action)
        memory.held[now, chain] += graph.acquired[action] - graph.released[action]
        memory.total[now] += graph.acquired[action] - graph.released[action]
        memory.missing[now, chain] -= graph.acquired[action]
        memory.open_actions[now, chain] -= 1
        _update_room(graph.limits[now], now, memory)
        run(graph, action, choices.start[now], progress)
        for k in range(graph.first_after[action], graph.first_after[action + 1]):
            after, there = graph.after[k], graph.rank[graph.after[k]]
            if graph.exists[after] and progress.missing[after] == 0:
                choices.is_known[there] = False
                _append(choices.fillers if after >= 2 * num_units else candidates, there, after)


@compiled_in_place
def _update_room(limit: float, rank: int, memory: _Memory) -> None:
    """Oldest first: a chain can end if the bytes that it lacks, and those that it and all younger chains hold, fit."""
    if limit == _NEVER:
        return
    chain, num_chains, younger, room = memory.oldest[rank], memory.held.shape[1], memory.total[rank], _NEVER
    while chain < num_chains and not memory.open_actions[rank, chain]:
        chain += 1
    memory.oldest[rank] = chain
    while chain < num_chains and room >= memory.least[rank]:
        memory.room[rank, chain] = room
        if memory.open_actions[rank, chain]:
            room = min(room, limit - younger - memory.missing[rank, chain])
        younger -= memory.held[rank, chain]
        chain += 1
    for other in range(chain, memory.reach[rank]):
        memory.room[rank, other] = room
    memory.reach[rank] = chain


@compiled_in_place
def _append(order: ActionOrder, rank: int, number: int) -> None:
    order.rows[rank, order.lengths[rank]] = number
    order.lengths[rank] += 1


@compiled_in_place
def _choose(graph: ActionGraph, rank: int, rule: _Rule, progress: GraphRun, choices: _Choices, room: Floats) -> None:
    """Chooses the next action of a rank."""
    (priority, window, patience), candidates = rule, choices.candidates
    free, ready = progress.free[rank], progress.ready
    earliest, start, chosen = _NEVER, _NEVER, -1
    for k in range(candidates.lengths[rank]):
        action = candidates.rows[rank, k]
        if graph.acquired[action] <= room[rank, graph.chain[action]]:
            earliest = min(earliest, ready[action])
    latest, best = max(earliest, free) + window, _NEVER
    for k in range(candidates.lengths[rank]):
        action = candidates.rows[rank, k]
        fits = graph.acquired[action] <= room[rank, graph.chain[action]]
        if fits and ready[action] <= latest and priority[action] < best:
            chosen, best, start = k, priority[action], max(free, ready[action])
    if choices.num_filled[rank] < choices.fillers.lengths[rank]:
        filler = choices.fillers.rows[rank, choices.num_filled[rank]]
        if start > free and start - free >= patience * graph.seconds[filler]:
            chosen, start = -1, free
    choices.chosen[rank], choices.start[rank], choices.is_known[rank] = chosen, start, True
