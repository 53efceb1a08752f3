"""The account of memory over arrays, compiled: the peak of every rank with an order that isn't lowered yet.

It states a second time what `memory_account`, `buffer_pool` and `add_communication` state, because a step is planned
while another one runs, and lowering each plan takes far longer than making it; a property test shows that they agree.
It knows F, B, I, W and REDUCE_GRAD.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from slipstream.array_types import Floats, Ints
from slipstream.schedule import NARROWEST_WINDOW, Op, Schedule
from slipstream.simulator.numba_jit import compiled

_NUMBERS = {op: number for number, op in enumerate((Op.F, Op.B, Op.I, Op.W, Op.REDUCE_GRAD))}
_F, _B, _I, _W = range(4)


class OrderArrays(NamedTuple):
    """A valid order as arrays; rank r's actions are `firsts[r]` up to `firsts[r + 1]`. Slices count over the step."""

    firsts: Ints
    op: Ints  # F, B, I, W, REDUCE_GRAD
    stage: Ints
    slice: Ints
    placement: Ints
    microbatch: Ints  # of each slice
    counts: Ints  # slices of each microbatch

    @classmethod
    def of(cls, schedule: Schedule) -> OrderArrays:
        """Returns the arrays of a schedule of these ops, without sends and receives."""
        counts = np.array(schedule.slice_counts, np.int64)
        begins = np.cumsum(counts) - counts
        columns = np.array(
            [(_NUMBERS[op], stage, m, index) for row in schedule.actions for op, stage, m, index in row], np.int64
        ).reshape(-1, 4)
        return cls(
            np.cumsum([0, *map(len, schedule.actions)]),
            columns[:, 0].copy(),
            columns[:, 1].copy(),
            begins[columns[:, 2]] + columns[:, 3],
            np.array(schedule.placement, np.int64),
            np.repeat(np.arange(len(counts)), counts),
            counts,
        )


class StepBytes(NamedTuple):
    """The bytes of a step: what `MemoryTable` has, of all microbatches, as arrays."""

    leaves: Floats  # of F, B, I and W: (4, stages, slices)
    peaks: Floats
    first: Floats  # of a stage's first backward of its kind
    context: Floats  # (stages, microbatches)
    context_gradients: Floats
    payload: Floats  # (slices,)
    gradients: Floats  # (4, stages)
    state: Floats  # of parameters and optimizer, (ranks,)
    sizes: Floats  # of buffers that differ
    size: Ints  # of each slice's buffer, as a place in `sizes`


@dataclass(frozen=True)
class CompiledAccount:
    """The account of orders of one step's slices, whose bytes are given."""

    step: StepBytes

    def peaks(self, schedule: Schedule) -> list[float]:
        """Returns the most bytes that each rank holds."""
        peaks: list[float] = _peaks(OrderArrays.of(schedule), self.step, NARROWEST_WINDOW).tolist()
        return peaks


@compiled
def _peaks(order: OrderArrays, step: StepBytes, narrowest: int) -> Floats:
    starts, ends, producer = _witness(order)
    posted = _posted(order, starts, ends, producer)
    num_ranks = len(order.firsts) - 1
    windows = _windows(order, posted, producer, narrowest)
    found = np.zeros(num_ranks)
    for rank in range(num_ranks):
        found[rank] = _held(order, step, rank) + _pool(order, step, posted, producer, windows, rank)
    return found


@compiled
def _witness(order: OrderArrays) -> tuple[Ints, Ints, Ints]:
    """Returns when each action starts and ends in a run in units of time, and the action of another rank whose result
    it needs, or -1."""
    size, num_ranks, num_stages = len(order.op), len(order.firsts) - 1, len(order.placement)
    made = np.full((2, num_stages, len(order.microbatch)), -1)
    for number in range(size):
        if order.op[number] <= _I:
            made[min(order.op[number], 1), order.stage[number], order.slice[number]] = number
    producer = np.full(size, -1)
    for number in range(size):
        op, stage = order.op[number], order.stage[number]
        if op <= _I:
            other = stage - 1 if op == _F else stage + 1
            if 0 <= other < num_stages and order.placement[other] != order.placement[stage]:
                producer[number] = made[min(op, 1), other, order.slice[number]]
    starts, ends = np.zeros(size, np.int64), np.full(size, -1)
    reached, free = order.firsts[:-1].copy(), np.zeros(num_ranks, np.int64)
    moved = True
    while moved:
        moved = False
        for rank in range(num_ranks):
            while reached[rank] < order.firsts[rank + 1]:
                number = reached[rank]
                source = producer[number]
                if source >= 0 and ends[source] < 0:
                    break
                op = order.op[number]
                starts[number] = free[rank] if source < 0 else max(free[rank], ends[source])
                free[rank] = ends[number] = starts[number] + (2 if op == _B else 1 if op <= _W else 0)
                reached[rank] += 1
                moved = True
    return starts, ends, producer


@compiled
def _posted(order: OrderArrays, starts: Ints, ends: Ints, producer: Ints) -> Ints:
    """Returns before which action the receive of each action's input is posted; -1 where it receives none.

    From the last message of a channel to the first: where its rank stands when it is sent, or one action before it is
    needed, and not after a later message's.
    """
    num_ranks = len(order.firsts) - 1
    consumer, posted = np.full(len(order.op), -1), np.full(len(order.op), -1)
    for number in range(len(order.op)):
        if producer[number] >= 0:
            consumer[producer[number]] = number
    for rank in range(num_ranks):
        latest = np.full((2, num_ranks), len(order.op))
        for number in range(order.firsts[rank + 1] - 1, order.firsts[rank] - 1, -1):
            needed = consumer[number]
            if needed >= 0:
                line, there = min(order.op[number], 1), order.placement[order.stage[needed]]
                begin, end = order.firsts[there], order.firsts[there + 1]
                witnessed = begin + np.searchsorted(starts[begin:end], ends[number])
                latest[line, there] = min(witnessed, max(needed - 1, begin), latest[line, there])
                posted[needed] = latest[line, there]
    return posted


@compiled
def _windows(order: OrderArrays, posted: Ints, producer: Ints, narrowest: int) -> Ints:
    """Returns how many sends of each channel, (2, ranks, ranks), may be on their way."""
    num_ranks = len(order.firsts) - 1
    windows = np.full((2, num_ranks, num_ranks), narrowest)
    for rank in range(num_ranks):
        begin, end = order.firsts[rank], order.firsts[rank + 1]
        change = np.zeros((2, num_ranks, end - begin + 1), np.int64)
        for number in range(begin, end):
            if producer[number] >= 0:
                line, there = min(order.op[number], 1), order.placement[order.stage[producer[number]]]
                change[line, there, posted[number] - begin] += 1
                change[line, there, number - begin + 1] -= 1
        for line in range(2):
            for there in range(num_ranks):
                most = now = 0
                for each in change[line, there]:
                    now += each
                    most = max(most, now)
                windows[line, there, rank] = max(narrowest, 2 * most)
    return windows


@compiled
def _pool(order: OrderArrays, step: StepBytes, posted: Ints, producer: Ints, windows: Ints, rank: int) -> float:
    """Returns the bytes of a rank's buffers of messages."""
    num_ranks, num_stages = len(order.firsts) - 1, len(order.placement)
    begin, end = order.firsts[rank], order.firsts[rank + 1]
    used, most = np.zeros(len(step.sizes), np.int64), np.zeros(len(step.sizes), np.int64)
    sent = np.full((2, num_ranks, end - begin), -1)
    num_sent = np.zeros((2, num_ranks), np.int64)
    by_post = np.argsort(posted[begin:end], kind="mergesort")
    k = 0
    while k < end - begin and posted[begin + by_post[k]] < 0:
        k += 1
    for at in range(begin, end + 1):
        while k < end - begin and posted[begin + by_post[k]] == at:
            size = step.size[order.slice[begin + by_post[k]]]
            used[size] += 1
            most[size] = max(most[size], used[size])
            k += 1
        if at > begin:  # what the action before has made leaves after receives are posted
            number = at - 1
            op, stage = order.op[number], order.stage[number]
            other = stage + 1 if op == _F else stage - 1
            if op <= _I and 0 <= other < num_stages and order.placement[other] != rank:
                line, there, size = min(op, 1), order.placement[other], step.size[order.slice[number]]
                count = num_sent[line, there]
                if count >= windows[line, rank, there]:
                    used[sent[line, there, count - windows[line, rank, there]]] -= 1
                sent[line, there, count] = size
                num_sent[line, there] += 1
                used[size] += 1
                most[size] = max(most[size], used[size])
        if at < end and order.op[at] in (_B, _W):
            stage, size = order.stage[at], step.size[order.slice[at]]
            for other in (stage - 1, stage + 1):
                if 0 <= other < num_stages and order.placement[other] != rank:
                    used[size] -= 1
    return float((step.sizes * most).sum())


@compiled
def _held(order: OrderArrays, step: StepBytes, rank: int) -> float:
    """Returns the most that a rank holds besides buffers, while its actions run and before their results are sent."""
    num_stages = len(order.placement)
    held = most = step.state[rank]
    ran = np.zeros((4, num_stages), np.bool_)
    made = np.zeros(num_stages)
    forwards, left = np.zeros((2, num_stages, len(order.counts)), np.int64)
    for number in range(order.firsts[rank], order.firsts[rank + 1]):
        op, stage, index = order.op[number], order.stage[number], order.slice[number]
        if op > _W:
            continue
        microbatch = order.microbatch[index]
        during = step.peaks[op, stage, index]
        if op != _F and not ran[op, stage] and not ran[_B, stage]:
            ran[op, stage] = True
            own = step.gradients[op, stage]
            more = own - made[stage] if op == _B else own
            held += more
            made[stage] += more
            during = step.first[op, stage, index] - own
        most = max(most, held + during)
        held += step.leaves[op, stage, index]
        if op == _F:
            if not forwards[stage, microbatch]:
                held += step.context[stage, microbatch]
                left[stage, microbatch] = order.counts[microbatch]
            forwards[stage, microbatch] += 1
        elif op != _W:
            if left[stage, microbatch] == order.counts[microbatch]:
                held += step.context_gradients[stage, microbatch]
            left[stage, microbatch] -= 1
            if not left[stage, microbatch]:
                held -= step.context[stage, microbatch] + step.context_gradients[stage, microbatch]
        other = stage + 1 if op == _F else stage - 1
        makes = op <= _I and 0 <= other < num_stages
        if makes:
            held += step.payload[index]
        if stage > 0 and order.placement[stage - 1] == rank and op in (_B, _I):
            held -= step.payload[index]
        if stage + 1 < num_stages and order.placement[stage + 1] == rank and op in (_B, _W):
            held -= step.payload[index]
        if makes and order.placement[other] != rank:
            most = max(most, held)
            held -= step.payload[index]
    return float(most)
