"""The quick account of memory over arrays: the most that ranks hold in an order that is not lowered, messages aside."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from slipstream.array_types import Flags, Floats, Ints
from slipstream.schedule import Op
from slipstream.simulator.action_graph import NUMBERS, OPS, ActionArrays, first_of
from slipstream.simulator.memory_table import MemoryTable, StageSlice


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
    changes = left.copy()
    makes = np.array([[(g, each) in table.gradients for g in stages] for each in OPS])
    for number in np.flatnonzero(first_of(stage, makes[op, stage])).tolist():
        unit, making = kinds[like[number]]
        during[number] = table.first[unit, making]
        changes[number] += table.gradients[unit.stage, making]
    context, gradients = (
        np.array([sizes[g] for g in stages], float)[stage] for sizes in (table.context, table.context_gradients)
    )
    opens, begins, closes = arrays.context_marks
    changes += context * opens + gradients * begins - context * closes
    changes -= gradients * (closes & (stage >= schedule.num_frozen_stages))
    state = np.bincount(schedule.placement, [table.parameters[g] + table.optimizer[g] for g in stages])
    moved = left * ((op == NUMBERS[Op.OFFLOAD]) | (op == NUMBERS[Op.RELOAD]))
    nothing = np.zeros(len(op))
    return state + row_peaks(arrays.firsts, nothing, during, -changes), row_peaks(
        arrays.firsts, -moved, nothing, nothing
    )


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
