"""The simulator over an action graph, compiled: when each action of an order starts, and a rank's memory then.

It takes a hundredth of the time of `slipstream.simulate`, which knows sends, receives and exact numbers too.
"""

from __future__ import annotations

import numpy as np

from slipstream.array_types import Floats
from slipstream.numba_jit import compiled
from slipstream.schedule import action_arrays
from slipstream.simulator.action_graph import ActionGraph, ActionOrder

run_rows = compiled(action_arrays.run_rows)


@compiled
def start_times(graph: ActionGraph, order: ActionOrder) -> Floats:
    """Returns each action's start if the ranks run `order`, as `slipstream.simulate` does.

    Actions that never start, because they are missing or the ranks get stuck, have -1.
    """
    num_ranks, num_channels = graph.counts[0], graph.counts[1]
    missing = graph.first_before[1:] - graph.first_before[:-1]
    ready = np.zeros(len(missing))
    start = np.full(len(missing), -1.0)
    free, line_free = np.zeros(num_ranks), np.zeros(num_channels + num_ranks)
    reached = np.zeros(num_ranks, np.int64)
    waiting, num_waiting = np.arange(2 * num_ranks), num_ranks
    while num_waiting:
        num_waiting -= 1
        rank = waiting[num_waiting]
        row, length = order.rows[rank], order.lengths[rank]
        while reached[rank] < length and missing[row[reached[rank]]] == 0:
            action = row[reached[rank]]
            reached[rank] += 1
            start[action] = max(free[rank], ready[action])
            end = free[rank] = start[action] + graph.seconds[action]
            arrival = end
            line = graph.channel[action]
            if line >= 0:
                leaves = max(end, line_free[line])
                line_free[line] = leaves + graph.link_occupied[action]
                arrival = leaves + graph.link_seconds[action]
            for after in graph.after[graph.first_after[action] : graph.first_after[action + 1]]:
                there = graph.rank[after]
                # A copy is awaited by what computes with it; the copies of a rank take turns on a line of their own.
                awaits_copy = line >= num_channels > graph.channel[after]
                ready[after] = max(ready[after], arrival if there != rank or awaits_copy else end)
                missing[after] -= 1
                at = reached[there]
                is_next = at < order.lengths[there] and order.rows[there, at] == after
                if there != rank and missing[after] == 0 and is_next:
                    waiting[num_waiting] = there
                    num_waiting += 1
    return start


@compiled
def makespan(graph: ActionGraph, start: Floats) -> float:
    """Returns the end of the last action; infinite if one never starts."""
    last = 0.0
    for action in range(len(start)):
        if graph.exists[action]:
            if start[action] < 0:
                return np.inf
            last = max(last, start[action] + graph.seconds[action])
    return last


@compiled
def peak(graph: ActionGraph, order: ActionOrder, rank: int) -> float:
    """Returns the peak bytes of activations of a rank, which depend only on its order."""
    most = held = 0.0
    for action in order.rows[rank, : order.lengths[rank]]:
        held += graph.acquired[action]
        most = max(most, held)
        held -= graph.released[action]
    return most
