"""Local search over orders of actions, compiled."""

from __future__ import annotations

import numpy as np

from slipstream.array_types import Flags, Floats, Ints
from slipstream.numba_jit import compiled, compiled_in_place
from slipstream.schedule.compiled_sweep import makespan, peak, start_times
from slipstream.schedule.sweep import ActionGraph, ActionOrder

_NEVER = np.inf
_SPLIT, _SWAP = 0.3, 0.6  # probabilities of splitting a whole backward, and of swapping only neighbours
_FARTHEST = 12  # places an action moves at most


@compiled
def anneal(
    graph: ActionGraph, order: ActionOrder, split: Flags, times: Floats, num_steps: int, heat: float, seed: int
) -> tuple[float, ActionOrder, Flags]:
    """Returns the best makespan found from `order` and `split`, its order and its split.

    A step takes two actions that follow each other on the critical path and on their rank, and swaps them,
    moves one of them farther, or splits or merges a backward. It is kept if the makespan grows by at most an
    exponential draw, whose mean falls from `heat`, a share of the makespan, to 0. `times` are the seconds
    of B, I and W of each unit, (3, units); infinite for I where no backward may be split. The graph changes.
    """
    np.random.seed(seed)
    num_units = len(split)
    size = 3 * num_units
    # Always copied: numba takes long to compile an assignment to a whole array.
    best_order, best_split = order, split
    order = ActionOrder(order.rows.copy(), order.lengths.copy())
    split = split.copy()
    start = start_times(graph, order)
    now = best = makespan(graph, start)
    position = np.zeros(size, np.int64)
    pairs = np.empty(size, np.int64)
    for step in range(num_steps):
        num_pairs = _critical_pairs(graph, order, start, now, position, pairs)
        if num_pairs == 0:
            break
        late = pairs[np.random.randint(num_pairs)]
        rank = graph.rank[late]
        unit = late % num_units
        source, target = _proposal(graph, order, split, late, position[late])
        flips = source < 0 or target < 0
        if flips and times[1, unit] == _NEVER:
            continue
        if not flips and target == source + 1 and _needs(graph, order.rows[rank, target], order.rows[rank, source]):
            continue
        if flips:
            _flip(graph, split, unit, times)
        _move(order, rank, source, target, unit + 2 * num_units)
        value, trial = _NEVER, start
        if graph.limits[rank] == _NEVER or peak(graph, order, rank) <= graph.limits[rank]:
            trial = start_times(graph, order)
            value = makespan(graph, trial)
        threshold = heat * best * (1 - step / num_steps) * -np.log(1 - np.random.random())
        if value <= now + threshold:
            now, start = value, trial
            if now < best * (1 - 1e-12):
                best = now
                best_split = split.copy()
                best_order = ActionOrder(order.rows.copy(), order.lengths.copy())
        else:
            _move(order, rank, target, source, unit + 2 * num_units)
            if flips:
                _flip(graph, split, unit, times)
    return best, best_order, best_split


@compiled_in_place
def _proposal(graph: ActionGraph, order: ActionOrder, split: Flags, late: int, at: int) -> tuple[int, int]:
    """Returns the move to try as (from, to) places of the rank's row, where `late` is at `at`.

    From -1: the weight gradient of a whole backward is inserted. To -1: it is removed, and the backward is whole.
    """
    num_units = len(split)
    length = order.lengths[graph.rank[late]]
    if late >= 2 * num_units and order.rows[graph.rank[late], at - 1] == late - num_units:
        return at, -1
    if num_units <= late < 2 * num_units and not split[late - num_units] and np.random.random() < _SPLIT:
        return -1, min(at + 1 + np.random.randint(_FARTHEST), length)
    if np.random.random() < _SWAP:
        return at - 1, at
    if np.random.random() < 0.5:
        return at - 1, min(at + np.random.randint(_FARTHEST), length - 1)
    return at, max(at - 1 - np.random.randint(_FARTHEST), 0)


@compiled_in_place
def _flip(graph: ActionGraph, split: Flags, unit: int, times: Floats) -> None:
    """Splits the unit's backward, or merges it."""
    num_units = len(split)
    back = unit + num_units
    weight = unit + 2 * num_units
    split[unit] = graph.exists[weight] = not split[unit]
    graph.seconds[back] = times[1, unit] if split[unit] else times[0, unit]
    graph.seconds[weight] = times[2, unit] if split[unit] else 0.0
    graph.released[back], graph.released[weight] = graph.released[weight], graph.released[back]


@compiled_in_place
def _move(order: ActionOrder, rank: int, source: int, target: int, inserted: int) -> None:
    """Moves the action at `source` to `target`; -1 is outside of the row: `inserted` is inserted or removed."""
    row = order.rows[rank]
    action = row[source] if source >= 0 else inserted
    if source < 0:
        source = order.lengths[rank]
        order.lengths[rank] += 1
    elif target < 0:
        target = order.lengths[rank] - 1
        order.lengths[rank] -= 1
    step = 1 if target > source else -1
    for at in range(source, target, step):
        row[at] = row[at + step]
    row[target] = action


@compiled
def _needs(graph: ActionGraph, late: int, early: int) -> bool:
    return bool(np.any(graph.before[graph.first_before[late] : graph.first_before[late + 1]] == early))


@compiled_in_place
def _critical_pairs(
    graph: ActionGraph, order: ActionOrder, start: Floats, last: float, position: Ints, pairs: Ints
) -> int:
    """Fills `pairs` with the actions on one critical path that waited for the previous action on their rank.

    Returns their number. The path is followed backwards from the last end, along ranks where possible. Before
    a message that waited for its channel it continues with the previous message.
    """
    size = len(start)
    tolerance = 1e-9 * last
    action = -1
    for rank in range(len(order.lengths)):
        for at in range(order.lengths[rank]):
            position[order.rows[rank, at]] = at
        if order.lengths[rank]:
            final = order.rows[rank, order.lengths[rank] - 1]
            if start[final] + graph.seconds[final] >= last - tolerance:
                action = final
    num_pairs = 0
    for _ in range(size):
        if action < 0 or start[action] <= tolerance:
            break
        rank = graph.rank[action]
        cause = -1
        if position[action] > 0:
            early = order.rows[rank, position[action] - 1]
            if start[early] + graph.seconds[early] >= start[action] - tolerance:
                pairs[num_pairs] = action
                num_pairs += 1
                cause = early
        if cause < 0:
            latest = -1.0
            for before in graph.before[graph.first_before[action] : graph.first_before[action + 1]]:
                end = start[before] + graph.seconds[before]
                if graph.rank[before] != rank:
                    end += graph.link_seconds[before]
                if end > latest:
                    latest, cause = end, before
            if cause >= 0 and graph.channel[cause] >= 0 and latest < start[action] - tolerance:
                cause = _before_on_channel(graph, order, cause, position)
        action = cause
    return num_pairs


@compiled_in_place
def _before_on_channel(graph: ActionGraph, order: ActionOrder, number: int, position: Ints) -> int:
    """Returns the action whose message precedes this one's on the channel; -1 if there is none."""
    rank = graph.rank[number]
    for at in range(position[number] - 1, -1, -1):
        other = order.rows[rank, at]
        if graph.channel[other] == graph.channel[number]:
            return int(other)
    return -1
