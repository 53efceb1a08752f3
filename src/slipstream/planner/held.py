"""The least that a rank holds over a schedule by name, from the order of its actions alone: a quick test of memory.

Counted before recomputation and offload are written into the schedule, so most of what doesn't fit costs milliseconds.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from slipstream.planner.bounds import Array, Cut
from slipstream.schedule.action import Action, Op
from slipstream.schedule.generators import make_schedule
from slipstream.schedule.lowering import split_backwards

_F, _B, _I, _W = range(4)
_NUMBERS = {Op.F: _F, Op.B: _B, Op.I: _I, Op.W: _W}
_NOT_AWAY = 4  # slices of a rank


@dataclass(frozen=True)
class Row:
    """One rank's actions as arrays."""

    op: NDArray[np.int8]
    stage: NDArray[np.int64]
    slice: NDArray[np.int64]
    opens: NDArray[np.bool_]  # the first forward of a microbatch on the stage
    closes: NDArray[np.bool_]  # the last B or I of one
    reduces: NDArray[np.bool_]  # the stage's first B or W


@lru_cache(maxsize=256)
def rows(name: str, num_ranks: int, num_microbatches: int, num_slices: int, stages_per_rank: int) -> tuple[Row, ...]:
    """The actions of a schedule by name."""
    schedule = split_backwards(make_schedule(name, num_ranks, num_microbatches, num_slices, stages_per_rank))
    return tuple(_row(actions, num_slices) for actions in schedule.actions)


def _row(actions: tuple[Action, ...], num_slices: int) -> Row:
    begun: set[tuple[int, int]] = set()
    backwards: Counter[tuple[int, int]] = Counter()
    reduced: set[int] = set()
    opens, closes, reduces = [], [], []
    for action in actions:
        key, op = (action.stage, action.microbatch), action.op
        opens.append(op is Op.F and key not in begun)
        begun.add(key)
        backwards[key] += op in (Op.B, Op.I)
        closes.append(op in (Op.B, Op.I) and backwards[key] == num_slices)
        reduces.append(op in (Op.B, Op.W) and action.stage not in reduced)
        reduced |= {action.stage} if op in (Op.B, Op.W) else set()
    return Row(
        np.array([_NUMBERS[action.op] for action in actions], np.int8),
        np.array([action.stage for action in actions], np.int64),
        np.array([action.slice for action in actions], np.int64),
        np.array(opens),
        np.array(closes),
        np.array(reduces),
    )


@dataclass(frozen=True)
class Held:
    """Bytes of activations, keys, values and gradients."""

    whole: Array  # (stage, slice), all that F leaves
    kept: Array  # the same, where the slice is recomputed
    context: Array  # per stage, of one microbatch
    gradients: Array  # per stage
    offloads: bool  # whether activations may be away until their backward; what I leaves for W never is

    def peaks(self, name: str, cut: Cut, num_microbatches: int, num_slices: int) -> Array:
        """Of every rank at its worst moment, at least."""
        stages_per_rank = len(cut.placement) // cut.num_ranks
        each = rows(name, cut.num_ranks, num_microbatches, num_slices, stages_per_rank)
        return np.array([self.peak(row) for row in each])

    def away(self, name: str, cut: Cut, num_microbatches: int, num_slices: int) -> float:
        """The most on one rank's host, at least: what is between forward and backward, but for a few slices.

        Those are about to be needed, or have a backward that follows too soon.
        """
        kept = Held(self.kept, self.kept, 0 * self.context, 0 * self.gradients, offloads=False)
        return float(kept.peaks(name, cut, num_microbatches, num_slices).max() - _NOT_AWAY * self.kept.max())

    def peak(self, row: Row) -> float:
        whole, kept = self.whole[row.stage, row.slice], self.kept[row.stage, row.slice]
        backward, last = (row.op == _B) | (row.op == _I), (row.op == _B) | (row.op == _W)
        if self.offloads:
            before, after = np.where(row.op == _I, whole, 0), np.where(row.op == _W, whole, 0)
            during = np.where(row.op == _B, whole, 0)
        else:
            before, after = np.where(row.op == _F, kept, 0), np.where(last, kept, 0)
            during = np.where(backward, whole - kept, 0)
        before = before + row.opens * self.context[row.stage]
        # gradients are there once the backward that makes them has freed its activations
        after = after + row.closes * self.context[row.stage] - row.reduces * self.gradients[row.stage]
        held = np.cumsum(before) - np.concatenate([[0.0], np.cumsum(after)[:-1]])
        return float((held + during).max())
