"""The seconds of the stages of a cut on the slices of a sequence, with those of their exchanges and recomputations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from slipstream.array_types import Floats
from slipstream.cost import BY_LAYER, EXCHANGES, OPS, REPLAYED, WITH_MESSAGES, Costs, Work, messages_of_stages
from slipstream.planner.search.placed_partition import PlacedPartition
from slipstream.schedule import BACKWARDS, Op

_EXCHANGED = (Op.F, Op.I)
Slicing = tuple[int, ...]  # tokens of each slice; () for any slices


@dataclass(frozen=True)
class StageTimes:
    """The seconds of each (stage, slice)."""

    compute: dict[Op, Floats]  # of F, B, I and W; B in one may differ from the sum of its two halves
    replay: dict[str, Floats]  # of R, by kind of recomputation; with "full", the seconds added to B and I
    exchanged: dict[Op, Floats]  # the parts of F and of I that are `EXCHANGES`, (kind, stage, slice)
    slices: tuple[int, ...]

    def within_backwards(self, recompute: str) -> Floats | float:
        """Returns how much longer B and I take, in which layers are recomputed."""
        return self.replay["full"] if recompute in BY_LAYER else 0.0

    def seconds(self, recompute: str) -> dict[Op, Floats]:
        """Returns the times of all ops with a kind of recomputation."""
        again = self.within_backwards(recompute)
        seconds = self.compute | {op: self.compute[op] + again for op in (Op.B, Op.I)}
        return seconds | ({Op.R: self.replay[recompute]} if recompute in REPLAYED else {})


def stage_times(cut: PlacedPartition, parts: Floats, recomputations: Sequence[str], slices: Slicing) -> StageTimes:
    """Returns the times of a cut's stages, (..., stage, slice), from those of their parts."""
    rows = np.moveaxis(np.tensordot(cut.part_counts, parts, 1), 0, -2)
    ends = np.cumsum([len(OPS), len(_EXCHANGED) * len(EXCHANGES), len(recomputations)])
    compute, exchanged, replay, handling = np.split(rows, ends)
    messages = messages_of_stages(len(cut.stages))[:, None] * handling[0]
    trains = cut.trains[:, None]
    of_op = {
        op: seconds * (trains if op in BACKWARDS else 1) + (op in WITH_MESSAGES) * messages
        for op, seconds in zip(OPS, compute, strict=True)
    }
    return StageTimes(
        compute=of_op,
        replay=dict(zip(recomputations, replay * trains, strict=True)),
        exchanged=dict(zip(_EXCHANGED, np.split(exchanged, len(_EXCHANGED)), strict=True)),
        slices=slices,
    )


def part_times(costs: Costs, recomputations: Sequence[str], slicings: tuple[Slicing, ...]) -> Floats:
    """Returns the times of the fixed part of a stage, and of a part of each kind, (1 + kinds, time, slice), of the
    slices of one slicing after the other: F, B, I, W, the exchanges in F and in I, each recomputation, and the
    handling of a message."""
    length = np.concatenate(slicings)
    context = np.concatenate([np.cumsum(slices) - slices for slices in slicings])
    works = {op: Work(op, length, context) for op in (*OPS, Op.R)}
    rows = [_with_fixed(costs, works[op]) for op in OPS]
    for op in _EXCHANGED:
        rows += [_after(np.zeros(len(length)), exchange) for exchange in costs.each_exchange(works[op])]
    for kind in recomputations:
        rows.append(_replay_rows(costs, kind, works[Op.R]))
    handling = np.zeros_like(rows[0])
    handling[0] = costs.handling_seconds(length)
    return np.stack([*rows, handling], axis=1)


def _replay_rows(costs: Costs, recompute: str, work: Work) -> Floats:
    """Returns the seconds of R, by kind of recomputation, (1 + kinds, slices)."""
    if recompute == "none":
        return np.zeros((1 + costs.num_kinds, len(work.lengths)))
    if recompute == "selective":
        return _after(costs.fixed_seconds(work), costs.each_selective_replay(work))
    if recompute == "full":
        rows = costs.each_seconds(work) * costs.each_has_backward[:, None]
        rows[[costs.parts[0], costs.parts[-1]]] = 0.0
        return _after(np.zeros(len(work.lengths)), rows)
    return _with_fixed(costs, work)


def _with_fixed(costs: Costs, work: Work) -> Floats:
    """Returns the seconds of the fixed part of a stage and of a part of each kind, (1 + kinds, slices)."""
    return _after(costs.fixed_seconds(work), costs.each_seconds(work))


def _after(fixed: Floats, rows: Floats) -> Floats:
    return np.concatenate([fixed[None], rows])


def first_others_last(row: Floats, slicings: tuple[Slicing, ...]) -> Floats:
    """Returns the times of each slicing's first slice, of all others, and of its last, (..., slicing, 3).

    Of the last two slicings, a whole sequence and a short slice, comes the least time of any slices.
    """
    stops = np.cumsum([len(slices) for slices in slicings])
    starts = np.append(0, stops[:-1])
    every, first, last = np.add.reduceat(row, starts, axis=-1), row[..., starts], row[..., stops - 1]
    first[..., -2] = first[..., -1]
    return np.stack([first, every - first, last], axis=-1)[..., :-1, :]
