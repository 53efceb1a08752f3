"""The account of memory over arrays: the most that ranks hold in an order that is not lowered.

Lowering an order and counting what it holds by kind (`rank_memory`) takes far longer than making it; a search has many,
and a step is planned while another one runs. A property test shows that the two agree.
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
_BACKWARDS = (Op.B, Op.I, Op.W)


@dataclass(frozen=True)
class OrderBytes:
    """The bytes of every action of an order, and what its ranks hold all the time.

    Args:
        arrays: the order, without sends and receives, and with a whole head.
        leaves: what each action leaves for others.
        peaks: the most that each holds over what was held before.
        first: likewise, of an action that makes weight gradients. Not a number: those and its peak.
        made: the weight gradients that the first B, I and W of each stage make, (3, stages): B all, the others a part.
        context: the keys and values of each action's microbatch on its stage.
        context_gradients: their gradients.
        payload: the message of each action's slice, without its header.
        header: of each message.
        state: the parameters and the optimizer of each rank.
    """

    arrays: ActionArrays
    leaves: Floats
    peaks: Floats
    first: Floats
    made: Floats
    context: Floats
    context_gradients: Floats
    payload: Floats
    header: float
    state: Floats

    def rank_peaks(self) -> Floats:
        """Returns the most bytes that each rank holds."""
        during, takes = self._with_gradients()
        opens, begins, closes = self.arrays.context_marks
        sends, handed_over = self._results()
        gives = self.leaves + self.context * opens + self.context_gradients * begins - self.context * closes
        gives -= self.context_gradients * (closes & (self.arrays.stage >= self.arrays.schedule.num_frozen_stages))
        frees = -gives - self.payload * handed_over
        during = np.where(sends, np.maximum(during, self.payload - frees), during)  # what is sent is held until then
        return self.state + row_peaks(self.arrays.firsts, takes, during, frees) + self._buffers()

    def host_peaks(self) -> Floats:
        """Returns the most bytes that each rank has on its host."""
        moved = self.leaves * ((self.arrays.op == NUMBERS[Op.OFFLOAD]) | (self.arrays.op == NUMBERS[Op.RELOAD]))
        nothing = np.zeros(len(moved))
        return row_peaks(self.arrays.firsts, -moved, nothing, nothing)

    def _with_gradients(self) -> tuple[Floats, Floats]:
        """Returns the most that each action holds besides weight gradients, and those that it makes."""
        op, stage, size = self.arrays.op, self.arrays.stage, len(self.arrays.op)
        firsts = np.full(self.made.shape, size)
        for number, each in enumerate(_BACKWARDS):
            places = np.flatnonzero(first_of(stage, op == NUMBERS[each]))
            firsts[number, stage[places]] = places
        makes = firsts < size
        makes[1:] &= firsts[1:] < firsts[0]  # where B came before there is nothing left to make
        more = self.made.copy()
        more[0] -= (self.made[1:] * makes[1:]).sum(axis=0)
        takes, during, at = np.zeros(size), self.peaks.copy(), firsts[makes]
        takes[at] = more[makes]
        during[at] = np.where(np.isnan(self.first[at]), during[at], self.first[at] - self.made[makes])
        return during, takes

    def _neighbours(self) -> tuple[Ints, Ints, Ints]:
        """Returns the ranks of the stage before each action's, of its own and of the one after; -1 for none."""
        ranks = np.concatenate([[-1], self.arrays.schedule.placement, [-1]])
        return ranks[self.arrays.stage], self.arrays.rank, ranks[self.arrays.stage + 2]

    def _needs_no_input(self) -> Flags:
        """Marks the actions on slices whose input only the forward needs: what follows works on a copy, or nothing."""
        frozen = self.arrays.stage < self.arrays.schedule.num_frozen_stages
        return frozen | has_op(Op.OFFLOAD, self.arrays)

    def _results(self) -> tuple[Flags, Ints]:
        """Marks the actions whose result is sent, and counts the results that each leaves on its rank for another
        stage, less those that it is the last to need there."""
        op, (before, here, after) = self.arrays.op, self._neighbours()
        forward, backward = op == _F, (op == _B) | (op == _I)
        back_to = np.where(self.arrays.stage > self.arrays.schedule.num_frozen_stages, before, -1)
        to = np.where(forward, after, np.where(backward, back_to, -1))
        handed_over = (to == here).astype(int)
        handed_over -= np.where(self._needs_no_input(), forward, backward) & (before == here)
        handed_over -= ((op == _B) | (op == _W)) & (after == here)
        return (to >= 0) & (to != here), handed_over

    def _buffers(self) -> Floats:
        """Returns the bytes of each rank's buffers of messages, as `pool_bytes` counts them for the lowered order."""
        arrays, (before, rank, after) = self.arrays, self._neighbours()
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
        last_with_input = np.where(self._needs_no_input(), arrays.op == _F, (arrays.op == _B) | (arrays.op == _W))
        returned = (last_with_input & (before >= 0) & (before != rank)).astype(int)
        returned += ((arrays.op == _B) | (arrays.op == _W)) & (after >= 0) & (after != rank)
        done = np.flatnonzero(returned)
        # Before an action, receives are posted, and the result of the action before is sent, for which an older message
        # may have to be gone; an action then returns what its slice received.
        by_cause = (
            (rank[user], 3 * posted, user, np.ones_like(user)),
            (rank[sender[waits]], 3 * sender[waits] + 4, sender[oldest[waits]], -np.ones_like(waits)),
            (rank[sender], 3 * sender + 4, sender, np.ones_like(sender)),
            (rank[done], 3 * done + 2, done, -returned[done]),
        )
        ranks, moments, actions, changes = (np.concatenate(each) for each in zip(*by_cause, strict=True))
        sizes = self.payload[actions] + self.header
        return _most_in_use(ranks, moments, sizes, changes, arrays.schedule.num_ranks)


def order_bytes(arrays: ActionArrays, table: MemoryTable) -> OrderBytes:
    """Returns the bytes of an order of microbatches that are alike.

    Args:
        arrays: of the whole schedule; every stage must split all of its backwards or none.
        table: bytes of every action.
    """
    schedule, op, stage = arrays.schedule, arrays.op, arrays.stage
    stages = range(schedule.num_stages)
    saved = has_op(Op.R, arrays), has_op(Op.OFFLOAD, arrays)
    shape = len(OPS), schedule.num_stages, schedule.num_slices, 2, 2
    different, like = np.unique(np.ravel_multi_index((op, stage, arrays.slice, *saved), shape), return_inverse=True)
    places = np.transpose(np.unravel_index(different, shape)).tolist()
    kinds = [(StageSlice(g, i, bool(again), bool(away)), OPS[number]) for number, g, i, again, away in places]
    footprints = [table.footprints[kind] for kind in kinds]
    context, gradients = (
        np.array([sizes[g] for g in stages], float)[stage] for sizes in (table.context, table.context_gradients)
    )
    return OrderBytes(
        arrays,
        leaves=np.array([each.leaves for each in footprints], float)[like],
        peaks=np.array([each.peak for each in footprints], float)[like],
        first=np.array([table.first.get(kind, np.nan) for kind in kinds], float)[like],
        made=np.array([[table.gradients.get((g, each), 0.0) for g in stages] for each in _BACKWARDS], float),
        context=context,
        context_gradients=gradients,
        payload=np.array([table.payload(index) for index in range(schedule.num_slices)], float)[arrays.slice],
        header=table.header_bytes,
        state=np.bincount(schedule.placement, [table.parameters[g] + table.optimizer[g] for g in stages]).astype(float),
    )


def has_op(op: Op, arrays: ActionArrays) -> Flags:
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

    def of_order(self, schedule: Schedule) -> OrderBytes:
        """Returns the bytes of an order of F, B, I, W and REDUCE_GRAD."""
        arrays, counts = ActionArrays.of(schedule), np.array(schedule.slice_counts)
        slices = (np.cumsum(counts) - counts)[arrays.microbatch] + arrays.slice
        place, own = (np.minimum(arrays.op, _W), arrays.stage, slices), (arrays.stage, arrays.microbatch)
        computes = arrays.op <= _W
        return OrderBytes(
            arrays,
            leaves=np.where(computes, self.leaves[place], 0.0),
            peaks=np.where(computes, self.peaks[place], -np.inf),  # a reduction is no moment of its own
            first=self.first[place],
            made=self.gradients[_B:],
            context=self.context[own],
            context_gradients=self.context_gradients[own],
            payload=self.payload[slices],
            header=self.header,
            state=self.state,
        )


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
