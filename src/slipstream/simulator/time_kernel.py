"""The simulator over an action graph, compiled: when each action of an order starts, and a rank's memory then.

It takes a hundredth of the time of `slipstream.simulate`, which knows sends, receives and exact numbers too.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from slipstream.array_types import Floats, Ints
from slipstream.numba_jit import compiled, compiled_in_place
from slipstream.schedule import action_arrays
from slipstream.simulator.action_graph import ActionGraph, ActionOrder

run_rows = compiled(action_arrays.run_rows)


class GraphRun(NamedTuple):
    """How far a run of the actions has come."""

    missing: Ints  # the predecessors of each action that haven't run
    ready: Floats  # when the results of those that have are there
    start: Floats  # of each action; -1 until it runs
    free: Floats  # when each rank is
    line_free: Floats  # when each channel is, and after these the lines of the ranks' copies


@compiled
def no_progress(graph: ActionGraph) -> GraphRun:
    """Returns the progress before the first action."""
    size, num_ranks = len(graph.seconds), graph.counts[0]
    lines = np.zeros(graph.counts[1] + num_ranks)
    missing = graph.first_before[1:] - graph.first_before[:-1]
    return GraphRun(missing, np.zeros(size), np.full(size, -1.0), np.zeros(num_ranks), lines)


@compiled_in_place
def run(graph: ActionGraph, action: int, start: float, progress: GraphRun) -> None:
    """Runs an action from `start` on: it keeps its rank and its channel busy, and what follows needs it no more."""
    rank, line, num_channels = graph.rank[action], graph.channel[action], graph.counts[1]
    progress.start[action] = start
    end = arrival = progress.free[rank] = start + graph.seconds[action]
    if line >= 0:
        leaves = max(end, progress.line_free[line])
        progress.line_free[line] = leaves + graph.link_occupied[action]
        arrival = leaves + graph.link_seconds[action]
    for k in range(graph.first_after[action], graph.first_after[action + 1]):
        after = graph.after[k]
        # A copy is awaited by what computes with it; the copies of a rank take turns on a line of their own.
        awaits_arrival = graph.rank[after] != rank or line >= num_channels > graph.channel[after]
        progress.ready[after] = max(progress.ready[after], arrival if awaits_arrival else end)
        progress.missing[after] -= 1


@compiled
def start_times(graph: ActionGraph, order: ActionOrder) -> Floats:
    """Returns each action's start if the ranks run `order`, as `slipstream.simulate` does.

    Actions that never start, because they are missing or the ranks get stuck, have -1.
    """
    progress, num_ranks = no_progress(graph), graph.counts[0]
    _run_all(graph, order, progress, np.zeros(num_ranks, np.int64), np.arange(2 * num_ranks))
    return progress.start


@compiled_in_place
def _run_all(graph: ActionGraph, order: ActionOrder, progress: GraphRun, reached: Ints, waiting: Ints) -> None:
    num_waiting = len(reached)
    while num_waiting:
        num_waiting -= 1
        rank = waiting[num_waiting]
        while reached[rank] < order.lengths[rank] and progress.missing[order.rows[rank, reached[rank]]] == 0:
            action = order.rows[rank, reached[rank]]
            reached[rank] += 1
            run(graph, action, max(progress.free[rank], progress.ready[action]), progress)
            for k in range(graph.first_after[action], graph.first_after[action + 1]):
                after, there = graph.after[k], graph.rank[graph.after[k]]
                is_next = reached[there] < order.lengths[there] and order.rows[there, reached[there]] == after
                if there != rank and progress.missing[after] == 0 and is_next:
                    waiting[num_waiting] = there
                    num_waiting += 1


@compiled_in_place
def makespan(graph: ActionGraph, start: Floats) -> float:
    """Returns the end of the last action; infinite if one never starts."""
    last = 0.0
    for action in range(len(start)):
        if graph.exists[action]:
            if start[action] < 0:
                return np.inf
            last = max(last, start[action] + graph.seconds[action])
    return last


@compiled_in_place
def peak(graph: ActionGraph, order: ActionOrder, rank: int) -> float:
    """Returns the peak bytes of activations of a rank, which depend only on its order."""
    most = held = 0.0
    for k in range(order.lengths[rank]):
        action = order.rows[rank, k]
        held += graph.acquired[action]
        most = max(most, held)
        held -= graph.released[action]
    return most
