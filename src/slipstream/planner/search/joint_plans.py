"""The joint search's plans on the most promising meshes: cuts inside layers, placements, slices and orders.

A named schedule has whole layers in stages of equal numbers. The joint search (`slipstream.planner.joint`) has neither
limit, but takes seconds for each mesh. So it is tried on the few that are best with named schedules. Its plans are then
simulated, and their memory counted in full, like any other plan.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from math import inf
from operator import attrgetter

from slipstream.cost import BY_LAYER, Degrees
from slipstream.errors import SlipstreamError
from slipstream.planner.joint import JointPlan, JointProblem, Tabulated, search_jointly
from slipstream.planner.plan import OPEN, Plan
from slipstream.planner.plan_fields import AUTO
from slipstream.planner.progress import ProgressReport
from slipstream.planner.search.plan_options import PlanOptions
from slipstream.planner.search.plan_space import PlanSpace
from slipstream.schedule import split_backwards

_EFFORT = 7e6  # of each joint search: a few seconds
_MOST_MESHES = 2
_MOST_SLICES = 32
_MOST_JOINT_UNITS = 4096  # slices of a rank's microbatches, in one order


def is_wanted(options: PlanOptions) -> bool:
    """Returns whether the options leave order, cut and slices to a joint search."""
    free = options.allows("schedule", AUTO) and options.allows("slicing", AUTO)
    return free and options.allowed.keys().isdisjoint({"stages_per_rank", "num_slices"})


def promising(configurations: Iterable[Plan]) -> list[Plan]:
    """Returns the first configuration of each of the first few meshes with a pipeline; those whose tensor-parallel and
    pipeline degrees no earlier one has come before others, as meshes that differ in less are alike."""
    pipelines = [c for c in configurations if c.pipeline_parallel > 1 and c.schedule_name != AUTO]
    firsts: dict[object, Plan] = {}
    for kind in (attrgetter("tensor_parallel", "pipeline_parallel"), attrgetter("mesh")):
        for c in pipelines:
            firsts.setdefault(kind(c), c)
    return list(dict.fromkeys(firsts.values()))[:_MOST_MESHES]


def joint_candidates(space: PlanSpace, start: Plan, best: float, report: ProgressReport) -> Iterator[Plan]:
    """Yields the plans on the mesh of `start`, with less and less memory, and adds them to the space.

    Nothing is sought that takes `best` seconds or more. These are tried in turn:

    1. The best without a limit of memory, as it is and with `start`'s offloading.
    2. The best within the device's memory, by the full account of it; with `start`'s offloading only where nothing
       else is known to fit.
    3. The first again, with all of `start`'s ways to save memory.

    With these, weight gradients directly follow input gradients, as in named schedules, or belong to them where layers
    are recomputed one by one.
    """
    allows, problem = space.options.allows, _problem(space, start, best)
    added = partial(_added, space, start)
    free = _find(space, start, problem, report)
    kinds = (free, free.other_head) if free else ()
    plans = sorted((plan for kind in kinds if kind for plan in (kind, *kind.rejected)), key=lambda plan: plan.seconds)
    for offload, plan in product(dict.fromkeys((0.0, start.offload)), plans):
        if allows("recompute", "none") and allows("offload", offload):
            yield added(_split(plan) if _saves(start) else plan, "none", offload)
    # What isn't fast enough without a limit isn't within one.
    if (free or not problem.split) and allows("offload", start.offload) and space.memory < inf:
        account = partial(_most_bytes, space, start)
        within = replace(problem, memory_limit=space.memory, account=account, split=True)
        limited = _find(space, start, within, report)
        if limited and allows("recompute", limited.recompute):
            yield added(limited, limited.recompute, start.offload)
    if start.recompute != "none":
        split_plans = plans if start.recompute in BY_LAYER else map(_split, plans)
        yield from (added(plan, start.recompute, start.offload) for plan in split_plans)


def _saves(start: Plan) -> bool:
    # On the host, or by recomputation.
    return start.offload > 0 or start.recompute != "none"


def _problem(space: PlanSpace, start: Plan, best: float) -> JointProblem:
    """Returns the problem for the mesh of a configuration, without a limit of memory: a step shorter than `best`."""
    num_microbatches, costs = space.shape(start).num_microbatches, space.costs_of(start)
    cuts = space.choices.cuts.with_long_ends(space.seq_len)
    return JointProblem(
        costs=Tabulated(costs, space.seq_len, cuts) if costs.deserves_table else costs,
        update=space.update(start),
        replicas=start.data_parallel,
        seq_len=space.seq_len,
        num_ranks=start.pipeline_parallel,
        num_microbatches=num_microbatches,
        cuts=replace(
            cuts,
            most_slices=max(1, min(_MOST_SLICES, _MOST_JOINT_UNITS // num_microbatches)),
            # a slice is whole on the device while it runs, so where memory is scarce none is longer than those that fit
            longest_slice=max(space.slices(start)) if _saves(start) else space.longest,
        ),
        split=not _saves(start),  # the factors of weight gradients stay on the device until then
        effort=_EFFORT,
        most_seconds=best - float(space.tails(start).sum(axis=0).min()),
        tied=costs.is_tied,
        given=Plan(vocabulary=_vocabulary(space, start)),
        may_spread=True,
    )


def _find(space: PlanSpace, start: Plan, problem: JointProblem, report: ProgressReport) -> JointPlan | None:
    """Returns the joint plan; None where nothing fits or is as fast."""

    try:
        return search_jointly(problem, report)
    except SlipstreamError:
        return None


def _vocabulary(space: PlanSpace, start: Plan) -> str:
    """Returns where a plan has the head's rows, OPEN where it may choose: training spreads them over ranks that share
    nothing else."""
    allows, rows = space.options.allows, space.costs(start.degrees, start.microbatch_size).vocab_size
    can_be = "vocabulary" not in space.source.refusals and start.degrees == Degrees() and start.shard != "parameters"
    if not can_be or not allows("vocabulary", "spread") or rows < start.pipeline_parallel:
        return "whole"
    return OPEN if allows("vocabulary", "whole") else "spread"


def _most_bytes(space: PlanSpace, start: Plan, found: Plan) -> list[float]:
    """Returns the most bytes that each rank holds."""
    return space.evaluate(_closed(start, found, found.recompute, start.offload)).peaks()


def _split(plan: JointPlan) -> JointPlan:
    """Returns the plan, and those it was chosen from, with backwards split as in named schedules."""
    rejected = tuple(_split(rejected) for rejected in plan.rejected)
    return replace(plan.in_order(split_backwards(plan.schedule), plan.seconds), rejected=rejected)


def _added(space: PlanSpace, start: Plan, found: JointPlan, recompute: str, offload: float) -> Plan:
    """Returns the joint search's plan on the mesh of `start`, and adds it to the space."""
    plan = _closed(start, found.plan, recompute, offload)
    space.found[plan] = found
    return plan


def _closed(start: Plan, found: Plan, recompute: str, offload: float) -> Plan:
    return start.closed(
        schedule=found.schedule,
        slicing=AUTO,
        recompute=recompute,
        offload=offload,
        partition=found.partition,
        slices=found.slices,
    )
