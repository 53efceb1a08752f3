"""The search for a plan: of all configurations that divide and fit, the one whose simulated step is shortest.

The joint search's plans on the most promising meshes: cuts inside layers, placements, slices and orders.

A named schedule has whole layers in stages of equal numbers. The joint search (`slipstream.planner.joint`) has neither
limit, but takes seconds for each mesh. So it is tried on the few that are best with named schedules. Its plans are then
simulated, and their memory counted in full, like any other configuration.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from heapq import heappop, heappush, nsmallest
from itertools import islice, product
from math import ceil, inf, prod
from operator import attrgetter, itemgetter
from typing import Any

from slipstream.cost import BY_LAYER, CostSource, CountedCosts, Degrees
from slipstream.errors import SlipstreamError
from slipstream.planner.joint import (
    JointPlan,
    JointProblem,
    Tabulated,
    Vocabulary,
    find_vocabulary_plan,
)
from slipstream.planner.plan import AUTO, CHOICES, Plan
from slipstream.planner.plan_report import Alternative, PlanReport, Prediction
from slipstream.planner.search.evaluate import Evaluation
from slipstream.planner.search.frontier import Frontier, ProgressReport
from slipstream.planner.search.plan_options import PlanOptions
from slipstream.planner.search.plan_space import PlanSpace
from slipstream.planner.search.schedule_shape import working_memory
from slipstream.schedule import Schedule, split_backwards
from slipstream.simulator import simulate
from slipstream.timeline import Timeline
from slipstream.units import bytes_text, plural

_MOST_SCHEDULED_EACH = 2  # configurations whose schedule is made, for each that may be simulated
_MOST_UNITS = 1_000_000  # slices of stages in all schedules that are made
_MOST_WHOLE = 200_000  # slices of stages of a long step that is simulated whole, as it is the shortest
# configurations with another choice that are tested quickly, and whose schedule is made
_MOST_TRIED, _MOST_SCHEDULED = 150, 8


@working_memory()
def search_plans(
    source: CostSource,
    seq_len: int,
    global_batch: int,
    *,
    options: PlanOptions | None = None,
    progress: ProgressReport | None = None,
) -> PlanReport:
    """Returns the best plans for training on `global_batch` sequences of `seq_len` tokens per step.

    Lower bounds are computed for every mesh, and for the configurations of those that may have the next best. The most
    promising ones are simulated until no other can be faster, or `options.num_simulated` are simulated; the report's
    `gap` bounds the seconds that it may have missed.

    Args:
        source: the model on its hardware, with its costs there.
        seq_len: tokens per sequence.
        global_batch: sequences per step, over all devices.
        options: the choices that are allowed.
        progress: called with the current task, how many are done, and out of how many (0 where that is unknown).

    Raises:
        SlipstreamError: where no degrees divide the devices and the batch, or nothing fits the memory: by how much, on
            which rank, and the cheapest change with which something would fit.
    """
    began = time.perf_counter()
    options = options or PlanOptions()
    report = progress or (lambda *_: None)
    space = PlanSpace(source, seq_len, global_batch, options)
    frontier = Frontier(space, report)
    run = _PlanSearch(space, frontier, report)
    run.settle()
    run.search_jointly()
    best, alternatives = run.settle()
    if not best and options.vocabulary == ("spread",):
        raise SlipstreamError(_NOTHING_SPREAD)
    if not best and run.seconds:
        raise run.nothing_joint()
    if not best:
        if not (few := _smallest(space)):
            raise _nothing_divides(space)
        for smallest in few:
            run.simulate(smallest)
        best, alternatives = run.settle()
    if not best:
        raise explain_misfit(space, frontier.num_meshes)

    def simulated() -> tuple[Schedule, Timeline]:
        candidate = space.evaluate(best[0].plan)
        return candidate.schedule, simulate(candidate.schedule, candidate.cost, candidate.table)

    return PlanReport(
        model=source.name,
        cluster=source.hardware,
        num_devices=source.num_devices,
        dtype=source.dtype,
        seq_len=seq_len,
        global_batch=global_batch,
        predictions=tuple(best),
        alternatives=tuple(alternatives),
        simulated=simulated,
        num_meshes=frontier.num_meshes,
        num_bounded_meshes=frontier.num_bounded_meshes,
        num_configurations=frontier.num_bounded,
        num_too_large=frontier.num_too_large + len(run.too_large),
        num_simulated=run.num_simulated,
        gap=run.gap(best[0]),
        seconds=time.perf_counter() - began,
        notes=source.trained() + source.notes(),
        refusals={
            choice: why
            for choice, why in source.refusals.items()
            if choice == "context_parallel" or (choice == "expert_parallel" and source.num_experts)
        },
        trained=source.trained(),
        sequence_parallel=source.sequence_parallel and best[0].plan.tensor_parallel > 1,
        fused=source.fused,
    )


_NOTHING_SPREAD = (
    "vocabulary=spread: it is planned together with cuts, slices and order, for pipelines whose ranks share nothing "
    "else, and none was found that fits. Allow schedule=auto and slicing=auto, tensor, context and expert parallelism "
    "of 1, and any stages_per_rank and num_slices; or vocabulary=whole too."
)


@dataclass
class _PlanSearch:
    space: PlanSpace
    frontier: Frontier
    report: ProgressReport
    seconds: dict[Plan, float] = field(default_factory=dict)  # simulated steps of those that fit
    extrapolated: set[Plan] = field(default_factory=set)  # those of them that weren't simulated whole
    too_large: set[Plan] = field(default_factory=set)
    num_simulated: int = 0
    num_scheduled: int = 0  # configurations whose schedule was made
    num_units: int = 0  # slices of stages in these schedules
    reached: int = 0  # how many of the frontier have been dealt with, or postponed
    over_bound: dict[_Kind, float] = field(default_factory=dict)  # least step of each kind, over its bound
    postponed: list[tuple[float, int, float, Plan]] = field(default_factory=list)  # by what they may take
    known: dict[Plan, Prediction] = field(default_factory=dict)

    def settle(self) -> tuple[list[Prediction], list[Alternative]]:
        """Returns the best configurations, and the alternatives to the best one.

        Looking for alternatives may find better ones: then the search resumes.
        """
        while True:
            self.simulate_promising()
            if self._confirm_shortest():
                continue
            before = self.num_simulated
            best = list(islice(self.predictions(), self.space.options.num_best))
            alternatives = list(self.alternatives(best[0])) if best else []
            if before == self.num_simulated:
                return best, alternatives

    def _confirm_shortest(self) -> bool:
        """Simulates the shortest step whole; False where that was done, or takes too long."""
        shortest = min(self._allowed(), key=self.seconds.__getitem__, default=None)
        if shortest not in self.extrapolated or prod(self.space.shape(shortest).counts) > _MOST_WHOLE:
            return False
        self.extrapolated.remove(shortest)
        del self.seconds[shortest]
        if self.space.fits(candidate := self.space.evaluate(shortest)):
            self.seconds[shortest] = candidate.seconds
        else:
            self.too_large.add(shortest)
        return True

    def simulate_promising(self) -> None:
        """Simulates in the order of the bounds until the next configuration can't be among the best.

        Those whose like took so much longer than their bounds that they would not be among the best come last.
        """
        for bound, plan in self.frontier.starting(self.reached):
            if (self._is_limited and self.seconds) or bound >= self._worst_reported():
                break
            self.reached += 1
            expected = bound * self.over_bound.get(_kind(plan), 1.0)
            if expected < self._worst_reported():
                self._simulate_bounded(bound, plan)
            else:
                heappush(self.postponed, (expected, self.reached, bound, plan))
        while self.postponed and not self._is_limited:
            *_, bound, plan = heappop(self.postponed)
            if bound < self._worst_reported():
                self._simulate_bounded(bound, plan)

    def _simulate_bounded(self, bound: float, plan: Plan) -> None:
        if (seconds := self.simulate(plan)) is not None and bound > 0:
            kind = _kind(plan)
            self.over_bound[kind] = min(seconds / bound, self.over_bound.get(kind, inf))

    def search_jointly(self) -> None:
        """Adds the joint search's plans on the best meshes, where they fit."""
        if not is_wanted(self.space.options):
            return
        for start in promising(sorted(self.seconds, key=self.seconds.__getitem__)):
            best = min(map(self.seconds.__getitem__, self._allowed()), default=inf)
            # An order that was found regardless of copies to the host is hardly ever the best beside them.
            if start.offload and best < inf:
                continue
            for plan in joint_candidates(self.space, start, best, self.report):
                candidate = self.space.evaluate(plan)
                if self.space.fits(candidate):
                    self.num_simulated += 1
                    self._add_found(plan, candidate.seconds)
                    if candidate.seconds < best:
                        break

    def _add_found(self, plan: Plan, seconds: float) -> None:
        """Adds a joint search's plan; of several with the same choices the one with the shortest step is kept."""
        alike = [other for other in self.seconds if all(other.choice(name) == plan.choice(name) for name in CHOICES)]
        if all(seconds < self.seconds[other] for other in alike):
            for other in alike:
                del self.seconds[other]
            self.seconds[plan] = seconds

    def nothing_joint(self) -> SlipstreamError:
        """Returns the error where a named schedule fits, but isn't allowed, and the joint search finds nothing."""
        fastest = min(self.seconds, key=self.seconds.__getitem__)
        return SlipstreamError(
            "schedule=auto: no cut, slices and order were found together that fit, but "
            f"{fastest.describe()} does. Allow schedule={fastest.schedule_name} and slicing={fastest.slicing} too."
        )

    @property
    def _is_limited(self) -> bool:
        """True once the limits on simulations, and on schedules made in vain, are reached."""
        most = self.space.options.num_simulated
        scheduled_enough = self.num_scheduled >= _MOST_SCHEDULED_EACH * most or self.num_units >= _MOST_UNITS
        return self.num_simulated >= most or scheduled_enough

    def _worst_reported(self) -> float:
        """Returns the seconds that a configuration must beat to be reported."""
        wanted = self.space.options.num_best
        best = nsmallest(wanted, self.seconds.values())
        return best[-1] if len(best) == wanted else inf

    def simulate(self, plan: Plan) -> float | None:
        """Returns the step's seconds; None where it doesn't fit, or where another one fits that is never slower."""
        if plan in self.seconds:
            return self.seconds[plan]
        if plan in self.too_large or any(other in self.seconds for other in _cheaper(plan)):
            return None
        if not self.space.may_fit(plan) or not self.space.fits(candidate := self._schedule(plan)):
            self.too_large.add(plan)
            return None
        self.num_simulated += 1
        self.report("simulations", self.num_simulated, self.space.options.num_simulated)
        seconds = self.seconds[plan] = candidate.seconds
        if candidate.num_extrapolated:
            self.extrapolated.add(plan)
        return seconds

    def _schedule(self, plan: Plan) -> Evaluation:
        self.num_scheduled += 1
        candidate = self.space.evaluate_in_part(plan)
        schedule = candidate.schedule
        self.num_units += schedule.num_stages * schedule.num_slices * schedule.num_microbatches
        return candidate

    def predictions(self) -> Iterator[Prediction]:
        """Yields the simulated ones, best first."""
        yield from map(self.prediction, sorted(self._allowed(), key=self.seconds.__getitem__))

    def _allowed(self) -> list[Plan]:
        """Returns the simulated ones whose schedule and head may be chosen: joint searches start from any."""
        allows = self.space.options.allows
        return [c for c in self.seconds if allows("schedule", c.schedule_name) and allows("vocabulary", c.vocabulary)]

    def prediction(self, plan: Plan) -> Prediction:
        """Returns the prediction of a simulated configuration."""
        if plan not in self.known:
            is_part = plan in self.extrapolated
            make = self.space.evaluate_in_part if is_part else self.space.evaluate
            self.known[plan] = self.space.predict(make(plan))
        return self.known[plan]

    def gap(self, best: Prediction) -> float:
        """Returns by which share of the best step the most promising configuration left could be faster, at most."""
        postponed = sorted(self.postponed, key=lambda entry: entry[2])
        orders = ((entry[2:] for entry in postponed), self.frontier.starting(self.reached))
        left = (
            next((bound for bound, c in order if c not in self.seconds and c not in self.too_large), inf)
            for order in orders
        )
        return max(0.0, 1 - min(left) / best.step_seconds)

    def alternatives(self, best: Prediction) -> Iterator[Alternative]:
        """Yields for each choice the best configuration with another value of it; other choices may differ as well."""
        for choice in CHOICES:
            if plan := self._best_with_other(choice, best.plan.choice(choice)):
                yield Alternative(choice, self.prediction(plan))

    def _best_with_other(self, choice: str, value: object) -> Plan | None:
        """Returns the best simulated one; a few more are simulated where there is none yet."""
        if not any(c.choice(choice) != value for c in self.seconds):
            others = (c for c in self.frontier.others(choice, value) if c not in self.too_large)
            until = self.num_scheduled + _MOST_SCHEDULED
            for plan in islice(others, _MOST_TRIED):
                if self.simulate(plan) is not None or self.num_scheduled >= until:
                    break
        found = [c for c in self.seconds if c.choice(choice) != value]
        return min(found, key=self.seconds.__getitem__, default=None)


_Kind = tuple[Degrees, int, int, int, str, int, bool]


def _kind(plan: Plan) -> _Kind:
    """Returns what decides how close a bound is: the mesh, the order, and whether copies to the host take time too."""
    degrees, of_mesh = plan.degrees, (plan.pipeline_parallel, plan.data_parallel, plan.microbatch_size)
    return degrees, *of_mesh, plan.schedule_name, plan.stages_per_rank, plan.offload > 0


def _nothing_divides(space: PlanSpace) -> SlipstreamError:
    """Returns the error that names the degree that is impossible by itself, or beside the others that are given."""
    source, options, sequences = space.source, space.options, plural(space.global_batch, "sequence")
    devices, layers = plural(source.num_devices, "device"), plural(len(source.kinds), "layer")
    rules = {
        "tensor_parallel": f"must divide the {devices} and every layer's heads",
        "context_parallel": f"must divide the {devices} and leave each rank enough tokens of {space.seq_len}",
        "expert_parallel": "must divide every layer's experts, and data_parallel times context_parallel",
        "pipeline_parallel": f"must divide the {devices} and be at most the {layers}",
        "data_parallel": f"must divide the {devices} and the batch of {sequences}",
    }
    names = [choice for choice in CHOICES if getattr(options, choice) is not None]
    given = {name: getattr(options, name) for name in names}
    texts = {name: f"{name}={','.join(map(str, values))}" for name, values in given.items()}

    def meshes(allowed: dict[str, Any]) -> Iterator[Plan]:
        # Ranks that share layers may be on several nodes where that was asked for.
        degrees: dict[str, Any] = dict.fromkeys(rules) | {"tensor_parallel": source.tensor_parallel_degrees}
        return PlanSpace(source, space.seq_len, space.global_batch, replace(options, **degrees | allowed)).meshes()

    alone = [name for name in rules if name in given and next(meshes({name: given[name]}), None) is None]
    for name in alone or (name for name in rules if name in given):
        others = [other for other in rules if other in given and other != name and not alone]
        possible = {getattr(mesh, name) for mesh in meshes({other: given[other] for other in others})}
        if allowed := sorted(possible - {*given[name]}):
            beside = " beside " + " and ".join(map(texts.__getitem__, others)) if others else ""
            return SlipstreamError(
                f"{texts[name]} fits nothing{beside}: it {rules[name]}. Choose from "
                f"{', '.join(map(str, allowed))}, or leave it out."
            )
    return SlipstreamError(
        f"no configuration fits these numbers: {devices}, {layers}, a global batch of {sequences}. Change the batch or "
        f"the number of nodes{', or allow more than ' + ', '.join(texts.values()) if texts else ''}."
    )


_SMALLEST = 8  # configurations whose memory is counted
_MOST_NODES = 64  # how many times the nodes may grow


def explain_misfit(space: PlanSpace, num_meshes: int) -> SlipstreamError:
    """Returns the error for a search in which every configuration is too large."""
    candidates = [space.evaluate(plan) for plan in _smallest(space)]
    smallest = min(candidates, key=lambda candidate: max(candidate.peaks()))
    peaks, away, host = smallest.peaks(), smallest.host_peak(), space.source.host
    peak, room, has = max(peaks), space.memory, f"{bytes_text(space.memory)} that may be used of a device"
    where = f"on rank {peaks.index(peak)}"
    if peak <= room and host is not None:
        peak, room, has = away, host.capacity, f"{bytes_text(host.capacity)} that a host has for each device"
        where = "on a host"
    larger = f"a device of which {bytes_text(_in_digits(max(peaks)))} may be used"
    if away and host is not None and away > host.capacity:
        larger += f", with {bytes_text(_in_digits(away))} on its host"
    return SlipstreamError(
        f"nothing fits: the smallest configuration on {plural(num_meshes, 'mesh')} needs {bytes_text(peak)} {where}, "
        f"{bytes_text(peak - room)} more than the {has} ({smallest.plan.describe()}). The cheapest "
        f"change that would fit: {next(_changes(space), larger)}."
    )


def _in_digits(num_bytes: float) -> float:
    """Returns a size that is no less, with the digits that are shown."""
    power = 10.0 ** (len(f"{num_bytes:.0f}") - 3)
    return ceil(num_bytes / power) * power


def _smallest(space: PlanSpace) -> list[Plan]:
    """Returns the configurations of least memory by their bounds, with all ways to save memory that are allowed."""
    slices = space.longest >= space.seq_len and space.options.allows("slicing", "equal-time")
    saving: dict[str, Any] = {
        "recompute": space.source.recomputations[-1:],
        "offload": (0.0, 1.0) if space.source.host else None,
        "microbatch_size": (min(space.source.microbatch_sizes or (1,)),),
        "num_slices": (1, 8) if slices else None,
        "slicing": ("equal-time",),
    }
    unsaid = {choice: values for choice, values in saving.items() if getattr(space.options, choice) is None}
    saving_space = PlanSpace(space.source, space.seq_len, space.global_batch, replace(space.options, **unsaid))
    smallest: list[tuple[float, Plan]] = []
    for mesh in sorted(saving_space.meshes(), key=saving_space.mean_state):
        if len(smallest) == _SMALLEST and smallest[-1][0] <= saving_space.mean_state(mesh):
            break
        more = ((size, c) for _, size, c in saving_space.of_mesh(mesh))
        smallest = nsmallest(_SMALLEST, [*smallest, *more], key=itemgetter(0))
    return [plan for _, plan in smallest]


def _changes(space: PlanSpace) -> Iterator[str]:
    """Yields changes that would fit, the cheapest first: more choices, more memory, more nodes, fewer tokens."""
    options, source = space.options, space.source
    for choice in CHOICES:
        anything: dict[str, Any] = {choice: None}
        if getattr(options, choice) is not None and (best := _fitting(replace(options, **anything), space)):
            yield f"allow {choice}={best.choice(choice)}"
    if space.memory < source.memory and _fitting(replace(options, memory_limit=source.memory), space):
        yield f"allow all {bytes_text(source.memory)} of a device's memory"
    for more in source.larger(_MOST_NODES):
        best = _fitting(options, PlanSpace(more, space.seq_len, space.global_batch, options))
        if best is not None:
            yield f"{plural(more.num_devices, 'device')} instead of {source.num_devices} ({best.describe()})"
    length = space.seq_len // 2
    while length >= 256:
        if _fitting(options, PlanSpace(source, length, space.global_batch, options)):
            yield f"sequences of {length} tokens"
        length //= 2


def _fitting(options: PlanOptions, space: PlanSpace) -> Plan | None:
    """Returns one of the smallest configurations that fits, if any."""
    other = PlanSpace(space.source, space.seq_len, space.global_batch, options)
    fitting = (c for c in _smallest(other) if other.may_fit(c) and other.fits(other.evaluate_in_part(c)))
    return next(fitting, None)


_EFFORT = 7e6  # of each joint search: a few seconds
_MOST_MESHES = 2
_MOST_SLICES = 32
_MOST_JOINT_UNITS = 4096  # slices of a rank's microbatches, in one order


def is_wanted(options: PlanOptions) -> bool:
    """Returns whether the options leave order, cut and slices to a joint search."""
    choices = (options.stages_per_rank, options.num_slices)
    free = options.allows("schedule", AUTO) and options.allows("slicing", AUTO)
    return free and all(values is None for values in choices)


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
    num_microbatches, costs = space.shape(start).num_microbatches, space.costs(start.degrees, start.microbatch_size)
    granularity = _granularity(space)
    return JointProblem(
        costs=Tabulated(costs, space.seq_len, granularity) if isinstance(costs, CountedCosts) else costs,
        state=space.source.state,
        replicas=start.data_parallel,
        optimizer_shards=start.optimizer_shards,
        seq_len=space.seq_len,
        num_ranks=start.pipeline_parallel,
        num_microbatches=num_microbatches,
        granularity=granularity,
        most_slices=max(1, min(_MOST_SLICES, _MOST_JOINT_UNITS // num_microbatches)),
        # a slice is whole on the device while it runs, so where memory is scarce none is longer than those that fit
        longest_slice=max(space.slices(start)) if _saves(start) else space.longest,
        split=not _saves(start),  # the factors of weight gradients stay on the device until then
        effort=_EFFORT,
        most_seconds=best - float(space.tails(start).sum(axis=0).min()),
        tied=isinstance(costs, CountedCosts) and costs.model.tied,
    )


def _find(space: PlanSpace, start: Plan, problem: JointProblem, report: ProgressReport) -> JointPlan | None:
    """Returns the joint plan; None where nothing fits or is as fast."""

    def show(share: float) -> None:
        report("cuts and orders, percent", round(100 * share), 100)

    try:
        return find_vocabulary_plan(problem, _vocabulary(space, start), show)
    except SlipstreamError:
        return None


def _vocabulary(space: PlanSpace, start: Plan) -> Vocabulary:
    """Returns how a plan may have the head: spread where training does it, for ranks that share nothing else."""
    allows, rows = space.options.allows, space.costs(start.degrees, start.microbatch_size).vocab_size
    can_be = "vocabulary" not in space.source.refusals and start.degrees == Degrees() and start.shard != "parameters"
    if not can_be or not allows("vocabulary", "spread") or rows < start.pipeline_parallel:
        return "whole"
    return "auto" if allows("vocabulary", "whole") else "spread"


def _most_bytes(
    space: PlanSpace,
    start: Plan,
    found: Plan,
) -> list[float]:
    """Returns the most bytes that each rank holds."""
    return space.evaluate(_closed(start, found, found.recompute, start.offload)).peaks()


def _split(plan: JointPlan) -> JointPlan:
    """Returns the plan, and those it was chosen from, with backwards split as in named schedules."""
    rejected = tuple(_split(rejected) for rejected in plan.rejected)
    return replace(plan.in_order(split_backwards(plan.schedule), plan.seconds), rejected=rejected)


def _granularity(space: PlanSpace) -> int:
    """Returns the fewest tokens of which slices may be multiples, so that the last one isn't too short either."""
    shortest, length = space.choices.shortest, space.seq_len
    least = max(shortest, space.choices.granularity)
    return next(step for step in range(least, length + 1) if length % step == 0 or length % step >= shortest)


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


# Kinds of recomputation by how little they hold, each with those that are never slower.
_SAVINGS = {
    "none": ("none",),
    "selective": ("none", "selective"),
    "full": ("none", "selective", "full"),
    "stage": ("none", "selective", "stage"),
    "stage+full": ("none", "selective", "full", "stage", "stage+full"),
}


def _cheaper(plan: Plan) -> Iterator[Plan]:
    """Yields the configuration with less saving of memory at the cost of time."""
    shards = {plan.shard, "optimizer"}
    for recompute, offload, shard in product(_SAVINGS[plan.recompute], {0.0, plan.offload}, shards):
        other = replace(plan, recompute=recompute, offload=offload, shard=shard)
        if other != plan:
            yield other
