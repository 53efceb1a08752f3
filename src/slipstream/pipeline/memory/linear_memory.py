"""The bytes of a step on rows of any length, from a few short rows that were rehearsed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from slipstream.array_types import Flags, Floats, Ints
from slipstream.errors import SlipstreamError
from slipstream.schedule import Action, Op, Schedule, without_communication
from slipstream.schedule.action import OPS
from slipstream.schedule.action_arrays import ActionArrays
from slipstream.simulator import Footprint, MemoryTable, StageSlice
from slipstream.simulator.memory_account import NO_MOMENT, OrderBytes, bytes_of_stages

_LONGEST_ROW = 768  # tokens of the longest rehearsed row
Slices = tuple[int, ...]


@dataclass(frozen=True)
class LinearMemoryModel:
    """The bytes of all actions on a row of a batch whose sequences differ in length, cut into any slices.

    The bytes that a slice's action keeps have a constant and a part for each of its tokens. While it runs it needs
    more, and a part for each token up to the slice's end, which attention reads. Keys, values and their gradients are
    allocated for the whole row. So a few rows determine all. A peak is the largest of several such sums, so it isn't
    quite one itself: each is raised by the largest difference of a row from the fit, which between the shortest and the
    longest row is rather too much than too little.

    Args:
        rehearsed: the slices of each row that was rehearsed, and its table; three rows or more.
    """

    rehearsed: tuple[tuple[Slices, MemoryTable], ...]

    def activation_bytes(self, num_stages: int) -> Floats:
        """Returns a slice's bytes from its F to the end of its backward, a constant and for each of its tokens,
        (stages, 2), with its part of keys, values and their gradients."""
        coefficients = np.zeros((num_stages, 2))
        for stage in range(num_stages):
            forwards = [leaves[:2] for key, (leaves, _) in self._fits.items() if (key[0], key[3]) == (stage, Op.F)]
            coefficients[stage] = np.max(forwards, axis=0)
            coefficients[stage, 1] += self._context.get(stage, 0.0) + self._context_gradients.get(stage, 0.0)
        return np.maximum(coefficients, 0.0)

    def state_bytes(self, placement: Sequence[int]) -> list[float]:
        """Returns the bytes of each rank's parameters, gradients and optimizer state."""
        known = bytes_of_stages(self._any, placement)
        whole, _, apart, rows = known["made"]
        made = np.bincount(placement, np.maximum(whole, apart) + rows)
        held: list[float] = (known["parameters"] + known["optimizer"] + made).tolist()
        return held

    def order_bytes(self, order: Schedule, slices: Sequence[Slices]) -> OrderBytes:
        """Returns the bytes of a step of rows in these slices, in an order with or without sends and receives.

        Raises SlipstreamError where an action was never rehearsed.
        """
        arrays = ActionArrays.of(without_communication(order))
        schedule, op, stage = arrays.schedule, arrays.op, arrays.stage
        lengths = np.array([length for row in slices for length in row], float)
        ends = np.concatenate([np.cumsum(row) for row in slices]).astype(float)
        features = np.stack([np.ones(len(lengths)), lengths, ends])
        saved = arrays.has(Op.R), arrays.has(Op.OFFLOAD)
        shape = schedule.num_stages, 2, 2, len(OPS)
        different, like = np.unique(np.ravel_multi_index((stage, *saved, op), shape), return_inverse=True)
        fits = list[tuple[Floats, Floats]]()
        firsts = list[Floats]()
        for g, again, away, op_index in np.transpose(np.unravel_index(different, shape)).tolist():
            key = g, bool(again), bool(away), OPS[op_index]
            if key not in self._fits and OPS[op_index] is not Op.REDUCE_GRAD:
                raise SlipstreamError(
                    f"what {OPS[op_index]} of stage {g} holds was never rehearsed: give rows of one length."
                )
            fits.append(self._fits.get(key, (np.zeros(3), np.array([NO_MOMENT.peak, 0.0, 0.0]))))
            firsts.append(self._firsts.get(key, np.full(3, np.nan)))
        coefficients = np.array([[*fit, first] for fit, first in zip(fits, firsts, strict=True)])[like]
        leaves, peaks, first = np.einsum("akf,fa->ka", coefficients, features[:, arrays.slices])
        num_tokens = np.array([sum(row) for row in slices])[arrays.microbatch]
        is_last = arrays.slice == np.array([len(row) - 1 for row in slices])[arrays.microbatch]
        context, context_gradients = (
            np.array([rates.get(g, 0.0) for g in range(schedule.num_stages)])[stage] * num_tokens
            for rates in (self._context, self._context_gradients)
        )
        made = context * (arrays.is_one_of(Op.F) & (arrays.slice == 0))
        made += context_gradients * (arrays.is_one_of(Op.B, Op.I) & is_last)
        return OrderBytes(
            arrays,
            lowered=order if order.is_lowered else None,
            leaves=leaves,
            peaks=peaks + made,
            first=np.where(is_last, first + made, np.nan),
            context=context,
            context_gradients=context_gradients,
            host_context=self._host_context(arrays, lengths[arrays.slices], num_tokens, is_last),
            host_shares=np.ones(len(lengths)),
            payload=self._message * lengths,
            buffers={op: size @ features for op, size in self._buffers.items()},
            w_shares=np.full(len(lengths), any(self._any.w_shares.values())),
            **bytes_of_stages(self._any, schedule.placement),
        )

    def _host_context(self, arrays: ActionArrays, lengths: Floats, num_tokens: Ints, is_last: Flags) -> Floats:
        """Returns the bytes on the host that each action leaves there, and needs at most, (2, action).

        A row's last slice has the sums of all that it sees, which no window cuts here, so rather too much is counted.

        Args:
            arrays: of the order.
            lengths: tokens of each action's slice.
            num_tokens: of its row.
            is_last: whether it is the row's last slice.
        """
        keys, sums = (
            np.array([rates.get(g, 0.0) for g in range(arrays.schedule.num_stages)])[arrays.stage]
            for rates in self._on_host
        )
        forward, backward = arrays.is_one_of(Op.F), arrays.is_one_of(Op.B, Op.I)
        made = backward * is_last * sums * num_tokens
        leaves = forward * keys * lengths + made - backward * (keys + sums) * lengths
        return np.stack([leaves, forward * keys * lengths + made])

    @cached_property
    def _on_host(self) -> tuple[dict[int, float], dict[int, float]]:
        """The bytes of a token's keys and values on each stage's host, and of the sums of their gradients."""
        slices, table = max(self.rehearsed, key=lambda row: len(row[0]))
        last = len(slices) - 1
        keys = {g: f.leaves / slices[0] for (g, index, op), f in table.host_context.items() if (index, op) == (0, Op.F)}
        sums = {
            g: (f.leaves + keys.get(g, 0.0) * slices[-1]) / (sum(slices) - slices[-1])
            for (g, index, op), f in table.host_context.items()
            if index == last and op in (Op.B, Op.I) and last
        }
        return keys, sums

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
        # A single slice in its row has no context gradients, so the row with most slices tells their bytes.
        slices, table = max(self.rehearsed, key=lambda row: len(row[0]))
        return {stage: size / sum(slices) for stage, size in table.context_gradients.items()}

    @cached_property
    def _buffers(self) -> dict[Op, Floats]:
        """The bytes of a message of each kind of a spread head: of a constant, and a token of the slice."""
        points = {op: list[tuple[float, float, float, float]]() for op in (Op.V, Op.L, Op.E)}
        for slices, table in self.rehearsed:
            for index, length in enumerate(slices):
                for op, of_op in points.items():
                    of_op.append((length, 0.0, table.buffer(op, index), 0.0))
        return {op: _affine(rows, 2) for op, rows in points.items()}

    def _allocated(self, op: Op, stage: int, index: int, slices: Slices) -> float:
        """Returns the bytes that the first forward and the first backward of a row allocate for all of it."""
        if op is Op.F and index == 0:
            return self._context.get(stage, 0.0) * sum(slices)
        if op in (Op.B, Op.I) and index == len(slices) - 1:
            return self._context_gradients.get(stage, 0.0) * sum(slices)
        return 0.0

    @cached_property
    def _fits(self) -> Mapping[tuple[int, bool, bool, Op], tuple[Floats, Floats]]:
        """The bytes each action leaves, and its peak: of a constant, a token of the slice, a token up to its end."""
        points = self._points(lambda table: table.footprints)
        return {key: (_affine(rows, 2), _raised(rows, 3)) for key, rows in points.items()}

    @cached_property
    def _firsts(self) -> Mapping[tuple[int, bool, bool, Op], Floats]:
        """The peaks of the actions that make weight gradients."""
        points = self._points(lambda table: {key: Footprint(0.0, first) for key, first in table.first.items()})
        return {key: _raised(rows, 3) for key, rows in points.items()}

    def _points(
        self, known: Callable[[MemoryTable], Mapping[tuple[StageSlice, Op], Footprint]]
    ) -> Mapping[tuple[int, bool, bool, Op], list[tuple[float, float, float, float]]]:
        """Returns the tokens of each slice and up to its end, and what an action of it leaves and needs at most."""
        points = defaultdict[tuple[int, bool, bool, Op], list[tuple[float, float, float, float]]](list)
        for slices, table in self.rehearsed:
            for (unit, op), footprint in known(table).items():
                peak = footprint.peak - self._allocated(op, unit.stage, unit.slice, slices)
                place = slices[unit.slice], sum(slices[: unit.slice + 1])
                points[unit.stage, unit.recomputed, unit.offloaded, op].append((*place, footprint.leaves, peak))
        return points


def rows_to_rehearse(num_positions: int | None) -> list[Slices]:
    """Returns the slices of the rows that are rehearsed, for a model of `num_positions`, at least 6."""
    length = max(1, min(num_positions or _LONGEST_ROW, _LONGEST_ROW) // 6)
    short = max(1, length // 32)  # a slice dominated by its constant part
    whole = [(short,), (length,), (6 * length,)]
    return [*whole, (short,) * 3, (length,) * 3, (2 * length,) * 3, (length, 4 * length, length)]


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
    solution = np.linalg.lstsq(features, values, rcond=None)[0]
    return np.append(solution, 0.0)


def _raised(points: Sequence[tuple[float, float, float, float]], value: int) -> Floats:
    """Returns the least-squares constant, and rates for each token of a slice and up to its end, as high as the highest
    point."""
    values = np.array([point[value] for point in points])
    features = np.array([(1.0, point[0], point[1]) for point in points])
    solution: Floats = np.linalg.lstsq(features, values, rcond=None)[0]
    solution[0] += max(0.0, float((values - features @ solution).max()))
    return solution
