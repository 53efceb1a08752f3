"""The bytes that the actions of a plan keep and free, from which the simulator computes the ranks' memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import product

from slipstream.planner.costs.cost_sources import StageCosts
from slipstream.planner.costs.operation_counts import StateBytes
from slipstream.planner.costs.stage_basis import Stage
from slipstream.schedule import Op, Schedule
from slipstream.simulator import Footprint, MemoryTable, StageSlice


def memory_table(
    costs: StageCosts,
    stages: Sequence[Stage],
    schedule: Schedule,
    slices: tuple[int, ...],
    recompute: str,
    state: StateBytes,
    optimizer_shards: int = 1,
    alike: Callable[[Stage], Stage] = lambda stage: stage,
) -> MemoryTable:
    """Returns the bytes of all actions of a schedule, per device.

    Args:
        costs: what stages cost.
        stages: the parts of each stage.
        schedule: with R, OFFLOAD and RELOAD where there are any.
        slices: tokens of each slice.
        recompute: what is computed again: none, selective or full.
        state: bytes per parameter.
        optimizer_shards: ranks over which the optimizer's state is spread.
        alike: returns one of the stages that cost the same, so that their bytes are computed once.
    """
    length = sum(slices)
    of_stage = cache(partial(_footprints, costs, recompute, slices, schedule.ops))
    numbers, trained, context, context_gradients = (
        [float(value(stage)) for stage in map(alike, stages)]
        for value in (
            cache(costs.num_parameters),
            cache(costs.num_trained),
            cache(partial(costs.context_bytes, length=length)),
            cache(partial(costs.context_gradient_bytes, length=length)),
        )
    )
    footprints = {
        (StageSlice(g, *like), op): footprint
        for g, stage in enumerate(stages)
        for like, op, footprint in of_stage(alike(stage))
    }
    making: set[tuple[int, Op]] = {(each.stage, each.op) for each in schedule.positions if each.op in (Op.B, Op.W)}
    gradients = {(g, op): state.gradients * trained[g] for g, op in making}
    # a stage's first backward makes gradients while it frees activations, so the two never exist in full together
    first = {
        (unit, op): footprint.peak + gradient - min(gradient, -footprint.leaves)
        for (unit, op), footprint in footprints.items()
        if (gradient := gradients.get((unit.stage, op))) is not None
    }
    return MemoryTable(
        footprints=footprints,
        first=first,
        context=dict(enumerate(context)),
        context_gradients=dict(enumerate(context_gradients)),
        message_bytes=[float(costs.message_bytes(length)) for length in slices],
        parameters={g: state.weights * n for g, n in enumerate(numbers)},
        gradients=gradients,
        optimizer={g: state.optimizer / optimizer_shards * n for g, n in enumerate(trained)},
    )


def _footprints(
    costs: StageCosts, recompute: str, slices: tuple[int, ...], ops: frozenset[Op], layers: Stage
) -> list[tuple[tuple[int, bool, bool], Op, Footprint]]:
    """Returns (slice, recomputed, offloaded), op, footprint of one stage for every way to save a slice's memory."""
    found = []
    for s, length in enumerate(slices):
        own = costs.action_bytes(layers, length)
        whole = own.kept
        kept = whole if recompute == "none" else costs.kept_bytes(layers, recompute, length)
        # the first slice's forward and the last slice's backward allocate for the whole microbatch
        keys = costs.context_bytes(layers, sum(slices)) if s == 0 else 0
        made = costs.context_gradient_bytes(layers, sum(slices)) if s == len(slices) - 1 else 0
        for recomputed, offloaded in product({False, Op.R in ops}, {False, Op.OFFLOAD in ops}):
            left = kept if recomputed else whole
            during = own.alone if recomputed else own.peaks[Op.F]
            bytes_by_op = {
                Op.F: Footprint(left, left + during + keys),
                Op.R: Footprint(whole - left, max(0.0, whole - left) + own.peaks[Op.F]),
                Op.B: Footprint(-whole, own.peaks[Op.B] + made),
                Op.I: Footprint(own.deferred, own.peaks[Op.I] + made),
                Op.W: Footprint(-whole - own.deferred, own.peaks[Op.W]),
                Op.OFFLOAD: Footprint(-left, 0.0),
                Op.RELOAD: Footprint(left, left),
            }
            found += [((s, recomputed, offloaded), op, each) for op, each in bytes_by_op.items() if op in ops]
    return found
