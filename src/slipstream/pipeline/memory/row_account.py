"""The bytes of a step on rows of any length, from a few short rows that were rehearsed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from slipstream.array_types import Floats
from slipstream.schedule import Action, Op, Schedule
from slipstream.simulator import Footprint, MemoryTable, StageSlice

if TYPE_CHECKING:
    from slipstream.simulator.memory_arrays import StepBytes

_LONGEST_ROW = 768  # tokens of the rows that are rehearsed
Slices = tuple[int, ...]
_OPS = (Op.F, Op.B, Op.I, Op.W)


@dataclass(frozen=True)
class LinearMemoryModel:
    """The bytes of all actions on a row of a batch whose sequences differ in length, cut into any slices.

    What a slice's action keeps has a constant and a part for each of its tokens. While it runs it holds more, and a
    part for each token up to the slice's end, which attention reads. Keys, values and their gradients are allocated for
    the whole row. So a few rows determine all. A peak is the largest of several such sums, so it isn't quite one
    itself: each is raised by what some row differs from the fit, which between the shortest and the longest row is
    rather too much than too little.

    Args:
        rehearsed: the slices of each row that was rehearsed, and its table; three rows or more.
    """

    rehearsed: tuple[tuple[Slices, MemoryTable], ...]

    def table(self, slices: Slices) -> MemoryTable:
        """Returns the bytes of the actions on a row in these slices."""
        tokens, ends = sum(slices), np.cumsum(slices)
        features = np.stack([np.ones(len(slices)), np.array(slices, float), ends.astype(float)], axis=1)
        footprints, first = {}, {}
        for (stage, recomputed, offloaded, op), (leaves, peaks) in self._fits.items():
            left, most = (features @ leaves).tolist(), (features @ peaks).tolist()
            for index in range(len(slices)):
                made = self._allocated(op, stage, index, slices)
                unit = StageSlice(stage, index, recomputed, offloaded)
                footprints[unit, op] = Footprint(left[index], most[index] + made)
        last = len(slices) - 1
        for (stage, recomputed, offloaded, op), peaks in self._firsts.items():
            made = self._allocated(op, stage, last, slices)
            first[StageSlice(stage, last, recomputed, offloaded), op] = float(features[last] @ peaks) + made
        return replace(
            self._any,
            footprints=footprints,
            first=first,
            context={stage: each * tokens for stage, each in self._context.items()},
            context_gradients={stage: each * tokens for stage, each in self._context_gradients.items()},
            message_bytes=[self._message * length for length in slices],
            vocabulary_bytes={
                (op, index): float(features[index] @ size)
                for op, size in self._vocabulary.items()
                for index in range(len(slices))
            },
            w_shares=dict.fromkeys(range(len(slices)), True) if any(self._any.w_shares.values()) else {},
        )

    def activation_bytes(self, num_stages: int) -> Floats:
        """Returns what a slice holds from its F to the end of its backward, a constant and for each of its tokens,
        (stages, 2), with its part of keys, values and their gradients."""
        found = np.zeros((num_stages, 2))
        for stage in range(num_stages):
            kept = [leaves[:2] for key, (leaves, _) in self._fits.items() if (key[0], key[3]) == (stage, Op.F)]
            found[stage] = np.max(kept, axis=0)
            found[stage, 1] += self._context.get(stage, 0.0) + self._context_gradients.get(stage, 0.0)
        return np.maximum(found, 0.0)

    def state_bytes(self, placement: Sequence[int]) -> list[float]:
        """Returns the bytes of each rank's parameters, gradients and optimizer state."""
        table, held = self._any, [0.0] * (max(placement) + 1)
        for stage, rank in enumerate(placement):
            whole, apart, rows = (table.gradients.get((stage, op), 0.0) for op in (Op.B, Op.W, Op.VW))
            made = max(whole, apart) + rows
            held[rank] += table.parameters.get(stage, 0.0) + table.optimizer.get(stage, 0.0) + made
        return held

    def step_bytes(self, placement: Sequence[int], slices: Sequence[Slices]) -> StepBytes:
        """Returns the bytes of a step of rows in these slices, as `table` has those of each.

        An action that was never rehearsed takes infinitely many.
        """
        from slipstream.simulator.memory_arrays import StepBytes  # loads numba

        lengths = np.array([length for row in slices for length in row], float)
        ends = np.concatenate([np.cumsum(row) for row in slices]).astype(float)
        counts = np.array([len(row) for row in slices])
        totals = np.array([sum(row) for row in slices], float)
        last = np.cumsum(counts) - 1
        features = np.stack([np.ones(len(lengths)), lengths, ends])
        shape = len(_OPS), len(placement), len(lengths)
        leaves, peaks, made = np.zeros(shape), np.full(shape, np.inf), np.zeros(shape)
        stages, kinds = range(len(placement)), (self._context, self._context_gradients)
        context, context_gradients = (np.outer([kind.get(g, 0.0) for g in stages], totals) for kind in kinds)
        made[0][:, last - counts + 1] = context
        made[1:3, :, last] = context_gradients
        gradients = np.zeros(shape[:2])
        for (stage, recomputed, offloaded, op), (left, most) in self._fits.items():
            if op in _OPS and not recomputed and not offloaded:
                number = _OPS.index(op)
                leaves[number, stage], peaks[number, stage] = left @ features, most @ features
                gradients[number, stage] = self._any.gradients.get((stage, op), 0.0)
        peaks += made
        first = peaks + gradients[:, :, None]
        for (stage, recomputed, offloaded, op), most in self._firsts.items():
            if op in _OPS and not recomputed and not offloaded:
                number = _OPS.index(op)
                first[number, stage][last] = (most @ features + made[number, stage])[last]
        kept = [self._any.parameters.get(g, 0.0) + self._any.optimizer.get(g, 0.0) for g in stages]
        return StepBytes(
            leaves=leaves,
            peaks=peaks,
            first=first,
            context=context,
            context_gradients=context_gradients,
            payload=self._message * lengths,
            header=self._any.header_bytes,
            gradients=gradients,
            state=np.bincount(placement, kept).astype(float),
        )

    @property
    def _any(self) -> MemoryTable:
        return self.rehearsed[0][1]

    @cached_property
    def _message(self) -> float:
        """The bytes of a token's message."""
        (slices, table), *_ = self.rehearsed
        return table.payload(0) / slices[0]

    @cached_property
    def _context(self) -> dict[int, float]:
        """The bytes of a token's keys and values on each stage."""
        slices, table = self.rehearsed[0]
        return {stage: size / sum(slices) for stage, size in table.context.items()}

    @cached_property
    def _context_gradients(self) -> dict[int, float]:
        slices, table = max(self.rehearsed, key=lambda row: len(row[0]))  # a slice that is alone leaves none
        return {stage: size / sum(slices) for stage, size in table.context_gradients.items()}

    @cached_property
    def _vocabulary(self) -> dict[Op, Floats]:
        """The bytes of a message of each kind of a spread head: of a constant, and a token of the slice."""
        points = defaultdict(list)
        for slices, table in self.rehearsed:
            for (op, index), size in table.vocabulary_bytes.items():
                points[op].append((slices[index], 0.0, size, 0.0))
        return {op: _affine(found, 2) for op, found in points.items()}

    def _allocated(self, op: Op, stage: int, index: int, slices: Slices) -> float:
        """Returns what the first forward and the first backward of a row allocate for all of it."""
        if op is Op.F and index == 0:
            return self._context.get(stage, 0.0) * sum(slices)
        if op in (Op.B, Op.I) and index == len(slices) - 1:
            return self._context_gradients.get(stage, 0.0) * sum(slices)
        return 0.0

    @cached_property
    def _fits(self) -> Mapping[tuple[int, bool, bool, Op], tuple[Floats, Floats]]:
        """What each action leaves, and its peak: of a constant, a token of the slice, and a token up to its end."""
        points = defaultdict(list)
        for slices, table in self.rehearsed:
            for (unit, op), each in table.footprints.items():
                end = sum(slices[: unit.slice + 1])
                peak = each.peak - self._allocated(op, unit.stage, unit.slice, slices)
                points[unit.stage, unit.recomputed, unit.offloaded, op].append(
                    (slices[unit.slice], end, each.leaves, peak)
                )
        return {key: (_affine(found, 2), _raised(found, 3)) for key, found in points.items()}

    @cached_property
    def _firsts(self) -> Mapping[tuple[int, bool, bool, Op], Floats]:
        """The peaks of the actions that make weight gradients."""
        points = defaultdict(list)
        for slices, table in self.rehearsed:
            for (unit, op), first in table.first.items():
                peak = first - self._allocated(op, unit.stage, unit.slice, slices)
                points[unit.stage, unit.recomputed, unit.offloaded, op].append(
                    (slices[unit.slice], sum(slices[: unit.slice + 1]), 0.0, peak)
                )
        return {key: _raised(found, 3) for key, found in points.items()}


def rows_to_rehearse(num_positions: int | None) -> list[Slices]:
    """Returns the slices of the rows that are rehearsed, for a model of so many positions, at least 6."""
    each = max(1, min(num_positions or _LONGEST_ROW, _LONGEST_ROW) // 6)
    short = max(1, each // 32)  # where what doesn't depend on the tokens counts most
    whole = [(short,), (each,), (6 * each,)]
    return [*whole, (short,) * 3, (each,) * 3, (2 * each,) * 3, (each, 4 * each, each)]


def both_backwards(placement: Sequence[int], num_slices: int, splits: bool) -> Schedule:
    """Returns an order of two microbatches: one with whole backwards, and one with split ones where they may be."""
    num_stages, slices = len(placement), range(num_slices)
    rows: list[list[Action]] = [[] for _ in range(max(placement) + 1)]
    for microbatch in (0, 1):
        for stage in range(num_stages):
            rows[placement[stage]] += [Action(Op.F, stage, microbatch, index) for index in slices]
    for microbatch in (1, 0):
        ops = (Op.I, Op.W) if splits and microbatch else (Op.B,)
        for stage in reversed(range(num_stages)):
            rows[placement[stage]] += [Action(op, stage, microbatch, index) for index in reversed(slices) for op in ops]
    return Schedule("rehearsal", tuple(map(tuple, rows)), tuple(placement), num_microbatches=2, num_slices=num_slices)


def _affine(points: Sequence[tuple[float, float, float, float]], value: int) -> Floats:
    """Returns the least-squares constant and rate for each token of a slice, and 0 for those before it."""
    values = np.array([point[value] for point in points])
    features = np.array([(1.0, point[0]) for point in points])
    found = np.linalg.lstsq(features, values, rcond=None)[0]
    return np.append(found, 0.0)


def _raised(points: Sequence[tuple[float, float, float, float]], value: int) -> Floats:
    """Returns the least-squares constant, and rates for each token of a slice and up to its end, as high as the highest
    point."""
    values = np.array([point[value] for point in points])
    features = np.array([(1.0, point[0], point[1]) for point in points])
    found: Floats = np.linalg.lstsq(features, values, rcond=None)[0]
    found[0] += max(0.0, float((values - features @ found).max()))
    return found


def covers(schedule: Schedule) -> bool:
    """Returns whether the account over arrays knows all actions of a schedule."""
    return schedule.ops.issubset((*_OPS, Op.REDUCE_GRAD))
