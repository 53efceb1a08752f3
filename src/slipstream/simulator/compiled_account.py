"""The account of memory over arrays, compiled: the peak of every rank with an order that isn't lowered yet.

Of messages' buffers it states a second time what `buffer_pool` and `add_communication` state, because a step is planned
while another one runs, and lowering each plan takes far longer than making it; a property test shows that they agree.
It knows F, B, I, W and REDUCE_GRAD.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from slipstream.array_types import Floats, Ints
from slipstream.schedule import NARROWEST_WINDOW, Op, Schedule
from slipstream.simulator.action_graph import NUMBERS, OPS, ActionArrays
from slipstream.simulator.memory_arrays import rank_bytes, row_peaks
from slipstream.simulator.numba_jit import compiled
from slipstream.simulator.time_kernel import start_times

_F, _B, _I, _W = (NUMBERS[op] for op in (Op.F, Op.B, Op.I, Op.W))
_UNITS = np.array([{Op.B: 2.0, Op.REDUCE_GRAD: 0.0}.get(op, 1.0) for op in OPS])  # of time, as lowering counts them


class OrderArrays(NamedTuple):
    """A valid order as arrays; rank r's actions are `firsts[r]` up to `firsts[r + 1]`. Slices count over the step."""

    firsts: Ints
    op: Ints  # place in OPS
    stage: Ints
    slice: Ints
    placement: Ints
    microbatch: Ints  # of each slice

    @classmethod
    def of(cls, arrays: ActionArrays) -> OrderArrays:
        """Returns the arrays of a schedule of these ops, without sends and receives."""
        counts = np.array(arrays.schedule.slice_counts, np.int64)
        begins = np.cumsum(counts) - counts
        return cls(
            arrays.firsts,
            arrays.op,
            arrays.stage,
            begins[arrays.microbatch] + arrays.slice,
            np.array(arrays.schedule.placement, np.int64),
            np.repeat(np.arange(len(counts)), counts),
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
        arrays = ActionArrays.of(schedule)
        order = OrderArrays.of(arrays)
        graph, rows = arrays.graph(_UNITS[arrays.op])
        starts = start_times(graph, rows)
        buffers = _pools(order, self.step, starts, starts + graph.seconds, arrays.producer, NARROWEST_WINDOW)
        peaks: list[float] = (self._held(arrays, order) + buffers).tolist()
        return peaks

    def _held(self, arrays: ActionArrays, order: OrderArrays) -> Floats:
        """Returns the most that each rank holds besides buffers, while its actions run and before they have sent."""
        step, place = self.step, (np.minimum(order.op, _W), order.stage, order.slice)
        own = place[1], order.microbatch[order.slice]
        computes = order.op <= _W
        takes, during, frees = rank_bytes(
            arrays,
            np.where(computes, step.leaves[place], 0.0),
            np.where(computes, step.peaks[place], 0.0),
            step.first[place],
            step.gradients[_B:],
            step.context[own],
            step.context_gradients[own],
        )
        forward, backward = order.op == _F, (order.op == _B) | (order.op == _I)
        there = np.concatenate([[-1], order.placement, [-1]])  # the rank of each stage, after that of the one before
        before, here, after = there[order.stage], there[order.stage + 1], there[order.stage + 2]
        other = np.where(forward, after, before)
        sends = (forward | backward) & (other >= 0) & (other != here)
        kept = ((forward | backward) & (other == here)).astype(int)
        kept -= backward & (before == here)
        kept -= ((order.op == _B) | (order.op == _W)) & (after == here)
        payload = step.payload[order.slice]
        frees = frees - payload * kept
        during = np.where(sends, np.maximum(during, payload - frees), during)
        return step.state + row_peaks(arrays.firsts, takes, during, frees)


@compiled
def _pools(order: OrderArrays, step: StepBytes, starts: Floats, ends: Floats, producer: Ints, narrowest: int) -> Floats:
    """Returns the bytes of each rank's buffers of messages.

    Args:
        order: of the actions.
        step: their bytes.
        starts: of each action in a run in units of time.
        ends: of each.
        producer: the action of another rank whose result each needs, or -1.
        narrowest: the fewest sends of a channel that may be on their way.
    """
    posted = _posted(order, starts, ends, producer)
    num_ranks = len(order.firsts) - 1
    windows = _windows(order, posted, producer, narrowest)
    found = np.zeros(num_ranks)
    for rank in range(num_ranks):
        found[rank] = _pool(order, step, posted, producer, windows, rank)
    return found


@compiled
def _posted(order: OrderArrays, starts: Floats, ends: Floats, producer: Ints) -> Ints:
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
