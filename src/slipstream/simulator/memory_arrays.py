"""The quick accounts of memory over arrays: the most that ranks hold in an order that is not lowered.

Lowering an order and counting what it holds by kind (`rank_memory`) takes far longer than making it; a search has many,
and a step is planned while another one runs.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from slipstream.array_types import Flags, Floats, Ints
from slipstream.schedule import NARROWEST_WINDOW, Action, Op, Schedule, unit_seconds
from slipstream.simulator.action_graph import NUMBERS, OPS, ActionArrays, first_of
from slipstream.simulator.memory_table import MemoryTable, StageSlice
from slipstream.simulator.time_kernel import start_times

_F, _B, _I, _W = (NUMBERS[op] for op in (Op.F, Op.B, Op.I, Op.W))
_UNIT_SECONDS = np.array([unit_seconds(Action(op, 0)) for op in OPS], float)
BACKWARD_OPS = (Op.B, Op.I, Op.W)


def quick_peaks(arrays: ActionArrays, table: MemoryTable) -> tuple[Floats, Floats]:
    """Returns the most bytes that each rank holds, messages aside, and the most that each has on the host.

    The search of plans runs this for every configuration, so it needs no lowered schedule and keeps one sum instead of
    one per kind. `rank_memory` is the full account; a property test shows that they agree. Every stage must split all
    of its backwards or none.

    Args:
        arrays: of the whole schedule, without sends and receives.
        table: bytes of every action.
    """
    schedule, op, stage = arrays.schedule, arrays.op, arrays.stage
    stages = range(schedule.num_stages)
    saved = _has(Op.R, arrays), _has(Op.OFFLOAD, arrays)
    shape = len(OPS), schedule.num_stages, schedule.num_slices, 2, 2
    different, like = np.unique(np.ravel_multi_index((op, stage, arrays.slice, *saved), shape), return_inverse=True)
    places = np.transpose(np.unravel_index(different, shape)).tolist()
    kinds = [(StageSlice(g, i, bool(again), bool(away)), OPS[number]) for number, g, i, again, away in places]
    footprints = [table.footprints[kind] for kind in kinds]
    left, during = (
        np.array(sizes, float)[like]
        for sizes in ([each.leaves for each in footprints], [each.peak for each in footprints])
    )
    first = np.array([table.first.get(kind, np.nan) for kind in kinds])[like]
    made = np.array([[table.gradients.get((g, each), 0.0) for g in stages] for each in BACKWARD_OPS], float)
    context, gradients = (
        np.array([sizes[g] for g in stages], float)[stage] for sizes in (table.context, table.context_gradients)
    )
    state = np.bincount(schedule.placement, [table.parameters[g] + table.optimizer[g] for g in stages])
    moved = left * ((op == NUMBERS[Op.OFFLOAD]) | (op == NUMBERS[Op.RELOAD]))
    nothing = np.zeros(len(op))
    held = state + row_peaks(arrays.firsts, *rank_bytes(arrays, left, during, first, made, context, gradients))
    return held, row_peaks(arrays.firsts, -moved, nothing, nothing)


def rank_bytes(
    arrays: ActionArrays,
    leaves: Floats,
    during: Floats,
    first: Floats,
    made: Floats,
    context: Floats,
    context_gradients: Floats,
) -> tuple[Floats, Floats, Floats]:
    """Returns the bytes that each action takes, holds besides and frees, as `row_peaks` has them.

    Args:
        arrays: of the actions.
        leaves: what each leaves for others.
        during: the most that each holds over what was held before.
        first: likewise, of an action that makes weight gradients. Not a number: those and what it holds.
        made: the weight gradients that the first B, I and W of each stage make, (3, stages): B all, the others a part.
        context: the keys and values of each action's microbatch on its stage.
        context_gradients: their gradients.
    """
    op, stage, size = arrays.op, arrays.stage, len(arrays.op)
    firsts = np.full(made.shape, size)
    for number, each in enumerate(BACKWARD_OPS):
        places = np.flatnonzero(first_of(stage, op == NUMBERS[each]))
        firsts[number, stage[places]] = places
    makes = firsts < size
    makes[1:] &= firsts[1:] < firsts[0]  # where B came before there is nothing left to make
    own, more = made.copy(), made.copy()
    more[0] -= (made[1:] * makes[1:]).sum(axis=0)
    takes, during, at = np.zeros(size), during.copy(), firsts[makes]
    takes[at] = more[makes]
    during[at] = np.where(np.isnan(first[at]), during[at], first[at] - own[makes])
    opens, begins, closes = arrays.context_marks
    gives = leaves + context * opens + context_gradients * begins - context * closes
    gives -= context_gradients * (closes & (stage >= arrays.schedule.num_frozen_stages))
    return takes, during, -gives


def _has(op: Op, arrays: ActionArrays) -> Flags:
    """Marks the actions whose slice has such an op on their stage."""
    schedule, units = arrays.schedule, (arrays.stage, arrays.microbatch, arrays.slice)
    found = np.zeros((schedule.num_stages, schedule.num_microbatches, schedule.num_slices), np.bool_)
    found[tuple(each[arrays.op == NUMBERS[op]] for each in units)] = True
    marks: Flags = found[units]
    return marks


def row_peaks(firsts: Ints, before: Floats, during: Floats, after: Floats) -> Floats:
    """Returns the most bytes that each rank holds.

    Args:
        firsts: rank r's actions are `firsts[r]` up to `firsts[r + 1]`.
        before: the bytes that each action takes as it begins.
        during: those that it holds besides while it runs.
        after: those that it frees as it ends.
    """
    most = []
    for first, end in pairwise(firsts):
        held = np.cumsum(before[first:end]) - np.concatenate([[0.0], np.cumsum(after[first : end - 1])])
        most.append((held + during[first:end]).max())
    return np.array(most)


@dataclass(frozen=True)
class StepBytes:
    """The bytes of one step's slices, of all microbatches: what their `MemoryTable`s have, as arrays.

    Args:
        leaves: of F, B, I and W, (4, stages, slices).
        peaks: likewise.
        first: likewise, of a stage's first backward of its kind.
        context: keys and values, (stages, microbatches).
        context_gradients: their gradients.
        payload: of each slice's message, without its header.
        header: of each message.
        gradients: the weight gradients that F, B, I and W of each stage make, (4, stages).
        state: of each rank's parameters and optimizer.
    """

    leaves: Floats
    peaks: Floats
    first: Floats
    context: Floats
    context_gradients: Floats
    payload: Floats
    header: float
    gradients: Floats
    state: Floats

    def rank_peaks(self, schedule: Schedule) -> Floats:
        """Returns the most bytes that each rank holds in an order of F, B, I, W and REDUCE_GRAD.

        Of messages' buffers this states again, for all messages at once, what `pool_bytes` and `add_communication` do;
        a property test shows that they agree.
        """
        arrays, counts = ActionArrays.of(schedule), np.array(schedule.slice_counts)
        slices = (np.cumsum(counts) - counts)[arrays.microbatch] + arrays.slice
        return self.state + self._held(arrays, slices) + self._buffers(arrays, slices)

    def _held(self, arrays: ActionArrays, slices: Ints) -> Floats:
        """Returns the most that each rank holds besides buffers, while its actions run and before they have sent."""
        op, stage, placement = arrays.op, arrays.stage, np.array(arrays.schedule.placement)
        place, own = (np.minimum(op, _W), stage, slices), (stage, arrays.microbatch)
        computes = op <= _W
        takes, during, frees = rank_bytes(
            arrays,
            np.where(computes, self.leaves[place], 0.0),
            np.where(computes, self.peaks[place], -np.inf),  # a reduction is no moment of its own
            self.first[place],
            self.gradients[_B:],
            self.context[own],
            self.context_gradients[own],
        )
        forward, backward = op == _F, (op == _B) | (op == _I)
        there = np.concatenate([[-1], placement, [-1]])  # the rank of each stage, after that of the one before
        before, here, after = there[stage], there[stage + 1], there[stage + 2]
        other = np.where(forward, after, before)
        sends = (forward | backward) & (other >= 0) & (other != here)
        kept = ((forward | backward) & (other == here)).astype(int)
        kept -= backward & (before == here)
        kept -= ((op == _B) | (op == _W)) & (after == here)
        payload = self.payload[slices]
        frees = frees - payload * kept
        during = np.where(sends, np.maximum(during, payload - frees), during)
        return row_peaks(arrays.firsts, takes, during, frees)

    def _buffers(self, arrays: ActionArrays, slices: Ints) -> Floats:
        """Returns the bytes of each rank's buffers of messages."""
        rank, placement = arrays.rank, np.array(arrays.schedule.placement)
        graph, order = arrays.graph(_UNIT_SECONDS[arrays.op])
        starts = start_times(graph, order)
        ends = starts + graph.seconds
        user = np.flatnonzero(arrays.producer >= 0)
        user = user[np.argsort(arrays.producer[user], kind="stable")]
        sender = arrays.producer[user]
        posted, oldest = np.zeros_like(user), np.full_like(user, -1)
        lines = np.stack([arrays.op[sender] == _F, rank[sender], rank[user]])
        for line in np.unique(lines, axis=1).T:
            mine = np.flatnonzero((lines == line[:, None]).all(axis=0))
            begin, end = arrays.firsts[line[2]], arrays.firsts[line[2] + 1]
            # A receive is posted where its rank stands when the message is sent, or one action before it is needed, and
            # not after that of a later message.
            witnessed = begin + np.searchsorted(starts[begin:end], ends[sender[mine]])
            latest = np.minimum(witnessed, np.maximum(user[mine] - 1, begin))
            posted[mine] = np.minimum.accumulate(latest[::-1])[::-1]
            open_receives = np.searchsorted(posted[mine], posted[mine], side="right")
            open_receives -= np.searchsorted(np.sort(user[mine] + 1), posted[mine], side="right")
            window = max(NARROWEST_WINDOW, 2 * int(open_receives.max()))
            oldest[mine[window:]] = mine[:-window]
        waits = np.flatnonzero(oldest >= 0)
        crosses = np.concatenate([[0], np.diff(placement) != 0, [0]])
        received = (crosses[:-1] + crosses[1:])[arrays.stage]
        done = np.flatnonzero(((arrays.op == _B) | (arrays.op == _W)) & (received > 0))
        # Before an action, receives are posted, and the result of the action before is sent, for which an older message
        # may have to be gone; a backward then gives back what its slice received.
        by_cause = (
            (rank[user], 3 * posted, slices[user], np.ones_like(user)),
            (rank[sender[waits]], 3 * sender[waits] + 4, slices[sender[oldest[waits]]], -np.ones_like(waits)),
            (rank[sender], 3 * sender + 4, slices[sender], np.ones_like(sender)),
            (rank[done], 3 * done + 2, slices[done], -received[done]),
        )
        ranks, moments, of_slice, changes = (np.concatenate(each) for each in zip(*by_cause, strict=True))
        sizes = (self.payload + self.header)[of_slice]
        return _most_in_use(ranks, moments, sizes, changes, arrays.schedule.num_ranks)


def _most_in_use(ranks: Ints, moments: Ints, sizes: Floats, changes: Ints, num_ranks: int) -> Floats:
    """Returns the bytes of each rank's buffers: of each size as many as are ever in use at the same time.

    Args:
        ranks: of each change of the number in use.
        moments: of each; those of one moment are in order.
        sizes: of the buffers, in bytes.
        changes: of their number.
        num_ranks: of the schedule.
    """
    order = np.lexsort((moments, sizes, ranks))
    ranks, sizes, changes = ranks[order], sizes[order], changes[order]
    first = np.flatnonzero((np.diff(ranks, prepend=-1) != 0) | (np.diff(sizes, prepend=-1.0) != 0))
    if not len(first):
        return np.zeros(num_ranks)
    used = np.cumsum(changes)
    most = np.maximum.reduceat(used, first) - used[first] + changes[first]
    return np.bincount(ranks[first], sizes[first] * most, num_ranks).astype(float)
