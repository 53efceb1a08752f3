"""A lower bound of each rank's memory from the order of a schedule's actions alone.

It is a second, quick account of memory next to `slipstream.simulator.memory_account`: it needs neither recomputation
nor offloading in the schedule and takes milliseconds, so most configurations that don't fit are dropped before their
schedules are written out. That it never exceeds the full account is tested
(`test_the_quick_test_of_memory_fails_nothing_that_fits`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np

from slipstream.array_types import Flags, Floats, Ints
from slipstream.planner.search.schedule_cache import ScheduleShape, cached_schedule
from slipstream.schedule import NARROWEST_WINDOW, Op
from slipstream.simulator.action_graph import OPS, ActionArrays

_F, _B, _I, _W = (OPS.index(op) for op in (Op.F, Op.B, Op.I, Op.W))
_OFFLOAD = OPS.index(Op.OFFLOAD)
_NOT_AWAY = 4  # slices of a rank that may be on the device


@dataclass(frozen=True)
class MarkedActions:
    """The actions of a schedule as arrays; rank r's are `firsts[r]` up to `firsts[r + 1]`."""

    firsts: Ints
    op: Ints
    stage: Ints
    slice: Ints
    opens: Flags  # the first forward of a microbatch on the stage
    closes: Flags  # the last B or I of one, or the last F of a stage without backwards
    reduces: Flags  # the first B or W of the stage


@lru_cache(maxsize=256)
def marked_actions(shape: ScheduleShape) -> MarkedActions:
    """Returns the actions of a named schedule, without the schedule itself, which takes more memory."""
    arrays = cached_schedule(shape)
    op, stage, chain = arrays.op, arrays.stage, arrays.stage * shape.num_microbatches + arrays.microbatch
    opens = _firsts(chain, op == _F)
    last = np.where(stage < shape.num_frozen, op == _F, (op == _B) | (op == _I))
    closes = _firsts(chain[::-1], last[::-1])[::-1]
    return MarkedActions(arrays.firsts, op, stage, arrays.slice, opens, closes, _firsts(stage, (op == _B) | (op == _W)))


def least_messages(arrays: ActionArrays, message_bytes: Sequence[float]) -> Floats:
    """Returns a lower bound of each rank's message buffers (see `slipstream.simulator.buffer_pool.pool_bytes`).

    What a forward received stays until its slice's backward is done, unless it is offloaded or no backward comes; and
    the last few sends of a channel may still be on their way.
    """
    awaits, channel, num_channels = arrays.messages
    received = (arrays.op == _F) & awaits & (arrays.stage >= arrays.schedule.num_frozen_stages)
    done = (arrays.op == _B) | (arrays.op == _W)
    key = np.stack([arrays.stage, arrays.microbatch, arrays.slice], axis=1)
    stays = np.zeros(key.max(axis=0) + 1, bool)
    stays[tuple(key[received].T)] = True
    stays[tuple(key[arrays.op == _OFFLOAD].T)] = False
    changes = (stays[tuple(key.T)] & received).astype(int) - (stays[tuple(key.T)] & done)
    most = []
    for first, end in pairwise(arrays.firsts):
        sent = np.arange(num_channels)[:, None] == channel[first:end]
        on_their_way = np.minimum(np.cumsum(sent, axis=1), NARROWEST_WINDOW).sum(axis=0)
        most.append((np.cumsum(changes[first:end]) + on_their_way).max())
    return np.array(most) * min(message_bytes)


def _firsts(key: Ints, among: Flags) -> Flags:
    """Marks the first entry of every key, of the entries in `among`."""
    places = np.flatnonzero(among)
    first = np.zeros(len(key), bool)
    first[places[np.unique(key[places], return_index=True)[1]]] = True
    return first


@dataclass(frozen=True)
class MemoryBound:
    """The bytes of activations, keys, values and gradients of a configuration's stages."""

    whole: Floats  # (stage, slice): all activations of F
    kept: Floats  # (stage, slice): what is kept of them where the slice is recomputed
    context: Floats  # per stage, of one microbatch
    gradients: Floats  # per stage
    offloads: bool  # whether activations may be on the host until their backward; what I keeps for W never is

    def peaks(self, shape: ScheduleShape) -> Floats:
        """Returns a lower bound of each rank's bytes at its peak."""
        actions = marked_actions(shape)
        op, stage = actions.op, actions.stage
        whole, kept = self.whole[stage, actions.slice], self.kept[stage, actions.slice]
        backward, last = (op == _B) | (op == _I), (op == _B) | (op == _W)
        if self.offloads:
            before, after = np.where(op == _I, whole, 0), np.where(op == _W, whole, 0)
            during = np.where(op == _B, whole, 0)
        else:
            before, after = np.where(op == _F, kept, 0), np.where(last, kept, 0)
            during = np.where(backward, whole - kept, 0)
        before = before + actions.opens * self.context[stage]
        # gradients exist once the backward that makes them has freed its activations
        after = after + actions.closes * self.context[stage] - actions.reduces * self.gradients[stage]
        most = []
        for first, end in pairwise(actions.firsts):
            held = np.cumsum(before[first:end]) - np.concatenate([[0.0], np.cumsum(after[first : end - 1])])
            most.append((held + during[first:end]).max())
        return np.array(most)

    def away(self, shape: ScheduleShape) -> float:
        """Returns a lower bound of the most bytes on one rank's host.

        All slices between forward and backward are there but a few, which are needed soon or whose backward follows too
        soon.
        """
        kept = MemoryBound(self.kept, self.kept, 0 * self.context, 0 * self.gradients, offloads=False)
        return float(kept.peaks(shape).max() - _NOT_AWAY * self.kept.max())
