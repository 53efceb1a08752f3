"""The joint search's plans on the most promising meshes: cuts inside layers, placements, slices and orders.

A named schedule has whole layers in stages of equal numbers. The joint search (`slipstream.planner.joint`) has neither
limit, but takes seconds for each mesh. So it is tried on the few that are best with named schedules. Its plans are then
simulated, and their memory counted in full, like any other plan.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import islice, product
from math import inf

from slipstream.cost import BY_LAYER, Degrees, partition_of
from slipstream.errors import SlipstreamError
from slipstream.planner.joint import JointPlan, JointProblem, Tabulated, search_jointly
from slipstream.planner.plan import OPEN, Plan
from slipstream.planner.plan_fields import AUTO
from slipstream.planner.progress import ProgressReport, untold
from slipstream.planner.search.plan_options import PlanOptions
from slipstream.planner.search.plan_space import PlanSpace
from slipstream.schedule import split_backwards

_EFFORT = 7e6  # of each joint search: a few seconds
_EFFORT_OF_ONE = 1e6  # where cut and slices are given
_MOST_MESHES = 2
_ABOUT_AS_FAST = 1.02  # times the shortest step: those of one more mesh
_MOST_SLICES = 32
_MOST_JOINT_UNITS = 4096  # slices of a rank's microbatches, in one order


def is_wanted(options: PlanOptions) -> bool:
    """Returns whether the options leave order, cut and slices to a joint search."""
    free = options.allows("schedule", AUTO) and options.allows("slicing", AUTO)
    return free and options.allowed.keys().isdisjoint({"stages_per_rank", "num_slices"})


def promising(seconds: Mapping[Plan, float]) -> list[Plan]:
    """Returns the best configuration of each of the first few meshes with a pipeline, given their steps.

    First come those whose tensor-parallel and pipeline degrees no better one has, as meshes that differ in less are
    alike; last, one more that is about as fast as the best of all.
    """
    configurations = sorted(seconds, key=seconds.__getitem__)
    pipelines = [c for c in configurations if c.pipeline_parallel > 1 and c.schedule_name != AUTO]
    of_kind: dict[object, Plan] = {}
    of_mesh: dict[object, Plan] = {}
    for c in pipelines:
        of_kind.setdefault((c.tensor_parallel, c.pipeline_parallel), c)
        of_mesh.setdefault(c.mesh, c)
    firsts = list(dict.fromkeys([*of_kind.values(), *of_mesh.values()]))[:_MOST_MESHES]
    others = (c for c in of_mesh.values() if c not in firsts and seconds[c] <= _ABOUT_AS_FAST * seconds[pipelines[0]])
    return [*firsts, *islice(others, 1)]


class JointCandidates:
    """The plans on the mesh of `start`, with less and less memory; each is added to the space as it is asked for.

    Nothing is sought that takes `best` seconds or more.

    Where memory is saved, weight gradients directly follow input gradients, as in named schedules, or belong to them
    where layers are recomputed one by one.
    """

    def __init__(self, space: PlanSpace, start: Plan, best: float, report: ProgressReport) -> None:
        self._space = space
        self._start = start
        self._report = report
        self._problem = _problem(space, start, best)
        self._is_tight = self._holds_too_much()
        free = None if self._is_tight else _find(self._problem, report)
        kinds = (free, free.other_head) if free else ()
        self._free = sorted(
            (plan for kind in kinds if kind for plan in (kind, *kind.rejected)), key=lambda plan: plan.seconds
        )

    def _holds_too_much(self) -> bool:
        """Returns whether `start`'s own cut and slices are too large in an order that is found regardless of memory,
        with any of its savings. Such orders hold several times as much as others, so that where one doesn't fit, a
        search for more of them is in vain."""
        space, start = self._space, self._start
        cut = space.cut(start)
        if space.memory == inf:
            return False
        own = Plan(
            partition=partition_of(cut.bounds, space.source.units_per_layer),
            placement=cut.placement,
            slices=space.slices(start),
            vocabulary="whole",
        )
        problem = replace(
            self._problem,
            costs=cut.costs,
            cuts=space.choices.known,
            given=own,
            effort=_EFFORT_OF_ONE,
            most_seconds=inf,
        )
        if (found := _find(problem, untold)) is None:
            return False
        kinds = product(dict.fromkeys(("none", start.recompute)), dict.fromkeys((0.0, start.offload)))
        plans = (_closed(start, found.plan, *savings) for savings in kinds)
        return not any(space.fits(space.evaluate(plan)) for plan in plans)

    def without_limit(self) -> Iterator[Plan]:
        """Yields the plans of a search without a limit of memory, the best first: as they are, then with `start`'s
        offloading."""
        allows, start = self._space.options.allows, self._start
        for offload, plan in product(dict.fromkeys((0.0, start.offload)), self._free):
            if allows("recompute", "none") and allows("offload", offload):
                yield self._added(_split(plan) if _saves(start) else plan, "none", offload)

    def within_limit(self) -> Iterator[Iterator[Plan]]:
        """Yields two ways to keep to the device's memory, of which neither is always the faster one: the plans that are
        best by the full account of it, and those without a limit with all of `start`'s ways to save memory."""
        start = self._start
        # What was sought and isn't fast enough without a limit isn't within one.
        if self._free or self._is_tight or not self._problem.split:
            yield self._accounted()
        if start.recompute != "none":
            split_plans = self._free if start.recompute in BY_LAYER else map(_split, self._free)
            yield (self._added(plan, start.recompute, start.offload) for plan in split_plans)

    def _accounted(self) -> Iterator[Plan]:
        """Yields the best plans by the account; with `start`'s offloading only where nothing else is known to fit."""
        space, start = self._space, self._start
        if not space.options.allows("offload", start.offload) or space.memory == inf:
            return
        account = partial(_most_bytes, space, start)
        within = replace(self._problem, memory_limit=space.memory, account=account, split=True)
        limited = _find(within, self._report)
        for plan in (limited, *limited.rejected) if limited else ():
            if space.options.allows("recompute", plan.recompute):
                yield self._added(plan, plan.recompute, start.offload)

    def _added(self, found: JointPlan, recompute: str, offload: float) -> Plan:
        """Returns the joint search's plan on the mesh of `start`, and adds it to the space."""
        plan = _closed(self._start, found.plan, recompute, offload)
        self._space.found[plan] = found
        return plan


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


def _find(problem: JointProblem, report: ProgressReport) -> JointPlan | None:
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
    can_be = can_be and not space.loss_tokens
    if not can_be or not allows("vocabulary", "spread") or rows < start.pipeline_parallel:
        return "whole"
    return OPEN if allows("vocabulary", "whole") else "spread"


def _most_bytes(space: PlanSpace, start: Plan, found: Plan) -> list[float]:
    """Returns the most bytes that each rank holds, infinite where its host has no room."""
    return space.evaluate(_closed(start, found, found.recompute, start.offload)).peaks_within_hosts()


def _split(plan: JointPlan) -> JointPlan:
    """Returns the plan, and those it was chosen from, with backwards split as in named schedules."""
    rejected = tuple(_split(rejected) for rejected in plan.rejected)
    return replace(plan.in_order(split_backwards(plan.schedule), plan.seconds), rejected=rejected)


def _closed(start: Plan, found: Plan, recompute: str, offload: float) -> Plan:
    return start.closed(
        schedule=found.schedule,
        slicing=AUTO,
        recompute=recompute,
        offload=offload,
        partition=found.partition,
        slices=found.slices,
    )
