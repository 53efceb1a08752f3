"""The bytes that a configuration's actions keep and free, from which the simulator computes the ranks' memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from slipstream.planner.plans import Configuration
from slipstream.planner.search.plan_space import PlanSpace
from slipstream.planner.search.step_bounds import PlacedPartition, StageTimes
from slipstream.schedule import Op, Schedule
from slipstream.simulator import Footprint, MemoryTable, StageSlice


def memory_table(
    space: PlanSpace, configuration: Configuration, cut: PlacedPartition, times: StageTimes, schedule: Schedule
) -> MemoryTable:
    """Returns the bytes of all actions of a configuration, per device."""
    c, state = configuration, space.source.state
    costs = space.costs(c.tensor_parallel, c.microbatch_size)
    numbers = [costs.num_parameters(layers) for layers in cut.stages]
    footprints: dict[tuple[StageSlice, Op], Footprint] = {}
    alike: dict[object, list[_SliceFootprint]] = {}  # by kind of stage
    for g, layers in enumerate(cut.stages):
        kind = space.kinds_of(layers)
        if kind not in alike:
            alike[kind] = list(_footprints(space, c, times.slices, layers, schedule.ops))
        footprints |= {(StageSlice(g, *like), op): footprint for like, op, footprint in alike[kind]}
    splitting = {action.stage for action in schedule.positions if action.op is Op.W}
    gradients = {(g, Op.W if g in splitting else Op.B): state.gradients * n for g, n in enumerate(numbers)}
    # a stage's first backward makes gradients while it frees activations, so the two never exist in full together
    first = {
        (unit, op): footprint.peak + gradient - min(gradient, -footprint.leaves)
        for (unit, op), footprint in footprints.items()
        if (gradient := gradients.get((unit.stage, op))) is not None
    }
    return MemoryTable(
        footprints=footprints,
        first=first,
        context={g: costs.context_bytes(layers, space.seq_len) for g, layers in enumerate(cut.stages)},
        context_gradients={
            g: costs.context_gradient_bytes(layers, space.seq_len) for g, layers in enumerate(cut.stages)
        },
        message_bytes=[float(costs.message_bytes(length)) for length in times.slices],
        parameters={g: state.weights * n for g, n in enumerate(numbers)},
        gradients=gradients,
        optimizer={g: state.optimizer / c.optimizer_shards * n for g, n in enumerate(numbers)},
    )


class _SliceFootprint(NamedTuple):
    """The bytes of one op of one slice."""

    like: tuple[int, bool, bool]  # (slice, recomputed, offloaded)
    op: Op
    footprint: Footprint


def _footprints(
    space: PlanSpace, configuration: Configuration, slices: tuple[int, ...], layers: range, ops: frozenset[Op]
) -> Iterator[_SliceFootprint]:
    """Yields the footprints of one stage, for slices that are recomputed or offloaded and those that aren't."""
    c = configuration
    costs = space.costs(c.tensor_parallel, c.microbatch_size)
    ways = [(r, o) for r in {False, Op.R in ops} for o in {False, Op.OFFLOAD in ops}]
    for s, length in enumerate(slices):
        whole = costs.activation_bytes(layers, length)
        kept = whole if c.recompute == "none" else costs.kept_bytes(layers, c.recompute, length)
        # the first slice's forward and the last slice's backward allocate for the whole microbatch
        keys = costs.context_bytes(layers, space.seq_len) if s == 0 else 0
        made = costs.context_gradient_bytes(layers, space.seq_len) if s == len(slices) - 1 else 0
        made += costs.logits_gradient_bytes(layers, length)
        during_backward = 2 * float(costs.message_bytes(length)) + made
        for recomputed, offloaded in ways:
            left = kept if recomputed else whole
            # a recomputed forward holds one layer's activations at a time
            during = left + (whole / len(layers) if recomputed else 0) + keys
            bytes_by_op = {
                Op.F: Footprint(left, during),
                Op.R: Footprint(whole - left, whole - left),
                Op.B: Footprint(-whole, during_backward),
                Op.I: Footprint(0.0, during_backward),
                Op.W: Footprint(-whole, 0.0),
                Op.OFFLOAD: Footprint(-left, 0.0),
                Op.RELOAD: Footprint(left, left),
            }
            for op, footprint in bytes_by_op.items():
                if op in ops:
                    yield _SliceFootprint((s, recomputed, offloaded), op, footprint)
