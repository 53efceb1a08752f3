"""The one sweep over the actions of a step as arrays: it gives every action its start, by one of four policies.

- fixed rows: each rank runs its actions in a given order, as early as it can;
- place recomputation: the same, and the forwards that run again stand in the rank's waits;
- by priority: of the actions that a rank could start first it takes the one with the lowest priority, within a limit
  of memory (list scheduling), or of the slices that its two stages hold;
- fill gaps: by priority too, where those of a spread head's actions change as the step goes on.

`compiled_sweep` has the same functions compiled. Here nothing loads numba: small schedules are made before that pays.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from slipstream.array_types import Flags, Floats, Ints

_NEVER = np.inf


class ActionGraph(NamedTuple):
    """The actions with their costs; most arrays have one entry per action number."""

    seconds: Floats
    exists: Flags  # False for the weight gradients of whole backwards
    rank: Ints
    chain: Ints  # the slices of a microbatch that attend to each other, in the order of admission
    channel: Ints  # the channel that carries the result; -1 where it stays on its rank; after these the ranks' copies
    link_seconds: Floats
    link_occupied: Floats
    acquired: Floats  # bytes allocated at the action's start
    released: Floats  # bytes freed at its end
    first_before: Ints  # the actions before number n are before[first_before[n] : first_before[n + 1]]
    before: Ints
    first_after: Ints
    after: Ints
    limits: Floats  # bytes per rank
    counts: Ints  # ranks, channels, chains, and the busiest rank's actions with all backwards split


class ActionOrder(NamedTuple):
    """The order of each rank's action numbers: rank r runs rows[r, : lengths[r]]."""

    rows: Ints
    lengths: Ints

    @classmethod
    def of(cls, rows: Sequence[Sequence[int] | Ints], longest: int) -> ActionOrder:
        """Returns the order of these rows, with room for `longest` actions on each rank."""
        numbers = np.zeros((len(rows), longest), np.int64)
        for rank, row in enumerate(rows):
            numbers[rank, : len(row)] = row
        return cls(numbers, np.array([len(row) for row in rows]))

    def by_rank(self) -> list[Ints]:
        """Returns the action numbers of each rank, in order."""
        return [row[:length] for row, length in zip(self.rows, self.lengths, strict=True)]


class SweepProgress(NamedTuple):
    """How far a sweep has come."""

    missing: Ints  # the predecessors of each action that haven't run
    ready: Floats  # when the results of the predecessors that have run are there
    start: Floats  # each action's start; -1 until it runs
    free: Floats  # when each rank is free
    line_free: Floats  # when each channel is free, and after these the lines of the ranks' copies


class FixedRows(NamedTuple):
    """The policy that keeps to an order."""

    order: ActionOrder
    reached: Ints  # each rank's place in its row
    waiting: Ints  # a stack of the ranks whose next action may run: its height, then the ranks


class Replays(NamedTuple):
    """The forwards that run again, in the waits of fixed rows: the numbers of a rank's actions follow its row.

    Where a rank would wait for as long as one takes, it stands before the wait; else right before its backward.
    """

    firsts: Ints  # rank r's actions are firsts[r] up to firsts[r + 1]
    seconds: Floats  # the seconds of each backward's repeated forward
    waits: Flags  # the backwards whose forward runs again
    whole: Flags  # the forwards that keep all their activations until their backward, which follows at once
    chosen: Flags  # the backwards of both kinds
    inputs: Ints  # the last action of its rank that it needs
    most_alive: int  # how many slices of a rank have all their activations at the same time, at most
    places: Ints  # the result: the action before which each backward's repeated forward stands, -1 without one
    alive: Ints  # slices of each rank that have all their activations
    following: Ints  # each rank's next backward whose forward hasn't run again
    kept_whole: Ints  # each rank's next forward that stays whole


class ByPriority(NamedTuple):
    """The policy that chooses: the rank that can start an action first does.

    Of those that it could start within `window` seconds of the earliest, it takes the one with the lowest priority; of
    equal ones any, but in the same problem always the same. Fillers, first in, first out, fill gaps of at least
    `patience` times their length.
    """

    priority: Floats
    window: float
    patience: float
    num_fillers: int  # the last numbers, of weight gradients
    order: ActionOrder  # the result
    candidates: ActionOrder  # actions whose predecessors were placed
    fillers: ActionOrder  # fillers whose predecessors were placed
    num_filled: Ints  # each rank's fillers that were placed
    chosen: Ints  # the place of each rank's next action among its candidates; -1 for the next filler
    start: Floats  # the chosen action's start; never where there is none
    is_known: Flags  # False where another action may be better by now
    room: Floats  # the bytes that an action of a chain may take, (ranks, chains)


class ChainMemory(NamedTuple):
    """The bytes that decide which forwards the ranks may run; most are (ranks, chains).

    A forward is admitted only if every older chain's remaining forwards still fit once the chains older than that one
    have ended. So the oldest unfinished chain always fits and can continue on every rank.
    """

    held: Floats
    missing: Floats  # the bytes that a chain's remaining forwards take
    open_actions: Ints  # a chain's actions that haven't run
    total: Floats  # the bytes held by each rank
    least: Floats  # the bytes of each rank's smallest forward
    oldest: Ints  # the oldest open chain of each rank
    reach: Ints  # the first chain of each rank that, as all younger ones, hasn't even room for the smallest forward


class StageSlots(NamedTuple):
    """The slices that a rank's two stages, its chains, may hold: a forward takes one, and its weight gradient frees it.

    A forward can run where its stage isn't full, and its rank has a slot for it and for the forwards of its other stage
    that are due before it.
    """

    due: Floats  # when each action is due
    forwards: Ints  # the first forward of each stage, (ranks, 2); the others' numbers follow
    ends: Ints  # each stage's last forward, plus one
    of_stage: Ints  # the slots that each stage has left, (ranks, 2)
    of_rank: Ints  # the slots that each rank has left, for its two stages together


class HeadGaps(NamedTuple):
    """What changes the priorities of a spread head's actions.

    A priority is a class and an order within it, as class times `unit` plus order. Once the last stage's last forward
    of a microbatch has run, the microbatch is through all stages, and `later` priorities hold. Gradients of the
    embedding come last, unless more of them than `most_gradients` wait on a rank.
    """

    unit: float
    microbatch: Ints  # each action's microbatch
    ends_forwards: Flags  # whether an action is its microbatch's last forward on the last stage
    later: Floats  # the priority of each action whose microbatch is through
    is_gradient: Flags  # the embedding's gradients
    num_gradients: Ints  # each rank's gradients of the embedding that may run
    most_gradients: int
    gradient_class: float  # the class from which such a gradient is raised to class 0


def no_progress(graph: ActionGraph) -> SweepProgress:
    """Returns the progress before the first action."""
    size, num_ranks = len(graph.seconds), graph.counts[0]
    lines = np.zeros(graph.counts[1] + num_ranks)
    missing = graph.first_before[1:] - graph.first_before[:-1]
    return SweepProgress(missing, np.zeros(size), np.full(size, -1.0), np.zeros(num_ranks), lines)


def in_rows(order: ActionOrder) -> FixedRows:
    """Returns the policy that keeps to an order."""
    num_ranks = len(order.lengths)
    waiting = np.zeros(2 * num_ranks + 1, np.int64)
    waiting[0] = num_ranks
    waiting[1 : num_ranks + 1] = np.arange(num_ranks)
    return FixedRows(order, np.zeros(num_ranks, np.int64), waiting)


def sweep(
    graph: ActionGraph,
    progress: SweepProgress,
    rows: FixedRows | None,
    listing: ByPriority | None,
    delays: Floats | None,
    replays: Replays | None,
    chains: ChainMemory | None,
    slots: StageSlots | None,
    gaps: HeadGaps | None,
) -> None:
    """Runs actions until none can start, and notes in `progress` when they do.

    The policy is `rows` or `listing`, with what it looks at besides; compiled code has no trace of what is None.

    Args:
        graph: the actions.
        progress: of none yet.
        rows: the order to keep to.
        listing: how to choose.
        delays: of each entry of `graph.after`, the seconds from the one action's end to the other's, where they aren't
            those of the action's channel; else -1.
        replays: the forwards that run again in the waits of `rows`.
        chains: the memory of `listing`.
        slots: the same by slices.
        gaps: what changes its priorities.
    """
    num_channels = graph.counts[1]
    rank = len(progress.free) - 1
    while True:
        if rows is not None:
            while True:
                reached = rows.reached[rank]
                if reached < rows.order.lengths[rank] and progress.missing[rows.order.rows[rank, reached]] == 0:
                    break
                if rows.waiting[0] == 0:
                    return
                rank = rows.waiting[rows.waiting[0]]
                rows.waiting[0] -= 1
            action = rows.order.rows[rank, rows.reached[rank]]
            rows.reached[rank] += 1
            if replays is not None:
                _replay(progress, replays, rank, action)
            start = max(progress.free[rank], progress.ready[action])
        elif listing is not None:
            rank = _first_to_start(graph, progress, listing, gaps)
            if rank < 0:
                return
            action, start = _taken(graph, listing, chains, slots, gaps, rank), listing.start[rank]
        line = graph.channel[action]
        progress.start[action] = start
        end = arrival = progress.free[rank] = start + graph.seconds[action]
        if line >= 0:
            leaves = max(end, progress.line_free[line])
            progress.line_free[line] = leaves + graph.link_occupied[action]
            arrival = leaves + graph.link_seconds[action]
        for k in range(graph.first_after[action], graph.first_after[action + 1]):
            after = graph.after[k]
            there = graph.rank[after]
            # A copy is awaited by what computes with it; the copies of a rank take turns on a line of their own.
            awaits_arrival = there != rank or line >= num_channels > graph.channel[after]
            came = arrival if awaits_arrival else end
            if delays is not None and delays[k] >= 0:
                came = end + delays[k]
            progress.ready[after] = max(progress.ready[after], came)
            progress.missing[after] -= 1
            if progress.missing[after] == 0:
                if rows is not None:
                    reached = rows.reached[there]
                    if (
                        there != rank
                        and reached < rows.order.lengths[there]
                        and rows.order.rows[there, reached] == after
                    ):
                        rows.waiting[0] += 1
                        rows.waiting[rows.waiting[0]] = there
                elif listing is not None and graph.exists[after]:
                    _offer(graph, listing, gaps, after)


def _replay(progress: SweepProgress, replays: Replays, rank: int, action: int) -> None:
    """Places the forwards that run again before an action, and lets its rank run them."""
    end, ready = replays.firsts[rank + 1], progress.ready[action]
    while replays.kept_whole[rank] < end and (
        replays.kept_whole[rank] < action or not replays.whole[replays.kept_whole[rank]]
    ):
        replays.kept_whole[rank] += 1
    while replays.following[rank] < end:
        backward = replays.following[rank]
        if replays.waits[backward]:
            has_time = progress.free[rank] + replays.seconds[backward] <= ready and replays.inputs[backward] < action
            has_room = replays.alive[rank] + (replays.kept_whole[rank] < backward) < replays.most_alive
            if backward != action and not (has_time and has_room):
                break
            replays.places[backward] = action
            progress.free[rank] += replays.seconds[backward]
            replays.alive[rank] += 1
        replays.following[rank] += 1
    replays.alive[rank] += int(replays.whole[action]) - int(replays.chosen[action])


def _first_to_start(graph: ActionGraph, progress: SweepProgress, listing: ByPriority, gaps: HeadGaps | None) -> int:
    """Returns the rank that can start an action first; -1 for none."""
    now = 0
    for rank in range(len(progress.free)):
        if not listing.is_known[rank]:
            _choose(graph, progress, listing, gaps, rank)
        if listing.start[rank] < listing.start[now]:
            now = rank
        if gaps is not None and _goes_first(listing, gaps, rank, now):
            now = rank
    return now if listing.start[now] < _NEVER else -1


def _choose(graph: ActionGraph, progress: SweepProgress, listing: ByPriority, gaps: HeadGaps | None, rank: int) -> None:
    """Chooses the next action of a rank."""
    candidates, free, ready = listing.candidates, progress.free[rank], progress.ready
    earliest, start, chosen = _NEVER, _NEVER, -1
    for k in range(candidates.lengths[rank]):
        action = candidates.rows[rank, k]
        if graph.acquired[action] <= listing.room[rank, graph.chain[action]]:
            earliest = min(earliest, ready[action])
    latest, best = max(earliest, free) + listing.window, _NEVER
    for k in range(candidates.lengths[rank]):
        action = candidates.rows[rank, k]
        fits = graph.acquired[action] <= listing.room[rank, graph.chain[action]]
        priority = listing.priority[action]
        if gaps is not None:
            priority = _priority_now(listing, gaps, rank, action)
        if fits and ready[action] <= latest and priority < best:
            chosen, best, start = k, priority, max(free, ready[action])
    if listing.num_filled[rank] < listing.fillers.lengths[rank]:
        filler = listing.fillers.rows[rank, listing.num_filled[rank]]
        if start > free and start - free >= listing.patience * graph.seconds[filler]:
            chosen, start = -1, free
    listing.chosen[rank], listing.start[rank], listing.is_known[rank] = chosen, start, True


def _priority_now(listing: ByPriority, gaps: HeadGaps, rank: int, action: int) -> float:
    raised = gaps.is_gradient[action] and gaps.num_gradients[rank] > gaps.most_gradients
    return float(listing.priority[action] - (gaps.gradient_class * gaps.unit if raised else 0.0))


def _goes_first(listing: ByPriority, gaps: HeadGaps, rank: int, other: int) -> bool:
    """Returns whether a rank starts its action at the same time as another one, and that is of a lower class."""
    is_tie = listing.start[rank] == listing.start[other] < _NEVER
    return is_tie and _class_of(listing, gaps, rank) < _class_of(listing, gaps, other)


def _class_of(listing: ByPriority, gaps: HeadGaps, rank: int) -> float:
    action = listing.candidates.rows[rank, listing.chosen[rank]]
    return float(np.floor(_priority_now(listing, gaps, rank, action) / gaps.unit))


def _taken(
    graph: ActionGraph,
    listing: ByPriority,
    chains: ChainMemory | None,
    slots: StageSlots | None,
    gaps: HeadGaps | None,
    rank: int,
) -> int:
    """Takes the action that a rank has chosen, and notes what that changes."""
    candidates, chosen = listing.candidates, listing.chosen[rank]
    if chosen < 0:
        action = listing.fillers.rows[rank, listing.num_filled[rank]]
        listing.num_filled[rank] += 1
    else:
        action = candidates.rows[rank, chosen]
        candidates.lengths[rank] -= 1
        candidates.rows[rank, chosen] = candidates.rows[rank, candidates.lengths[rank]]
    listing.is_known[rank] = False
    _append(listing.order, rank, action)
    if chains is not None:
        chain, change = graph.chain[action], graph.acquired[action] - graph.released[action]
        chains.held[rank, chain] += change
        chains.total[rank] += change
        chains.missing[rank, chain] -= graph.acquired[action]
        chains.open_actions[rank, chain] -= 1
        _update_room(graph.limits[rank], rank, listing.room, chains)
    if slots is not None:
        change = int(graph.released[action] - graph.acquired[action])
        slots.of_stage[rank, graph.chain[action]] += change
        slots.of_rank[rank] += change
        if change < 0:
            slots.forwards[rank, graph.chain[action]] += 1
        _update_slots(rank, listing.room, slots)
    if gaps is not None:
        if gaps.is_gradient[action]:
            gaps.num_gradients[rank] -= 1
        if gaps.ends_forwards[action]:
            for other in range(len(listing.priority)):
                if gaps.microbatch[other] == gaps.microbatch[action]:
                    listing.priority[other] = gaps.later[other]
            listing.is_known[:] = False
    return int(action)


def _offer(graph: ActionGraph, listing: ByPriority, gaps: HeadGaps | None, action: int) -> None:
    """Adds an action to those that its rank may run."""
    rank = graph.rank[action]
    listing.is_known[rank] = False
    _append(listing.fillers if action >= len(graph.seconds) - listing.num_fillers else listing.candidates, rank, action)
    if gaps is not None:
        gaps.num_gradients[rank] += int(gaps.is_gradient[action])


def _append(order: ActionOrder, rank: int, number: int) -> None:
    order.rows[rank, order.lengths[rank]] = number
    order.lengths[rank] += 1


def _update_room(limit: float, rank: int, room: Floats, chains: ChainMemory) -> None:
    """Oldest first: a chain can end if the bytes that it lacks, and those that it and all younger chains hold, fit."""
    if limit == _NEVER:
        return
    chain, num_chains, younger, left = chains.oldest[rank], chains.held.shape[1], chains.total[rank], _NEVER
    while chain < num_chains and not chains.open_actions[rank, chain]:
        chain += 1
    chains.oldest[rank] = chain
    while chain < num_chains and left >= chains.least[rank]:
        room[rank, chain] = left
        if chains.open_actions[rank, chain]:
            left = min(left, limit - younger - chains.missing[rank, chain])
        younger -= chains.held[rank, chain]
        chain += 1
    for other in range(chain, chains.reach[rank]):
        room[rank, other] = left
    chains.reach[rank] = chain


def _update_slots(rank: int, room: Floats, slots: StageSlots) -> None:
    """Notes how many forwards each of a rank's two stages may run, given those of the other one that are due before."""
    for stage in range(2):
        other, left = 1 - stage, slots.of_rank[rank]
        forward, earlier = slots.forwards[rank, stage], slots.forwards[rank, other]
        if forward < slots.ends[rank, stage]:
            while left > 0 and earlier < slots.ends[rank, other] and slots.due[earlier] < slots.due[forward]:
                left -= 1
                earlier += 1
        room[rank, stage] = min(left, slots.of_stage[rank, stage])


def _by_priority(graph: ActionGraph, priority: Floats, window: float, patience: float, num_fillers: int) -> ByPriority:
    """Returns the policy before its first choice, with room for everything."""
    num_ranks, _, num_chains, longest = graph.counts
    candidates = ActionOrder(np.empty((num_ranks, longest), np.int64), np.zeros(num_ranks, np.int64))
    fillers = ActionOrder(np.empty((num_ranks, longest), np.int64), np.zeros(num_ranks, np.int64))
    order = ActionOrder(np.empty((num_ranks, longest), np.int64), np.zeros(num_ranks, np.int64))
    num_filled, chosen = np.zeros(num_ranks, np.int64), np.zeros(num_ranks, np.int64)
    start, is_known = np.zeros(num_ranks), np.zeros(num_ranks, np.bool_)
    room = np.full((num_ranks, num_chains), _NEVER)
    lists = order, candidates, fillers, num_filled
    return ByPriority(priority, window, patience, num_fillers, *lists, chosen, start, is_known, room)


def _offer_first(graph: ActionGraph, progress: SweepProgress, listing: ByPriority, gaps: HeadGaps | None) -> None:
    """Offers the actions that nothing precedes."""
    for action in range(len(graph.seconds)):
        if graph.exists[action] and progress.missing[action] == 0:
            _offer(graph, listing, gaps, action)


def _expect_all(graph: ActionGraph, room: Floats, chains: ChainMemory) -> None:
    """Counts what the chains will take."""
    for action in range(len(graph.seconds)):
        if graph.exists[action]:
            rank, chain, acquired = graph.rank[action], graph.chain[action], graph.acquired[action]
            chains.missing[rank, chain] += acquired
            chains.open_actions[rank, chain] += 1
            if acquired > 0:
                chains.least[rank] = min(chains.least[rank], acquired)
    for rank in range(len(graph.limits)):
        _update_room(graph.limits[rank], rank, room, chains)


def start_times(graph: ActionGraph, order: ActionOrder) -> Floats:
    """Returns each action's start if the ranks run `order`, as `slipstream.simulate` does.

    Actions that never start, because they are missing or the ranks get stuck, have -1.
    """
    progress = no_progress(graph)
    sweep(graph, progress, in_rows(order), None, None, None, None, None, None)
    return progress.start


def delayed_start_times(graph: ActionGraph, order: ActionOrder, delays: Floats) -> Floats:
    """Returns the same where results go to several ranks that aren't equally far; see `sweep`."""
    progress = no_progress(graph)
    sweep(graph, progress, in_rows(order), None, delays, None, None, None, None)
    return progress.start


def place_replays(graph: ActionGraph, order: ActionOrder, replays: Replays) -> None:
    """Fills the places of the forwards that run again; see `Replays`."""
    sweep(graph, no_progress(graph), in_rows(order), None, None, replays, None, None, None)


def place(graph: ActionGraph, priority: Floats, window: float, patience: float) -> tuple[ActionOrder, Floats]:
    """Returns the order of list scheduling and its start times. It always ends, within the memory limits.

    See `ByPriority` for how it chooses, and `ChainMemory` for the limits. Weight gradients fill gaps.
    """
    num_ranks, _, num_chains, _ = graph.counts
    shape = num_ranks, num_chains
    held, missing, total = np.zeros(shape), np.zeros(shape), np.zeros(num_ranks)
    oldest, reach = np.zeros(num_ranks, np.int64), np.full(num_ranks, num_chains)
    least, open_actions = np.full(num_ranks, _NEVER), np.zeros(shape, np.int64)
    chains = ChainMemory(held, missing, open_actions, total, least, oldest, reach)
    listing, progress = _by_priority(graph, priority, window, patience, len(graph.seconds) // 3), no_progress(graph)
    _expect_all(graph, listing.room, chains)
    _offer_first(graph, progress, listing, None)
    sweep(graph, progress, None, listing, None, None, chains, None, None)
    return listing.order, progress.start


def place_due(graph: ActionGraph, priority: Floats, slots: StageSlots) -> ActionOrder:
    """Returns the order in which each rank runs what is due first, in the slots that its stages have."""
    listing, progress = _by_priority(graph, priority, 0.0, 0.0, 0), no_progress(graph)
    for rank in range(len(graph.limits)):
        _update_slots(rank, listing.room, slots)
    _offer_first(graph, progress, listing, None)
    sweep(graph, progress, None, listing, None, None, None, slots, None)
    return listing.order


def fill_gaps(graph: ActionGraph, priority: Floats, gaps: HeadGaps) -> tuple[ActionOrder, Floats]:
    """Returns the order in which each rank runs what comes first, and the start times; `priority` changes on the way.

    Where equally many seconds have passed, a rank whose action is of a lower class goes first.
    """
    listing, progress = _by_priority(graph, priority, 0.0, 0.0, 0), no_progress(graph)
    _offer_first(graph, progress, listing, gaps)
    sweep(graph, progress, None, listing, None, None, None, None, gaps)
    return listing.order, progress.start


def makespan(graph: ActionGraph, start: Floats) -> float:
    """Returns the end of the last action; infinite if one never starts."""
    last = 0.0
    for action in range(len(start)):
        if graph.exists[action]:
            if start[action] < 0:
                return _NEVER
            last = max(last, start[action] + graph.seconds[action])
    return last


def peak(graph: ActionGraph, order: ActionOrder, rank: int) -> float:
    """Returns the peak bytes of activations of a rank, which depend only on its order."""
    most = held = 0.0
    for k in range(order.lengths[rank]):
        action = order.rows[rank, k]
        held += graph.acquired[action]
        most = max(most, held)
        held -= graph.released[action]
    return most
