"""The memory that ranks hold while their actions run: a matter of their order, not of times.

Arrays tell it of a whole order at once: a search has many orders, and a step is planned while another one runs.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import accumulate, pairwise, takewhile
from typing import Any

import numpy as np

from slipstream.array_types import Flags, Floats, Ints
from slipstream.schedule import (
    BACKWARDS,
    COMMUNICATION,
    RECEIVES,
    SENDS,
    VOCABULARY,
    Action,
    Channel,
    Op,
    Schedule,
    add_communication,
    channel,
    far_inputs,
    is_here,
    send_window,
    sending,
    sent_result,
    settlements,
    unit_seconds,
    with_far_messages,
    without_communication,
)
from slipstream.schedule.action import NUMBERS, OPS
from slipstream.schedule.action_arrays import ActionArrays, MessageArrays, first_of
from slipstream.simulator.costs import (
    Footprint,
    MemoryKind,
    MemoryTable,
    MemoryTables,
    RankMemory,
    StageSlice,
    table_of,
)

_F, _B, _I, _W = (NUMBERS[op] for op in (Op.F, Op.B, Op.I, Op.W))
_ALWAYS = MemoryKind.PARAMETERS, MemoryKind.OPTIMIZER, MemoryKind.MESSAGES
NO_MOMENT = Footprint(0.0, -np.inf)  # a reduction's: the next action holds as much
GRADIENT_MAKERS = ((Op.B,), (Op.I,), (Op.W,), (Op.VW, Op.EW))  # the ops of which a stage's first makes weight gradients


@dataclass(frozen=True)
class OrderBytes:
    """The bytes of every action of an order, and those that its ranks hold all the time.

    Args:
        arrays: the order, without sends and receives.
        lowered: the same with sends and receives. None: they are the executor's.
        leaves: those that each action leaves for others.
        peaks: the most that each needs over those in use before.
        first: the same of an action that makes weight gradients. Not a number: those and its peak.
        made: the weight gradients of each stage's first action of `GRADIENT_MAKERS`, (4, stages): for B of I and W.
        context: the keys and values of each action's microbatch on its stage.
        context_gradients: their gradients.
        host_context: the bytes of keys, values and gradients that each action leaves on the host, and the most that it
            needs there, (2, action).
        host_shares: of each slice of each microbatch, as `MemoryTable` has it.
        payload: the message of each slice of each microbatch, without its header.
        header: of each message.
        buffers: of each op that sends a message of a spread head, with its header, for each slice of each microbatch.
        w_shares: of each slice of each microbatch, as `MemoryTable` has it.
        parameters: of each rank.
        optimizer: of each rank.
        host_optimizer: of each rank's host.
        kept_gradients: of each stage, the weight gradients that stay until the step's end; infinite where all do.
    """

    arrays: ActionArrays
    lowered: Schedule | None
    leaves: Floats
    peaks: Floats
    first: Floats
    made: Floats
    context: Floats
    context_gradients: Floats
    host_context: Floats
    host_shares: Floats
    payload: Floats
    header: float
    buffers: Mapping[Op, Floats]
    w_shares: Flags
    parameters: Floats
    optimizer: Floats
    host_optimizer: Floats
    kept_gradients: Floats

    def rank_peaks(self) -> Floats:
        """Returns the most bytes that each rank holds."""
        most, makes = (per_action.copy() for per_action in self._gradients)
        gives, after = sum(self._gives.values(), self.leaves), self._sent_after
        # Messages are held until then, and no longer when the next action begins.
        most[after] = np.maximum(most[after], gives[after])
        sent = np.bincount(after + 1, self._payloads[self._messages.sender], len(makes) + 1)[:-1]
        sent[self.arrays.firsts[:-1]] = 0.0  # messages of the end of the rank before
        makes -= sent
        return self.parameters + self.optimizer + self._pools + row_peaks(self.arrays.firsts, makes, most, -gives)

    def host_peaks(self) -> Floats:
        """Returns the most bytes that each rank has on its host."""
        leaves, peaks = self.host_context
        return self.host_optimizer + row_peaks(self.arrays.firsts, self._offloaded, peaks, -leaves)

    @cached_property
    def _offloaded(self) -> Floats:
        """The bytes of activations that each action moves to the host, below 0 for those that it brings back."""
        moved = self.leaves * self.arrays.is_one_of(Op.OFFLOAD, Op.RELOAD)
        offloaded: Floats = -moved * self.host_shares[self.arrays.slices]
        return offloaded

    def memory(self, frees_late: bool = False) -> tuple[RankMemory, ...]:
        """Returns every rank's memory, action by action and by kind; see `memory_of`."""
        return tuple(self.rank_memory(rank, frees_late) for rank in range(self.arrays.schedule.num_ranks))

    def rank_memory(self, rank: int, frees_late: bool = False) -> RankMemory:
        """Returns one rank's memory."""
        arrays, at = self.arrays, {kind: number for number, kind in enumerate(MemoryKind)}
        row = np.arange(*arrays.firsts[rank : rank + 2])
        row = row[[*_freeing_late(arrays.op[row].tolist())]] if frees_late else row
        sends = np.flatnonzero(arrays.rank[self._messages.sender] == rank)
        actions = row[arrays.op[row] != NUMBERS[Op.REDUCE_GRAD]]
        # A send comes after the action that stands before it in the order.
        places = np.zeros(len(arrays.op), np.int64)
        places[row] = np.arange(len(row))
        order = np.argsort(np.concatenate([places[actions], places[self._sent_after[sends]]]), kind="stable")
        numbers, count = np.concatenate([actions, self._messages.sender[sends]]), len(actions)
        most, makes = (column[actions] for column in self._gradients)
        begins, extra, ends = np.zeros((3, len(at), len(order)))
        begins[at[MemoryKind.GRADIENTS], :count] = makes
        # The tensors that RELOAD brings back are activations, as before.
        reloads = arrays.op[actions] == NUMBERS[Op.RELOAD]
        extra[at[MemoryKind.ACTIVATIONS], :count], extra[at[MemoryKind.WORKSPACE], :count] = most * [reloads, ~reloads]
        for kind, changes in (*self._left, *self._gives.items()):
            ends[at[kind], :count] += changes[actions]
        ends[at[MemoryKind.MESSAGES], count:] = -self._payloads[numbers[count:]]
        held = np.zeros((len(at), 1))
        held[[*map(at.__getitem__, _ALWAYS)], 0] = self.parameters[rank], self.optimizer[rank], self._pools[rank]
        after = held + np.cumsum((begins + ends)[:, order], axis=1)
        before = np.concatenate([held, after[:, :-1]], axis=1)

        def action(moment: int) -> Action:
            op, *place = (int(column[numbers[order[moment]]]) for column in arrays.columns)
            ran = Action(OPS[op], *place)
            return ran if order[moment] < count else sending(ran, arrays.schedule) or ran

        during = before + (begins + extra)[:, order]
        return RankMemory(action, during, after.sum(axis=0), self._on_host(rank, actions, order))

    def _on_host(self, rank: int, actions: Ints, order: Ints) -> Floats:
        """Returns the most bytes of each kind that are on a rank's host at each moment, (kind, moment).

        Args:
            rank: of the schedule.
            actions: of the rank.
            order: the moments, as numbers of `actions`, or above these of sends.
        """
        at, count = {kind: number for number, kind in enumerate(MemoryKind)}, len(actions)
        begins, extra, ends = np.zeros((3, len(at), len(order)))
        begins[at[MemoryKind.ACTIVATIONS], :count] = self._offloaded[actions]
        ends[at[MemoryKind.CONTEXT], :count], extra[at[MemoryKind.CONTEXT], :count] = self.host_context[:, actions]
        held = np.zeros((len(at), 1))
        held[at[MemoryKind.OPTIMIZER]] = self.host_optimizer[rank]
        after = held + np.cumsum((begins + ends)[:, order], axis=1)
        before = np.concatenate([held, after[:, :-1]], axis=1)
        most: Floats = before + (begins + extra)[:, order]
        return most

    @cached_property
    def _left(self) -> list[tuple[MemoryKind, Floats]]:
        """What each action leaves, by kind: from F to I activations, from I to W the inputs of W.

        Of L's tensors, the last stage's backward frees the gradient that it starts from.
        """
        arrays, numbers, half = self.arrays, np.arange(len(self.arrays.op)), self.arrays.of_slice(Op.I)
        of_head = arrays.is_one_of(*VOCABULARY)
        own = np.where(of_head, self._payloads * arrays.is_one_of(Op.L), self.leaves)
        early = numbers < half
        moved = np.bincount(half[early], own[early], len(own))
        weights = np.where(arrays.is_one_of(Op.I, Op.W), own, 0.0)
        activations, inputs = own - weights - moved, weights + moved
        kinds = MemoryKind.ACTIVATIONS, MemoryKind.WEIGHT_INPUTS, MemoryKind.VOCABULARY
        return [*zip(kinds, (activations, inputs, np.where(of_head, self.leaves - own, 0.0)), strict=True)]

    @cached_property
    def _payloads(self) -> Floats:
        return self.payload[self.arrays.slices]

    @cached_property
    def _gradients(self) -> tuple[Floats, Floats]:
        """The most that each action holds besides weight gradients, and those that it makes."""
        stage, size = self.arrays.stage, len(self.arrays.op)
        firsts = np.full(self.made.shape, size)
        for row, makers in enumerate(GRADIENT_MAKERS):
            places = np.flatnonzero(first_of(stage, self.arrays.is_one_of(*makers)))
            firsts[row, stage[places]] = places
        makes = firsts < size
        # Where B came before there is nothing left to make.
        makes[1:3] &= firsts[1:3] < firsts[0]
        more = self.made.copy()
        more[0] -= (self.made[1:3] * makes[1:3]).sum(axis=0)
        takes, during, at = np.zeros(size), self.peaks.copy(), firsts[makes]
        takes[at] = more[makes]
        during[at] = np.where(np.isnan(self.first[at]), during[at], self.first[at] - self.made[makes])
        return during, takes

    @cached_property
    def _gives(self) -> dict[MemoryKind, Floats]:
        """The bytes by which each action changes the memory after it besides those it leaves, by kind.

        A result is held until it is sent or, if the next stage is on this rank, until that no longer needs it. Hidden
        states are the next stage's first activation, unless that is frozen. A gradient belongs to the factors of W.
        """
        arrays, op, (before, here, after) = self.arrays, self.arrays.op, self._neighbours
        opens, begins, closes = (marks.astype(int) for marks in arrays.context_marks)
        ends = closes * arrays.trains
        forward, backward = op == _F, (op == _B) | (op == _I)
        results = (forward & (after >= 0)).astype(int)
        results += backward & (arrays.stage > arrays.schedule.num_frozen_stages)
        results -= np.where(self._needs_no_input, forward, backward) & (before == here)
        results -= ((op == _B) | (op == _W)) & (after == here)
        changes = {
            MemoryKind.CONTEXT: self.context * (opens - closes),
            MemoryKind.CONTEXT_GRADIENTS: self.context_gradients * (begins - ends),
            MemoryKind.MESSAGES: self._payloads * results,
        }
        if np.isfinite(self.kept_gradients).any():
            changes[MemoryKind.GRADIENTS] = -self._copied_out()
        if arrays.schedule.spreads_vocabulary:
            changes[MemoryKind.ACTIVATIONS] = self._shared_outputs()
        if arrays.schedule.spreads_embedding:
            changes[MemoryKind.MESSAGES] += self._passed_lookups()
        return changes

    def _copied_out(self) -> Floats:
        """The weight gradients that go to the host after each action: a stage's after its last backward, and after
        those of its rank's later stages (`add_reductions`)."""
        arrays, placement = self.arrays, self.arrays.schedule.placement
        _, made = self._gradients
        leaving = np.maximum(np.bincount(arrays.stage, made, len(placement)) - self.kept_gradients, 0.0)
        backward = arrays.is_one_of(*BACKWARDS, Op.VW, Op.EW)
        last = np.full(len(placement), -1)
        np.maximum.at(last, arrays.stage[backward], np.flatnonzero(backward))
        copied, latest = np.zeros(len(arrays.op)), np.full(arrays.schedule.num_ranks, -1)
        for stage in reversed(np.flatnonzero(last >= 0)):
            rank = placement[stage]
            latest[rank] = max(latest[rank], last[stage])
            copied[latest[rank]] += leaving[stage]
        return copied

    def _shared_outputs(self) -> Floats:
        """The last stage's output, which goes with VW: held until the backward of its slice where that comes later."""
        arrays, last = self.arrays, self.arrays.schedule.num_stages - 1
        return _held_between(arrays.places(Op.VW)[last], arrays.places(Op.B, Op.I)[last], self.payload, len(arrays.op))

    def _passed_lookups(self) -> Floats:
        """The first stage's embeddings on its rank, until that stage's forward takes them, and the gradient of its
        input, which goes with W where that works on it, until the rows have added it where that is later."""
        arrays, schedule = self.arrays, self.arrays.schedule
        rows = next(g for g in schedule.vocabulary_stages if schedule.placement[g] == schedule.placement[0])
        weights, gradient = arrays.places(Op.W)[0], arrays.places(Op.B, Op.I)[0]
        gradient = np.where(self.w_shares & (weights >= 0), weights, gradient)
        size, num_actions = self.buffers[Op.E] - self.header, len(arrays.op)
        lookups = _held_between(arrays.places(Op.E)[rows], arrays.places(Op.F)[0], size, num_actions)
        return lookups + _held_between(gradient, arrays.places(Op.EW)[rows], size, num_actions)

    @cached_property
    def _neighbours(self) -> tuple[Ints, Ints, Ints]:
        """The ranks of the stage before each action's, of its own and of the one after; -1 for none."""
        ranks = np.concatenate([[-1], self.arrays.schedule.placement, [-1]])
        return ranks[self.arrays.stage], self.arrays.rank, ranks[self.arrays.stage + 2]

    @cached_property
    def _needs_no_input(self) -> Flags:
        # After the forward, others work on a copy, or there are none.
        return ~self.arrays.trains | self.arrays.has(Op.OFFLOAD)

    @cached_property
    def _messages(self) -> MessageArrays:
        """The messages between stages, of an order that isn't lowered at the moments that lowering would give them."""
        if self.lowered is not None:
            return MessageArrays.of(self.arrays, self.lowered)
        return MessageArrays.placed(self.arrays, self.arrays.each(unit_seconds), compiled=True)

    @cached_property
    def _sent_after(self) -> Ints:
        return np.searchsorted(self._messages.done, self._messages.sent) - 1

    @cached_property
    def _pools(self) -> Floats:
        """The bytes of each rank's buffers of messages: of each size as many as are ever in use at the same time.

        One for every receive from when it is posted until the backward of its slice is done (W's where it is split,
        since a forward's input and an output's gradient belong to a weight gradient's factors; F's where the input is
        moved to the host or no backward comes), and one for every send until as many later ones have gone out on its
        channel as its window is wide. Those of a spread head's messages come from the same pool.
        """
        arrays, (before, rank, after) = self.arrays, self._neighbours
        sender, user, sent, posted, done, lines = self._messages
        oldest = np.full_like(user, -1)
        for mine in lines:
            window = send_window(self._messages.most_posted(mine))
            oldest[mine[window:]] = mine[:-window]
        waits = np.flatnonzero(oldest >= 0)
        last_with_input = np.where(self._needs_no_input, arrays.op == _F, (arrays.op == _B) | (arrays.op == _W))
        returned = (last_with_input & (before >= 0) & (before != rank)).astype(int)
        returned += ((arrays.op == _B) | (arrays.op == _W)) & (after >= 0) & (after != rank)
        ends = np.flatnonzero(returned)
        sizes = self.payload + self.header
        size = sizes[arrays.slices]
        by_cause = [
            (rank[user], posted, size[user], np.ones_like(user)),
            (rank[sender[waits]], sent[waits], size[sender[oldest[waits]]], -np.ones_like(waits)),
            (rank[sender], sent, size[sender], np.ones_like(sender)),
            (rank[ends], done[ends], size[ends], -returned[ends]),
        ]
        if arrays.schedule.spreads_vocabulary:
            # A whole backward returns its received buffer at its end, others before they compute.
            early, late = self._head_changes()
            by_cause = [*by_cause[:3], early, by_cause[3], late]
        ranks, moments, sizes, changes = (np.concatenate(of_kind) for of_kind in zip(*by_cause, strict=True))
        return _most_in_use(ranks, moments, sizes, changes, arrays.schedule.num_ranks)

    def _head_changes(self) -> Iterator[tuple[Ints, Ints, Floats, Ints]]:
        """Yields the ranks, moments, sizes and changes of the buffers of a spread head's messages: of whole backwards,
        and of all others."""
        of_whole, of_others = list[tuple[float, ...]](), list[tuple[float, ...]]()
        sizes = {op: sizes.tolist() for op, sizes in (*self.buffers.items(), (Op.F, self.payload + self.header))}
        # A gradient of embeddings is as large as they are.
        sizes |= {op: sizes.get(Op.E, []) for op in (Op.B, Op.I)}
        firsts = [*accumulate(self.arrays.schedule.slice_counts, initial=0)]
        done = iter(self._messages.done.tolist())
        lowered = with_far_messages(self.lowered or add_communication(self.arrays.schedule))
        for rank in range(lowered.num_ranks):
            for action, taken in _head_buffers(lowered, rank):
                moment = next(done)
                for send, change in taken:
                    # A SEND follows the action whose result it has, which has returned what it received by then.
                    is_sent = change > 0 and lowered.placement[send.stage] == rank
                    changed = of_whole if action.op is Op.B and not is_sent else of_others
                    size = sizes[sent_result(send, lowered).op][firsts[send.microbatch] + send.slice]
                    changed.append((rank, moment, size, change))
        for changed in (of_whole, of_others):
            ranks, moments, own_bytes, changes = np.array(changed, float).reshape(-1, 4).T
            yield ranks.astype(int), moments.astype(int), own_bytes, changes.astype(int)


def _head_buffers(schedule: Schedule, rank: int) -> Iterator[tuple[Action, list[tuple[Action, int]]]]:
    """Yields a rank's actions that aren't messages, with the messages of a spread head whose buffers it has taken, 1,
    or returned, -1, since the one before."""
    sent, told = defaultdict[Channel, deque[Action]](deque), settlements(schedule, rank)
    changes, row = list[tuple[Action, int]](), schedule.actions[rank]
    for place, action in enumerate(row):
        if action.op in COMMUNICATION:
            continue
        posted = list(takewhile(lambda before: before.op in COMMUNICATION, reversed(row[:place])))[::-1]
        changes = [(receive.send, 1) for receive in posted if receive.op in RECEIVES and receive.peer >= 0]
        mine = far_inputs(action, schedule)
        for send in mine:
            if (earlier := told.get(send)) is not None:
                waiting = sent[channel(earlier, schedule)]
                while earlier in waiting:
                    changes.append((waiting.popleft(), -1))
        # V keeps the head's input until VW.
        if action.op is Op.VW:
            mine = [*far_inputs(action.with_op(Op.V), schedule), *mine]
        if action.op is not Op.V:
            changes += [(send, -1) for send in mine if not is_here(send, schedule)]
        for after in takewhile(lambda after: after.op in COMMUNICATION, row[place + 1 :]):
            if after.op in SENDS and after.peer >= 0:
                changes.append((after, 1))
                sent[channel(after, schedule)].append(after)
        yield action, changes


def _freeing_late(ops: Sequence[int]) -> Iterator[int]:
    """Yields the places of a row, each OFFLOAD where its memory is free: before the second action that computes."""
    started, copied = list[int](), list[int]()
    for place, op in enumerate(ops):
        if OPS[op] is Op.OFFLOAD:
            started.append(place)
            continue
        if OPS[op] in BACKWARDS | {Op.F, Op.R}:
            yield from copied
            started, copied = [], started
        yield place
    yield from (*copied, *started)


def _held_between(made: Ints, taken: Ints, sizes: Floats, number: int) -> Floats:
    """Returns by how much each of so many actions changes the memory, where the tensors of `made` are held until
    `taken` have run, if these come later; -1 is no action."""
    later, changes = (made >= 0) & (made < taken), np.zeros(number)
    np.add.at(changes, made[later], sizes[later])
    np.subtract.at(changes, taken[later], sizes[later])
    return changes


def order_bytes(order: Schedule | ActionArrays, tables: MemoryTables, rank: int | None = None) -> OrderBytes:
    """Returns the bytes of an order.

    Args:
        order: with or without sends and receives; or the arrays of one without.
        tables: bytes of the actions, of all microbatches or of each.
        rank: the only one whose actions the tables need to have. None: all.

    Raises:
        SlipstreamError: a table lacks a unit.
    """
    arrays = ActionArrays.of(without_communication(order)) if isinstance(order, Schedule) else order
    schedule, stage = arrays.schedule, arrays.stage
    stages, placement = range(schedule.num_stages), schedule.placement
    of_microbatch = [table_of(tables, microbatch) for microbatch in range(schedule.num_microbatches)]
    every = list({id(table): table for table in of_microbatch}.values())
    places = {id(table): position for position, table in enumerate(every)}
    which = np.array([places[id(table)] for table in of_microbatch])
    saved = arrays.has(Op.R), arrays.has(Op.OFFLOAD)
    shape = len(OPS), schedule.num_stages, schedule.num_slices, 2, 2, len(every)
    like_stage = np.array([table.like or stages for table in every])[which[arrays.microbatch], stage]
    numbers = np.ravel_multi_index((arrays.op, like_stage, arrays.slice, *saved, which[arrays.microbatch]), shape)
    different, like = np.unique(numbers, return_inverse=True)
    footprints, first = list[Footprint](), list[float]()
    for op_number, g, i, again, away, place in np.transpose(np.unravel_index(different, shape)).tolist():
        unit, own = StageSlice(g, i, bool(again), bool(away)), OPS[op_number]
        is_counted = own is not Op.REDUCE_GRAD and (rank in (None, placement[g]) or every[place].like)
        footprints.append(every[place].footprint(unit, own) if is_counted else NO_MOMENT)
        first.append(every[place].first.get((unit, own), np.nan))

    def per_action(kind: str) -> Any:
        sizes = np.array([[getattr(table, kind).get(g, 0.0) for g in stages] for table in every], float)
        return sizes[which[arrays.microbatch], stage]

    host_context = np.zeros((2, len(stage)))
    if any(table.host_context for table in every):
        own = np.stack([which[arrays.microbatch], stage, arrays.slice, arrays.op], axis=1).tolist()
        host_context = np.array([every[table].host_footprint(g, i, OPS[op]) for table, g, i, op in own], float).T

    keys = [*zip(which.tolist(), schedule.slice_counts, strict=True)]

    def per_slice(value: Any) -> Any:
        known = {key: [value(every[key[0]], index=index) for index in range(key[1])] for key in dict.fromkeys(keys)}
        return np.array([value for key in keys for value in known[key]])

    return OrderBytes(
        arrays,
        lowered=order if isinstance(order, Schedule) and order.is_lowered else None,
        leaves=np.array([footprint.leaves for footprint in footprints], float)[like],
        peaks=np.array([footprint.peak for footprint in footprints], float)[like],
        first=np.array(first, float)[like],
        context=per_action("context"),
        context_gradients=per_action("context_gradients"),
        host_context=host_context,
        host_shares=per_slice(MemoryTable.host_share).astype(float),
        payload=per_slice(MemoryTable.payload).astype(float),
        buffers={
            op: per_slice(partial(MemoryTable.buffer, op=op)).astype(float)
            for op in (Op.V, Op.L, Op.E)
            if schedule.spreads_vocabulary
        },
        w_shares=per_slice(lambda table, index: table.w_shares.get(index, False)).astype(np.bool_),
        **bytes_of_stages(every[0], placement),
    )


def bytes_of_stages(table: MemoryTable, placement: Sequence[int]) -> dict[str, Any]:
    """Returns a table's bytes of whole stages and of headers, by the names of `OrderBytes`."""
    stages, ops = range(len(placement)), [makers[0] for makers in GRADIENT_MAKERS]
    parameters, optimizer, host_optimizer = (
        np.bincount(placement, [of_stages.get(g, 0.0) for g in stages]).astype(float)
        for of_stages in (table.parameters, table.optimizer, table.host_optimizer)
    )
    made = np.array([[table.gradients.get((g, op), 0.0) for g in stages] for op in ops], float)
    kept = np.array([np.inf if table.kept_gradients is None else table.kept_gradients.get(g, 0.0) for g in stages])
    return {
        "made": made,
        "header": table.header_bytes,
        "parameters": parameters,
        "optimizer": optimizer,
        "host_optimizer": host_optimizer,
        "kept_gradients": kept,
    }


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
