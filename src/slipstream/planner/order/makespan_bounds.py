"""Lower bounds of the step for any order of the actions: a quick one, and a close one.

Compiled functions use mostly plain loops, since numpy's functions take long to compile.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from heapq import heappop, heappush
from itertools import permutations
from typing import NamedTuple

import numpy as np

from slipstream.array_types import Flags, Floats, Ints
from slipstream.numba_jit import compiled, compiled_in_place
from slipstream.planner.order.ordering_problem import OrderingProblem
from slipstream.schedule import Op
from slipstream.schedule.sweep import ActionGraph


def makespan_bound(problem: OrderingProblem) -> float:
    """Returns the bound that `slipstream.planner.order.order_search.step_lower_bound` describes, in seconds."""
    times = problem.times.seconds
    shortest = np.minimum(times[Op.B], times[Op.I])  # seconds until the input gradient is there
    rest = np.minimum(times[Op.B], times[Op.I] + times[Op.W]) - shortest
    graph = problem.graph(np.ones(problem.num_units, np.bool_))
    graph = graph._replace(seconds=np.concatenate([times[Op.F], shortest, np.maximum(rest, 0)]))
    last_stage = 2 * problem.num_units - problem.firsts[-1]  # the number of its first backward
    turns = [last_stage + problem.firsts[microbatch] + slices.stop - 1 for microbatch, slices in problem.chains]
    return float(_bound(graph, np.array(turns), _bytes_under(problem)))


def _bytes_under(problem: OrderingProblem) -> Floats:
    """Returns the bytes on each unit's rank of its forward and of all forwards that it needs.

    They are also the bytes of all units whose backwards need this unit's backward.
    """
    reach = problem.reach or [(0,) * count for count in problem.slice_counts]
    ends = np.arange(1, problem.firsts[-1] + 1)
    oldest = ends - 1  # the first slice that each one attends to, directly or not
    for begin, row in zip(problem.firsts, reach, strict=False):
        for i, first in enumerate(row, begin):
            oldest[i] = oldest[begin + first : i + 1].min()
    sizes = np.pad(problem.times.held.reshape(len(problem.placement), -1), ((0, 0), (0, 1)))
    under = np.add.reduceat(sizes, np.column_stack([oldest, ends]).ravel(), axis=1)[:, ::2]
    for rank in range(problem.num_ranks):
        stages = np.array(problem.placement) == rank
        under[stages] = under[stages].cumsum(axis=0)
    return under.ravel()


def rank_bounds(
    seconds: Mapping[Op, Floats],
    ranks: Ints,
    firsts: Sequence[int] | Ints,
    link_seconds: Floats,
    num_microbatches: int = 1,
    sends_back: Flags | None = None,
    split: bool = True,
) -> tuple[Floats, Floats]:
    """Returns, (..., stages) each, seconds that no order of the actions beats, in a fraction of `makespan_bound`'s
    time: until a rank has done the work of a stage and of its stages after that one, and until their last input
    gradient has travelled through the stages before.

    They begin once the first slice of some microbatch has reached the stage, and weight gradients may follow at the
    very end. With few slices under way, a rank's last stages wait longer for the first one than the rank has work.

    Args:
        seconds: of F, B, I and W, (..., stages, slices).
        ranks: of the stages.
        firsts: the first slice of each microbatch.
        link_seconds: of each slice's message.
        num_microbatches: like those that the slices are of.
        sends_back: whether a gradient goes from a stage to the one before, (..., stages). None: from each.
        split: whether backwards may be split.
    """
    forward, whole, inputs, weights = (seconds[op] for op in (Op.F, Op.B, Op.I, Op.W))
    back, both = (np.minimum(whole, inputs), np.minimum(whole, inputs + weights)) if split else (whole, whole)
    places = np.arange(len(ranks))
    sent = places > 0 if sends_back is None else sends_back
    onwards = ((ranks[:, None] == ranks) & (places[:, None] >= places)).astype(float)
    link = link_seconds[firsts] * (np.diff(ranks, prepend=ranks[0]) != 0)[:, None]
    ahead, behind = forward[..., firsts], back[..., firsts]
    back_link = link * sent[..., None]
    head = (np.cumsum(ahead + link, axis=-2) - ahead).min(axis=-1)
    tail = (np.cumsum(behind + back_link, axis=-2) - behind).min(axis=-1)
    work, until_sent = (num_microbatches * (forward + each).sum(axis=-1) @ onwards for each in (both, back))
    return head + work, head + until_sent + tail


class _Paths(NamedTuple):
    """The longest paths of actions, in seconds: over all actions, and within a chain."""

    heads: Floats  # seconds before the action's start
    tails: Floats  # seconds after its end
    to_turn: Floats  # seconds from its end to the start of its chain's turn
    from_turn: Floats  # seconds from the start of the turn to its start


@compiled
def one_machine(heads: Floats, seconds: Floats, tails: Floats) -> float:
    """Returns max(end + tail) of one machine's best preemptive schedule (Jackson's rule, Carlier 1982)."""
    order = np.argsort(heads)
    waiting = [(0.0, 0.0)]
    waiting.pop()
    now, last, k = 0.0, 0.0, 0
    while k < len(order) or waiting:
        if not waiting:
            now = max(now, heads[order[k]])
        while k < len(order) and heads[order[k]] <= now:
            heappush(waiting, (-tails[order[k]], seconds[order[k]]))
            k += 1
        tail, left = heappop(waiting)
        until = heads[order[k]] if k < len(order) else np.inf
        if now + left <= until:
            now += left
            last = max(last, now - tail)
        else:
            heappush(waiting, (tail, left - (until - now)))
            now = until
    return last


@compiled_in_place
def _raise_paths(graph: ActionGraph, numbers: Ints, paths: Floats, onward: bool) -> None:
    """Raises paths[n] to the longest path to n's start, or from its end if `onward`.

    `numbers` are in an order of precedence, reversed if `onward`.
    """
    first, others = (graph.first_after, graph.after) if onward else (graph.first_before, graph.before)
    for action in numbers:
        for other in others[first[action] : first[action + 1]]:
            sender = action if onward else other
            link = graph.link_seconds[sender] if graph.rank[action] != graph.rank[other] else 0.0
            paths[action] = max(paths[action], paths[other] + graph.seconds[other] + link)


@compiled
def _travels(graph: ActionGraph, senders: Ints, tails: Floats) -> Floats:
    """Returns the longest path of each message after its channel is free again."""
    travels = np.zeros(len(senders))
    for k in range(len(senders)):
        sender = senders[k]
        arrives = graph.link_seconds[sender] - graph.link_occupied[sender]
        for after in graph.after[graph.first_after[sender] : graph.first_after[sender + 1]]:
            if graph.rank[after] != graph.rank[sender]:
                travels[k] = max(travels[k], arrives + graph.seconds[after] + tails[after])
    return travels


def longest_paths(graph: ActionGraph) -> Floats:
    """Returns the seconds of the longest path to each action: when it starts where only the rules of order delay it."""
    heads = np.zeros(len(graph.seconds))
    _raise_paths(graph, _along(len(heads) // 3), heads, False)
    return heads


def _along(num_units: int) -> Ints:
    """Returns all action numbers in an order in which each follows its predecessors."""
    backwards = np.arange(2 * num_units - 1, num_units - 1, -1)
    return np.concatenate((np.arange(num_units), backwards, np.arange(2 * num_units, 3 * num_units)))


def _on_machines(graph: ActionGraph, numbers: Ints, heads: Floats, tails: Floats) -> float:
    """Returns the largest one-machine bound over the ranks and the channels, for these actions and their messages."""
    bounds = [0.0]
    for rank in range(graph.counts[0]):
        here = numbers[graph.rank[numbers] == rank]
        bounds.append(one_machine(heads[here], graph.seconds[here], tails[here]))
    for line in range(graph.counts[1]):
        here = numbers[graph.channel[numbers] == line]
        sent = heads[here] + graph.seconds[here]
        bounds.append(one_machine(sent, graph.link_occupied[here], _travels(graph, here, tails)))
    return max(bounds)


def _bound(graph: ActionGraph, turns: Ints, under: Floats) -> float:
    size = len(graph.seconds)
    num_units = len(under)
    forwards = np.arange(num_units)
    along = _along(num_units)
    paths = _Paths(np.zeros(size), np.zeros(size), np.full(size, -np.inf), np.full(size, -np.inf))
    heads, tails, to_turn, from_turn = paths
    _raise_paths(graph, along, heads, False)
    _raise_paths(graph, along[::-1].copy(), tails, True)
    from_turn[turns] = 0
    _raise_paths(graph, along[num_units:], from_turn, False)
    to_turn[turns] = -graph.seconds[turns]
    _raise_paths(graph, forwards[::-1].copy(), to_turn, True)
    bound = 0.0
    links = graph.link_seconds, graph.link_occupied
    costs = np.stack([*paths, graph.seconds, *links, graph.acquired, np.tile(under, 3)])
    by_chain = np.split(along[np.argsort(graph.chain[along], kind="stable")], np.cumsum(np.bincount(graph.chain))[:-1])
    alike: dict[bytes, list[int]] = defaultdict(list)
    for chain, members in enumerate(by_chain):
        alike[costs[:, members].tobytes()].append(chain)
    for chains in alike.values():
        first = by_chain[chains[0]]
        turn_head = max(heads[turns[chains[0]]], _on_machines(graph, first[first < num_units], heads, to_turn))
        turn_tail = _on_machines(graph, first[first >= num_units], from_turn, tails)
        bound = max(bound, turn_head + turn_tail)
        members = np.concatenate([by_chain[chain] for chain in chains])
        up = members[members < num_units]
        down = members[members >= num_units]
        heads[down] = np.maximum(heads[down], turn_head + from_turn[down])
        tails[up] = np.maximum(tails[up], to_turn[up] + turn_tail)
    bound = max(bound, _on_machines(graph, along, heads, tails))
    for rank in np.flatnonzero(np.isfinite(graph.limits)):
        here = forwards[(graph.rank[forwards] == rank) & (graph.acquired[forwards] > 0)]
        if len(here):
            bound = max(bound, _memory_over_time(graph, here, paths))
            apart = _turns_apart(graph, here, under, paths, [*alike.values()])
            bound = max(bound, _turn_by_turn(graph, turns, apart, paths))
    return float(bound)


def _turn_by_turn(graph: ActionGraph, turns: Ints, apart: Floats, paths: _Paths) -> float:
    """Returns the longest sum of the path to a turn, from turn to turn, and from the last, over all sizes of steps."""
    first = paths.heads[turns].min()
    last = (paths.tails[turns] + graph.seconds[turns]).min()
    least = graph.seconds[turns].min()
    steps = ((lag, *divmod(len(turns) - 1, lag)) for lag in range(1, len(turns)))
    return max((first + many * apart[lag] + left * least + last for lag, many, left in steps), default=0.0)


def _memory_over_time(graph: ActionGraph, here: Ints, paths: _Paths) -> float:
    """Returns the bound by bytes times seconds: a unit is held from its forward to its backward, past the turn."""
    num_units = len(graph.seconds) // 3
    back = here + num_units
    weight = here + 2 * num_units
    seconds = graph.seconds[here] + paths.to_turn[here] + paths.from_turn[back]
    seconds += graph.seconds[back] + graph.seconds[weight]
    after = (paths.tails[back] - graph.seconds[weight]).min()
    over_time = (graph.acquired[here] * seconds).sum() / graph.limits[graph.rank[here[0]]]
    return float(paths.heads[here].min() + over_time + max(after, 0.0))


def _turns_apart(graph: ActionGraph, here: Ints, under: Floats, paths: _Paths, alike: list[list[int]]) -> Floats:
    """Returns apart[k]: the least seconds from a chain's turn to the k-th turn after it that one rank's memory allows.

    At its turn a chain is held whole. Bytes of several chains above the limit must be freed after the first one's turn,
    and taken again before the last one's.
    """
    num_units = len(under)
    num_chains = graph.counts[2]
    apart = np.zeros(num_chains + 1)
    limit = graph.limits[graph.rank[here[0]]]
    tolerance = 1e-9 * limit
    members = [here[graph.chain[here] == chain] for chain in range(num_chains)]
    sizes = [graph.acquired[mine].sum() for mine in members]
    back = here + num_units
    different = [members[same[0]] for same in alike]
    work = graph.seconds[back] + graph.seconds[back + num_units]
    rate = (work / graph.acquired[here]).min()
    left = (graph.seconds[here] + paths.to_turn[here]).min()
    apart[1] = np.inf
    # Chains that are alike need two of them, one turn after the other, and no more.
    for one, other in permutations([chain for same in alike for chain in same[:2]], 2):
        slack = limit - sizes[one] + tolerance
        theirs = members[other][under[members[other]] > slack]
        apart[1] = min(apart[1], _turn_after(graph, members[one], theirs, slack, under, paths))
    smallest = np.sort(sizes)
    for lag in range(2, num_chains):
        excess = smallest[: lag + 1].sum() - limit - tolerance
        if excess > 0:
            soonest = min(_freed_at(graph, mine, paths, excess / lag) for mine in different)
            apart[lag] = max(soonest, paths.from_turn[back].min() + excess * rate) + left
    return apart


@compiled
def _freed_at(graph: ActionGraph, mine: Ints, paths: _Paths, size: float) -> float:
    """Returns the earliest time, in seconds from its turn, by which a chain can have freed `size` bytes of one rank."""
    num_units = len(graph.seconds) // 3
    if len(mine) == 0:
        # The microbatch has nothing on this rank.
        return -np.inf
    ends = np.empty(len(mine))
    first, rate = np.inf, np.inf
    for k in range(len(mine)):
        back = mine[k] + num_units
        weight = mine[k] + 2 * num_units
        work = graph.seconds[back] + graph.seconds[weight]
        ends[k] = paths.from_turn[back] + work
        first = min(first, paths.from_turn[back])
        rate = min(rate, work / graph.acquired[mine[k]])
    freed, at = 0.0, 0.0
    for k in np.argsort(ends):
        freed += graph.acquired[mine[k]]
        at = ends[k]
        if freed >= size:
            break
    return float(max(at, first + size * rate))


@compiled
def _turn_after(graph: ActionGraph, mine: Ints, theirs: Ints, slack: float, under: Floats, paths: _Paths) -> float:
    """Returns the least seconds from one chain's turn to another's, on one machine that frees `mine` and runs `theirs`.

    When a forward of theirs starts, its `under` bytes are held as well. The first chain has then freed what exceeds
    `slack`. So every backward without which that is impossible has ended, and the weight gradient too where the unit's
    bytes are needed: often for fewer forwards.
    """
    num_units = len(under)
    if len(theirs) == 0 or len(mine) == 0:
        return 0.0
    total = 0.0
    for unit in mine:
        total += graph.acquired[unit]
    num_jobs = 2 * len(mine) + len(theirs)
    heads, seconds, tails = np.zeros(num_jobs), np.zeros(num_jobs), np.zeros(num_jobs)
    for k in range(len(theirs)):
        forward = theirs[k]
        heads[k] = _freed_at(graph, mine, paths, under[forward] - slack)
        seconds[k], tails[k] = graph.seconds[forward], paths.to_turn[forward]
    num_forced = len(theirs)
    for unit in mine:
        back = unit + num_units
        weight = unit + 2 * num_units
        for action, head, freed in (
            (back, paths.from_turn[back], under[unit]),
            (weight, paths.from_turn[back] + graph.seconds[back], graph.acquired[unit]),
        ):
            longest = -1.0
            for forward in theirs:
                if total - freed < under[forward] - slack:
                    longest = max(longest, graph.seconds[forward] + paths.to_turn[forward])
            if longest >= 0:
                heads[num_forced], seconds[num_forced], tails[num_forced] = head, graph.seconds[action], longest
                num_forced += 1
    return one_machine(heads[:num_forced], seconds[:num_forced], tails[:num_forced])
