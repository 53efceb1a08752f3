"""The bytes that a configuration's actions keep and free, from which the simulator computes the ranks' memory."""

from __future__ import annotations

from functools import cache, partial
from itertools import product

from slipstream.planner.costs import Stage, StageCosts
from slipstream.planner.plans import Configuration
from slipstream.planner.search.plan_space import PlanSpace
from slipstream.schedule import Op, Schedule
from slipstream.simulator import Footprint, MemoryTable, StageSlice


def memory_table(space: PlanSpace, configuration: Configuration, schedule: Schedule) -> MemoryTable:
    """Returns the bytes of all actions of a configuration, per device."""
    cut, slices, state = space.cut(configuration), space.times(configuration).slices, space.source.state
    sizes, numbers = space.sizes(cut), space.sizes(cut).parameters.tolist()
    of_stage = cache(partial(_footprints, cut.costs, configuration.recompute, slices, schedule.ops))
    footprints = {
        (StageSlice(g, *like), op): footprint
        for g, layers in enumerate(cut.stages)
        for like, op, footprint in of_stage(space.alike(layers))
    }
    splitting = {action.stage for action in schedule.positions if action.op is Op.W}
    gradients = {(g, Op.W if g in splitting else Op.B): state.gradients * n for g, n in enumerate(numbers)}
    # a stage's first backward makes gradients while it frees activations, so the two never exist in full together
    first = {
        (unit, op): footprint.peak + gradient - min(gradient, -footprint.leaves)
        for (unit, op), footprint in footprints.items()
        if (gradient := gradients.get((unit.stage, op))) is not None
    }
    context_gradients = cut.per_stage(partial(cut.costs.context_gradient_bytes, length=space.seq_len))
    return MemoryTable(
        footprints=footprints,
        first=first,
        context=dict(enumerate(sizes.context.tolist())),
        context_gradients=dict(enumerate(context_gradients.tolist())),
        message_bytes=[float(cut.costs.message_bytes(length)) for length in slices],
        parameters={g: state.weights * n for g, n in enumerate(numbers)},
        gradients=gradients,
        optimizer={g: state.optimizer / configuration.optimizer_shards * n for g, n in enumerate(numbers)},
    )


def _footprints(
    costs: StageCosts, recompute: str, slices: tuple[int, ...], ops: frozenset[Op], layers: Stage
) -> list[tuple[tuple[int, bool, bool], Op, Footprint]]:
    """Returns (slice, recomputed, offloaded), op, footprint of one stage for every way to save a slice's memory."""
    found = []
    num_layers = max(1, len(costs.parts_of(layers)) // costs.units_per_layer)
    for s, length in enumerate(slices):
        whole = costs.activation_bytes(layers, length)
        kept = whole if recompute == "none" else costs.kept_bytes(layers, recompute, length)
        # the first slice's forward and the last slice's backward allocate for the whole microbatch
        keys = costs.context_bytes(layers, sum(slices)) if s == 0 else 0
        made = costs.context_gradient_bytes(layers, sum(slices)) if s == len(slices) - 1 else 0
        made += costs.logits_gradient_bytes(layers, length)
        during_backward = 2 * float(costs.message_bytes(length)) + made
        for recomputed, offloaded in product({False, Op.R in ops}, {False, Op.OFFLOAD in ops}):
            left = kept if recomputed else whole
            # a recomputed forward holds one layer's activations at a time
            during = left + (whole / num_layers if recomputed else 0) + keys
            bytes_by_op = {
                Op.F: Footprint(left, during),
                Op.R: Footprint(whole - left, whole - left),
                Op.B: Footprint(-whole, during_backward),
                Op.I: Footprint(0.0, during_backward),
                Op.W: Footprint(-whole, 0.0),
                Op.OFFLOAD: Footprint(-left, 0.0),
                Op.RELOAD: Footprint(left, left),
            }
            found += [((s, recomputed, offloaded), op, each) for op, each in bytes_by_op.items() if op in ops]
    return found
