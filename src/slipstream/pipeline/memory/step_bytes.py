"""The bytes of all actions of a step as arrays, for the compiled account of orders that are planned."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from slipstream.array_types import Floats
from slipstream.pipeline.memory.row_account import RowAccount, Slices
from slipstream.schedule import Op, Schedule

if TYPE_CHECKING:
    from slipstream.simulator.compiled_account import CompiledAccount

_OPS = (Op.F, Op.B, Op.I, Op.W)


def covers(schedule: Schedule) -> bool:
    """Returns whether the compiled account knows all actions of a schedule."""
    return schedule.ops.issubset((*_OPS, Op.REDUCE_GRAD))


def compiled_account(rows: RowAccount, placement: Sequence[int], slices: Sequence[Slices]) -> CompiledAccount:
    """Returns the account of a step of rows in these slices, as `RowAccount.table` has the bytes of each.

    An action that was never rehearsed takes infinitely many.
    """
    from slipstream.simulator.compiled_account import CompiledAccount, StepBytes  # loads numba

    lengths = np.array([length for row in slices for length in row], float)
    ends = np.concatenate([np.cumsum(row) for row in slices]).astype(float)
    counts = np.array([len(row) for row in slices])
    totals = np.array([sum(row) for row in slices], float)
    last = np.cumsum(counts) - 1
    features = np.stack([np.ones(len(lengths)), lengths, ends])
    shape = len(_OPS), len(placement), len(lengths)
    leaves, peaks, made = np.zeros(shape), np.full(shape, np.inf), np.zeros(shape)
    context, context_gradients = (np.outer(each, totals) for each in rows.context_rates(len(placement)))
    made[0][:, last - counts + 1] = context
    made[1:3, :, last] = context_gradients
    gradients = np.zeros(shape[:2])
    for (stage, recomputed, offloaded, op), (left, most) in rows.fits.items():
        if op in _OPS and not recomputed and not offloaded:
            number = _OPS.index(op)
            leaves[number, stage], peaks[number, stage] = left @ features, most @ features
            gradients[number, stage] = rows.gradient_bytes(stage, op)
    peaks += made
    first = peaks + gradients[:, :, None]
    for (stage, recomputed, offloaded, op), most in rows.firsts.items():
        if op in _OPS and not recomputed and not offloaded:
            number = _OPS.index(op)
            first[number, stage][last] = (most @ features + made[number, stage])[last]
    sizes, size = np.unique(rows.message_bytes(lengths), return_inverse=True)
    return CompiledAccount(
        StepBytes(
            leaves=leaves,
            peaks=peaks,
            first=first,
            context=context,
            context_gradients=context_gradients,
            payload=rows.message_bytes(lengths),
            gradients=gradients,
            state=_kept(rows, placement),
            sizes=sizes + rows.header_bytes,
            size=size.astype(np.int64),
        )
    )


def _kept(rows: RowAccount, placement: Sequence[int]) -> Floats:
    """Returns the bytes of each rank's parameters and optimizer state."""
    return np.bincount(placement, [rows.kept_bytes(stage) for stage in range(len(placement))]).astype(float)
