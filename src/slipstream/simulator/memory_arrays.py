"""The quick account of memory over arrays: the most that ranks hold in an order that is not lowered, messages aside."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from slipstream.array_types import Flags, Floats, Ints
from slipstream.schedule import Op
from slipstream.simulator.action_graph import NUMBERS, OPS, ActionArrays, first_of
from slipstream.simulator.memory_table import MemoryTable, StageSlice

BACKWARD_OPS = (Op.B, Op.I, Op.W)


def quick_peaks(arrays: ActionArrays, table: MemoryTable) -> tuple[Floats, Floats]:
    """Returns the most bytes that each rank holds, messages aside, and the most that each has on the host.

    The search of plans runs this for every configuration, so it needs no lowered schedule and keeps one sum instead of
    one per kind. `rank_memory` is the full account; a property test shows that they agree. Every stage must split all
    of its backwards or none.

    Args:
        arrays: of the whole schedule, without sends and receives.
        table: bytes of every action.
    """
    schedule, op, stage = arrays.schedule, arrays.op, arrays.stage
    stages = range(schedule.num_stages)
    saved = _has(Op.R, arrays), _has(Op.OFFLOAD, arrays)
    shape = len(OPS), schedule.num_stages, schedule.num_slices, 2, 2
    different, like = np.unique(np.ravel_multi_index((op, stage, arrays.slice, *saved), shape), return_inverse=True)
    places = np.transpose(np.unravel_index(different, shape)).tolist()
    kinds = [(StageSlice(g, i, bool(again), bool(away)), OPS[number]) for number, g, i, again, away in places]
    footprints = [table.footprints[kind] for kind in kinds]
    left, during = (
        np.array(sizes, float)[like]
        for sizes in ([each.leaves for each in footprints], [each.peak for each in footprints])
    )
    first = np.array([table.first.get(kind, np.nan) for kind in kinds])[like]
    made = np.array([[table.gradients.get((g, each), 0.0) for g in stages] for each in BACKWARD_OPS], float)
    context, gradients = (
        np.array([sizes[g] for g in stages], float)[stage] for sizes in (table.context, table.context_gradients)
    )
    state = np.bincount(schedule.placement, [table.parameters[g] + table.optimizer[g] for g in stages])
    moved = left * ((op == NUMBERS[Op.OFFLOAD]) | (op == NUMBERS[Op.RELOAD]))
    nothing = np.zeros(len(op))
    held = state + row_peaks(arrays.firsts, *rank_bytes(arrays, left, during, first, made, context, gradients))
    return held, row_peaks(arrays.firsts, -moved, nothing, nothing)


def rank_bytes(
    arrays: ActionArrays,
    leaves: Floats,
    during: Floats,
    first: Floats,
    made: Floats,
    context: Floats,
    context_gradients: Floats,
) -> tuple[Floats, Floats, Floats]:
    """Returns the bytes that each action takes, holds besides and frees, as `row_peaks` has them.

    Args:
        arrays: of the actions.
        leaves: what each leaves for others.
        during: the most that each holds over what was held before.
        first: likewise, of an action that makes weight gradients. Not a number: those and what it holds.
        made: the weight gradients that the first B, I and W of each stage make, (3, stages): B all, the others a part.
        context: the keys and values of each action's microbatch on its stage.
        context_gradients: their gradients.
    """
    op, stage, size = arrays.op, arrays.stage, len(arrays.op)
    firsts = np.full(made.shape, size)
    for number, each in enumerate(BACKWARD_OPS):
        places = np.flatnonzero(first_of(stage, op == NUMBERS[each]))
        firsts[number, stage[places]] = places
    makes = firsts < size
    makes[1:] &= firsts[1:] < firsts[0]  # where B came before there is nothing left to make
    own, more = made.copy(), made.copy()
    more[0] -= (made[1:] * makes[1:]).sum(axis=0)
    takes, during, at = np.zeros(size), during.copy(), firsts[makes]
    takes[at] = more[makes]
    during[at] = np.where(np.isnan(first[at]), during[at], first[at] - own[makes])
    opens, begins, closes = arrays.context_marks
    gives = leaves + context * opens + context_gradients * begins - context * closes
    gives -= context_gradients * (closes & (stage >= arrays.schedule.num_frozen_stages))
    return takes, during, -gives


def _has(op: Op, arrays: ActionArrays) -> Flags:
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
