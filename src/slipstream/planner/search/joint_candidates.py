"""What the joint search finds on the most promising meshes: cuts inside layers, placements, slices and orders.

A named schedule has whole layers in stages of equal numbers. The joint search (`slipstream.planner.joint`) has neither
limit, but takes seconds for each mesh. So it is tried on the few that are best with named schedules. What it finds is
then simulated, and its memory counted in full, like any other configuration.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from math import inf

from slipstream.errors import SlipstreamError
from slipstream.planner.costs import AnalyticCosts, unit_bounds
from slipstream.planner.joint import AnalyticUnits, JointPlan, JointProblem, ProfileUnits, UnitCosts, find_joint_plan
from slipstream.planner.plans import AUTO, Configuration
from slipstream.planner.search.plan_options import PlanOptions
from slipstream.planner.search.plan_space import FoundPlan, PlanSpace
from slipstream.planner.search.simulated_configuration import SimulatedConfiguration
from slipstream.planner.search.step_bounds import PlacedPartition
from slipstream.schedule import Schedule, split_backwards

ProgressReport = Callable[[str, int, int], None]

_EFFORT = 7e6  # of each joint search: a few seconds
_MOST_MESHES = 2
_MOST_SLICES = 32
_MOST_UNITS = 4096  # slices of a rank's microbatches, in one order


def is_wanted(options: PlanOptions) -> bool:
    """Returns whether the options leave order, cut and slices to a joint search."""
    given = (options.stages_per_rank, options.num_slices)
    free = options.allows("schedule", AUTO) and options.allows("slicing", AUTO)
    return free and all(values is None for values in given)


def promising(configurations: Iterable[Configuration]) -> list[Configuration]:
    """Returns the first configuration of each of the first few meshes with a pipeline."""
    of_mesh: dict[tuple[int, ...], Configuration] = {}
    for c in configurations:
        if c.pipeline_parallel > 1 and c.schedule != AUTO:
            of_mesh.setdefault((c.tensor_parallel, c.pipeline_parallel, c.data_parallel, c.microbatch_size), c)
    return list(of_mesh.values())[:_MOST_MESHES]


def joint_candidates(space: PlanSpace, start: Configuration, report: ProgressReport) -> Iterator[Configuration]:
    """Yields what is found on the mesh of `start`, with less and less memory, and adds it to the space.

    First without a limit of memory, as it is and then with `start`'s offloading; then, unless that helps, within the
    device's memory, by the full account of it; then the first again with all of `start`'s ways to save memory. With
    these, weight gradients directly follow input gradients, as in named schedules.
    """
    allows = space.options.allows
    free = _find(space, start, report, limited=False)
    plans = (free, *free.rejected) if free else ()
    for offload, plan in product(dict.fromkeys((0.0, start.offload)), plans):
        if allows("recompute", "none") and allows("offload", offload):
            yield _added(space, start, plan, "none", offload)
    limited = None if start.offload or not allows("offload", 0.0) else _find(space, start, report, limited=True)
    if limited and allows("recompute", recompute := "full" if limited.recompute else "none"):
        yield _added(space, start, limited, recompute, 0.0)
    if start.recompute != "none":
        yield from (_added(space, start, plan, start.recompute, start.offload) for plan in plans)


def _find(space: PlanSpace, start: Configuration, report: ProgressReport, limited: bool) -> JointPlan | None:
    """Returns the joint plan; None where nothing fits, or there is no memory limit to keep to."""
    num_microbatches = space.shape(start).num_microbatches
    if limited and space.memory == inf:
        return None
    saves = start.offload > 0 or start.recompute != "none"
    split = limited or not saves  # what weight gradients need stays on the device until they are made
    problem = JointProblem(
        costs=_units(space, start),
        seq_len=space.seq_len,
        num_ranks=start.pipeline_parallel,
        num_microbatches=num_microbatches,
        granularity=_granularity(space),
        most_slices=max(1, min(_MOST_SLICES, _MOST_UNITS // num_microbatches)),
        # a slice is whole on the device while it runs, so where memory is scarce none is longer than those that fit
        longest_slice=max(space.slices(start)) if saves else space.longest,
        memory_limit=space.memory if limited else None,
        account=partial(_most_bytes, space, start) if limited else None,
        split=split,
        effort=_EFFORT,
    )
    try:
        found = find_joint_plan(problem, lambda share: report("cuts and orders, percent", round(100 * share), 100))
    except SlipstreamError:
        return None
    return found if split else _split(found)


def _most_bytes(
    space: PlanSpace,
    start: Configuration,
    partition: tuple[float, ...],
    slices: tuple[int, ...],
    schedule: Schedule,
    recompute: bool,
) -> list[float]:
    """Returns the most bytes that each rank holds, with the fewest message buffers that may be needed."""
    plan = JointPlan(schedule, partition, slices, seconds=0.0, bound=0.0, ideal=0.0)
    tried = _added(space, start, plan, "full" if recompute else "none", 0.0)
    return SimulatedConfiguration.of(space, tried).peaks()


def _split(plan: JointPlan) -> JointPlan:
    """Returns the plan, and those it was chosen from, with backwards split as in named schedules."""
    rejected = tuple(_split(each) for each in plan.rejected)
    return replace(plan, schedule=split_backwards(plan.schedule), rejected=rejected)


def _units(space: PlanSpace, c: Configuration) -> UnitCosts:
    costs = space.costs(c.tensor_parallel, c.microbatch_size)
    if isinstance(costs, AnalyticCosts):
        slicing = space.seq_len, _granularity(space)
        return AnalyticUnits(costs, *slicing, c.pipeline_parallel, c.data_parallel, c.optimizer_shards)
    return ProfileUnits(costs, space.source.state)


def _granularity(space: PlanSpace) -> int:
    """Returns the fewest tokens of which slices may be multiples, so that the last one isn't too short either."""
    shortest, length = space.choices.shortest, space.seq_len
    least = max(shortest, space.choices.granularity)
    return next(each for each in range(least, length + 1) if length % each == 0 or length % each >= shortest)


def _added(space: PlanSpace, start: Configuration, plan: JointPlan, recompute: str, offload: float) -> Configuration:
    placement = plan.schedule.placement
    configuration = replace(
        start,
        schedule=AUTO,
        slicing=AUTO,
        stages_per_rank=max(map(placement.count, set(placement))),
        num_slices=len(plan.slices),
        recompute=recompute,
        offload=offload,
    )
    source = space.source
    costs = space.costs(start.tensor_parallel, start.microbatch_size)
    bounds = unit_bounds(plan.partition, len(source.kinds), source.units_per_layer)
    space.found[configuration] = FoundPlan(PlacedPartition(costs, placement, bounds), plan)
    return configuration
