"""The search for a plan: of all configurations that divide and fit, the one whose simulated step is shortest, or one
that is simpler and takes about as long."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from heapq import nsmallest
from itertools import islice
from math import inf, prod

from slipstream.cost import WAYS
from slipstream.errors import SlipstreamError
from slipstream.planner.best_first import BestFirst
from slipstream.planner.plan import CHOICES, Plan
from slipstream.planner.plan_report import Alternative, PlanReport, Prediction
from slipstream.planner.progress import ProgressReport
from slipstream.planner.search.cluster_problem import ClusterProblem
from slipstream.planner.search.evaluate import Evaluation
from slipstream.planner.search.frontier import Frontier
from slipstream.planner.search.joint_plans import JointCandidates, is_wanted, promising
from slipstream.planner.search.misfit import (
    NOTHING_SPREAD,
    explain_misfit,
    explain_state,
    least_state,
    nothing_divides,
    nothing_joint,
    space_of,
)
from slipstream.planner.search.plan_space import PlanSpace
from slipstream.planner.search.savings import copies_of, never_slower
from slipstream.planner.search.schedule_shape import working_memory
from slipstream.planner.search.simple_first import ABOUT_AS_LONG, may_come_first, simpler_text, simplest
from slipstream.planner.search.smallest import MemorySearch
from slipstream.schedule import Schedule
from slipstream.simulator import MemoryKind, simulate
from slipstream.timeline import Timeline

_MORE_SIMULATED = 30  # configurations with the context on the host, where others fit
_MUCH = 0.05  # share of a rank's memory
_MANY = 20  # configurations that are too large, before it is asked whether any fits
_MOST_SCHEDULED_EACH = 2  # configurations whose schedule is made, for each that may be simulated
_MOST_UNITS = 1_000_000  # slices of stages in all schedules that are made
_MOST_WHOLE = 200_000  # slices of stages of a long step that is simulated whole, as it is the shortest
# configurations with another choice that are tested quickly, and whose schedule is made
_MOST_TRIED, _MOST_SCHEDULED = 150, 8


@working_memory()
def search_meshes(problem: ClusterProblem, progress: ProgressReport) -> PlanReport:
    """Returns the best plans for a training on a cluster.

    Lower bounds are computed for every mesh, and for the configurations of those that may have the next best. The most
    promising ones are simulated until no other can be faster, or `options.num_simulated` are simulated; the report's
    `gap` bounds the seconds that it may have missed.

    Raises:
        SlipstreamError: where no degrees divide the devices and the batch, or nothing fits the memory: by how much, on
            which rank, and the cheapest change with which something would fit.
    """
    began = time.perf_counter()
    source, options = problem.source, problem.options
    space = space_of(problem)
    if space.memory < least_state(space) < inf:
        raise explain_state(problem, space)
    places = space.contexts
    run = _PlanSearch(space.with_context(places[0]), progress, options.num_simulated)
    best, alternatives = run.settle_with_joint()
    for place in places[1:]:
        if not best or _holds_much_context(best[0]):
            run.go_on(space.with_context(place), _MORE_SIMULATED if best else options.num_simulated)
            best, alternatives = run.settle_with_joint()
    if not best and options.values("vocabulary") == ("spread",):
        raise SlipstreamError(NOTHING_SPREAD)
    if not best and run.seconds:
        raise nothing_joint(min(run.seconds, key=run.seconds.__getitem__))
    if not best:
        memory = MemorySearch(space)
        if (fitting := memory.fitting()) is not None:
            run.simulate(fitting.plan)
            best, alternatives = run.settle()
        elif not memory.has_any:
            raise nothing_divides(space)
    if not best:
        raise explain_misfit(problem, space, memory)

    def simulated() -> tuple[Schedule, Timeline]:
        candidate = run.space.evaluate(best[0].plan)
        return candidate.schedule, simulate(candidate.schedule, candidate.cost, candidate.table)

    shortest = run.shortest()
    return PlanReport(
        model=source.name,
        cluster=source.hardware,
        num_devices=source.num_devices,
        dtype=source.dtype,
        seq_len=problem.seq_len,
        global_batch=problem.global_batch,
        predictions=tuple(best),
        alternatives=tuple(alternatives),
        simulated=simulated,
        num_meshes=run.num_meshes,
        num_bounded_meshes=max(frontier.num_bounded_meshes for frontier in run.frontiers),
        num_configurations=sum(frontier.num_bounded for frontier in run.frontiers),
        num_too_large=sum(frontier.num_too_large for frontier in run.frontiers) + len(run.too_large),
        num_simulated=run.num_simulated,
        gap=run.gap(shortest),
        seconds=time.perf_counter() - began,
        notes=source.trained() + source.notes(),
        refusals={
            way.named.choice: source.refusals[way.named.choice]
            for way in WAYS.values()
            if way.named.choice in source.refusals and (source.num_experts or not way.is_of_experts)
        },
        trained=source.trained(),
        sequence_parallel=source.sequence_parallel and best[0].plan.tensor_parallel > 1,
        fused=source.fused,
        simpler=simpler_text(best[0], shortest),
    )


def _holds_much_context(best: Prediction) -> bool:
    """Returns whether keys, values and their gradients are a part of a rank's memory that would be worth moving."""
    kinds = MemoryKind.CONTEXT, MemoryKind.CONTEXT_GRADIENTS
    return any(sum(held.get(kind, 0.0) for kind in kinds) > _MUCH * sum(held.values()) for held in best.memory)


@dataclass
class _PlanSearch:
    space: PlanSpace
    report: ProgressReport
    most_simulated: int
    seconds: dict[Plan, float] = field(default_factory=dict)  # simulated steps of those that fit
    extrapolated: set[Plan] = field(default_factory=set)  # those of them that weren't simulated whole
    too_large: set[Plan] = field(default_factory=set)
    num_simulated: int = 0
    num_scheduled: int = 0  # configurations whose schedule was made
    num_units: int = 0  # slices of stages in these schedules
    reached: int = 0  # how many of the frontier have been dealt with, or postponed
    over_bound: dict[_Kind, float] = field(default_factory=dict)  # least step of each kind, over its bound
    postponed: BestFirst[tuple[float, Plan]] = field(default_factory=BestFirst)  # with bounds, by what they may take
    known: dict[Plan, Prediction] = field(default_factory=dict)
    least_left: float = inf  # the least bound of what was left in earlier spaces
    fits_none: bool | None = None  # whether it is known that none of this space fits; None: not asked yet

    def __post_init__(self) -> None:
        self.frontiers = [Frontier(self.space, self.report)]

    @property
    def frontier(self) -> Frontier:
        """The configurations that are searched now."""
        return self.frontiers[-1]

    @property
    def num_meshes(self) -> int:
        """All meshes that divide."""
        return self.frontier.num_meshes

    def go_on(self, space: PlanSpace, most: int) -> None:
        """Goes on in another space, with up to `most` further simulations; what was found before stays."""
        space.found |= self.space.found
        self.least_left = self._least_left()
        self.space = space
        self.fits_none = None
        self.frontiers.append(Frontier(space, self.report))
        self.most_simulated = self.num_simulated + most
        self.num_scheduled = self.num_units = self.reached = 0
        self.postponed = BestFirst()
        self.over_bound = {}

    def settle_with_joint(self) -> tuple[list[Prediction], list[Alternative]]:
        """Returns what `settle` does, with the joint search's plans in this space."""
        self.settle()
        self.search_jointly()
        return self.settle()

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
        """Simulates the shortest step whole, and that of the plan that comes first; False where that was done, or takes
        too long."""
        allowed = self._allowed()
        return bool(allowed) and any(
            map(self._simulate_whole, (min(allowed, key=allowed.__getitem__), self._first(allowed)))
        )

    def _simulate_whole(self, plan: Plan) -> bool:
        if plan not in self.extrapolated or prod(self.space.shape(plan).counts) > _MOST_WHOLE:
            return False
        self.extrapolated.remove(plan)
        self.known.pop(plan, None)
        del self.seconds[plan]
        if self.space.fits(candidate := self.space.evaluate(plan)):
            self.seconds[plan] = candidate.seconds
        else:
            self.too_large.add(plan)
        return True

    def simulate_promising(self) -> None:
        """Simulates in the order of the bounds until the next configuration can't be among the best, nor come first as
        a simpler one.

        Those whose like took so much longer than their bounds that they would not be reported come last.
        """
        for bound, plan in self.frontier.starting(self.reached):
            if (self._is_limited and self.seconds) or bound >= max(self._worst_reported(), self._about_as_long()):
                break
            if len(self.too_large) >= _MANY and not self.seconds and self._is_known_to_fit_none():
                break
            self.reached += 1
            expected = bound * self.over_bound.get(_kind(plan), 1.0)
            if expected < self._longest_wanted(plan):
                self._simulate_bounded(bound, plan)
            else:
                self.postponed.add(expected, (bound, plan))
        while not self._is_limited and (next_one := self.postponed.next_below(inf)):
            _, (bound, plan) = next_one
            if bound < self._longest_wanted(plan):
                self._simulate_bounded(bound, plan)

    def _is_known_to_fit_none(self) -> bool:
        """Returns whether it is known that no configuration of this space fits; it is searched for once."""
        if self.fits_none is None:
            memory = MemorySearch(self.space)
            self.fits_none = memory.fitting() is None and memory.is_complete
        return self.fits_none

    def _simulate_bounded(self, bound: float, plan: Plan) -> None:
        if (seconds := self.simulate(plan)) is not None and bound > 0:
            kind = _kind(plan)
            self.over_bound[kind] = min(seconds / bound, self.over_bound.get(kind, inf))

    def search_jointly(self) -> None:
        """Adds the joint search's plans on the best meshes, where they fit."""
        if not is_wanted(self.space.options):
            return
        allows = self.space.options.allows
        here = {plan: seconds for plan, seconds in self.seconds.items() if allows("context", plan.context)}
        for start in promising(here):
            best = min(self._allowed().values(), default=inf)
            # An order that was found regardless of copies to the host is hardly ever the best beside them.
            if start.offload and best < inf:
                continue
            candidates = JointCandidates(self.space, start, best, self.report)
            if not self._adds_faster(candidates.without_limit(), best):
                for plans in candidates.within_limit():
                    self._adds_faster(plans, best)

    def _adds_faster(self, plans: Iterator[Plan], best: float) -> bool:
        """Adds a joint search's plans that fit, up to one that takes less than `best`; returns whether there is one."""
        for plan in plans:
            candidate = self.space.evaluate(plan)
            if self.space.fits(candidate):
                self.num_simulated += 1
                self._add_found(plan, candidate.seconds)
                if candidate.seconds < best:
                    return True
        return False

    def _add_found(self, plan: Plan, seconds: float) -> None:
        """Adds a joint search's plan; of several with the same choices the one with the shortest step is kept."""
        alike = [other for other in self.seconds if all(other.choice(name) == plan.choice(name) for name in CHOICES)]
        if all(seconds < self.seconds[other] for other in alike):
            for other in alike:
                del self.seconds[other]
            self.seconds[plan] = seconds

    @property
    def _is_limited(self) -> bool:
        """True once the limits on simulations, and on schedules made in vain, are reached."""
        most = self.most_simulated
        scheduled_enough = self.num_scheduled >= _MOST_SCHEDULED_EACH * most or self.num_units >= _MOST_UNITS
        return self.num_simulated >= most or scheduled_enough

    def _worst_reported(self) -> float:
        """Returns the seconds that a configuration must beat to be reported."""
        wanted = self.space.options.num_best
        best = nsmallest(wanted, self.seconds.values())
        return best[-1] if len(best) == wanted else inf

    def _about_as_long(self) -> float:
        """Returns the seconds within which a simpler configuration comes first."""
        return (1 + ABOUT_AS_LONG) * min(self.seconds.values(), default=inf)

    def _longest_wanted(self, plan: Plan) -> float:
        """Returns the seconds that a configuration must beat to be reported, as one of the best or as a simpler one."""
        worst, simple = self._worst_reported(), self._about_as_long()
        return simple if worst < simple and may_come_first(plan, self.seconds) else worst

    def simulate(self, plan: Plan) -> float | None:
        """Returns the step's seconds; None where it doesn't fit, or where another one fits that is never slower."""
        if plan in self.seconds:
            return self.seconds[plan]
        if plan in self.too_large or any(other in self.seconds for other in never_slower(plan)):
            return None
        if not self.space.may_fit(plan) or not self.space.fits(candidate := self._schedule(plan)):
            self.too_large.add(plan)
            return None
        self.num_simulated += 1
        self.report("simulations", self.num_simulated, self.most_simulated)
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
        """Yields the simulated ones: the simplest of those that take about as long as the shortest, then the others,
        the shorter the earlier."""
        if allowed := self._allowed():
            first = self._first(allowed)
            others = (plan for plan in sorted(allowed, key=allowed.__getitem__) if plan is not first)
            yield from map(self.prediction, (first, *others))

    def _first(self, allowed: Mapping[Plan, float]) -> Plan:
        return simplest(allowed, lambda plan: self.prediction(plan).peak_memory)

    def shortest(self) -> Prediction:
        """Returns the simulated one with the shortest step."""
        allowed = self._allowed()
        return self.prediction(min(allowed, key=allowed.__getitem__))

    def _allowed(self) -> dict[Plan, float]:
        """Returns the steps of the simulated ones whose schedule and head may be chosen: joint searches start from
        any."""
        allows = self.space.options.allows
        return {
            plan: seconds
            for plan, seconds in self.seconds.items()
            if allows("schedule", plan.schedule_name) and allows("vocabulary", plan.vocabulary)
        }

    def prediction(self, plan: Plan) -> Prediction:
        """Returns the prediction of a simulated configuration."""
        if plan not in self.known:
            is_part = plan in self.extrapolated
            make = self.space.evaluate_in_part if is_part else self.space.evaluate
            self.known[plan] = self.space.predict(make(plan))
        return self.known[plan]

    def gap(self, shortest: Prediction) -> float:
        """Returns by which share of the shortest step the most promising configuration left could be faster, at
        most."""
        return max(0.0, 1 - self._least_left() / shortest.step_seconds)

    def _least_left(self) -> float:
        """Returns the least bound of the configurations that weren't tried."""
        postponed = sorted(self.postponed, key=lambda entry: entry[0])
        orders = (iter(postponed), self.frontier.starting(self.reached))
        left = (
            next((bound for bound, c in order if c not in self.seconds and c not in self.too_large), inf)
            for order in orders
        )
        return min(self.least_left, *left)

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


_Kind = tuple[object, ...]


def _kind(plan: Plan) -> _Kind:
    """Returns what decides how close a bound is: the mesh, the order, and whether copies to the host take time too."""
    of_mesh = plan.degrees, plan.pipeline_parallel, plan.data_parallel, plan.microbatch_size
    return *of_mesh, plan.schedule_name, plan.stages_per_rank, copies_of(plan)
