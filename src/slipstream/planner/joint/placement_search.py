"""The joint search with one placement: local search over the cut and the slices."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby
from math import inf
from operator import attrgetter
from typing import Any

import numpy as np

from slipstream.array_types import Floats, Ints
from slipstream.cost import OPS, Work, partition_of, unit_bounds
from slipstream.errors import SlipstreamError
from slipstream.planner.joint.candidate import Candidate, moved_cuts, steepest_descent
from slipstream.planner.joint.joint_plan import JointPlan
from slipstream.planner.joint.problem import JointProblem
from slipstream.planner.joint.sliced_units import SlicedUnits
from slipstream.planner.order.list_scheduling import PriorityRule
from slipstream.planner.order.makespan_bounds import rank_bounds
from slipstream.planner.order.order_search import find_order, hold_less, step_lower_bound
from slipstream.planner.order.ordering_problem import OrderingProblem, StepActions, UnitTimes
from slipstream.planner.order.quick_orders import GIVEN, QuickOrders, rules_of
from slipstream.planner.plan import Plan
from slipstream.planner.room import Room, first_within
from slipstream.planner.slicing import equal_time_slices
from slipstream.planner.slicing.equal_stage_slicing import best_slicing, time_table
from slipstream.schedule import Op, Schedule
from slipstream.schedule.action_arrays import ActionArrays
from slipstream.simulator import TableCost
from slipstream.simulator.simulation import end_times


class PlanMemory:
    """The memory of the candidates of one placement, in bytes of each rank.

    Orders are searched for within the room for activations (`Room`), which is known from the account of the order with
    the least memory.
    """

    def __init__(self, problem: JointProblem, limit: float) -> None:
        """`problem` gives the placement and the recomputation."""
        self._problem = problem
        self._limit = limit
        self._rooms: dict[int, Room] = {}  # room by number of slices, for candidates without states

    def room(self, candidate: Candidate, units: SlicedUnits) -> Floats:
        """Returns the bytes for activations."""
        count = len(candidate.slices)
        held = self._held(candidate, units)
        if count not in self._rooms:
            most = self._peaks(candidate, self.least(candidate, units))
            besides = np.zeros(len(held)) if most is None else most - self.least_bytes(candidate, units)
            self._rooms[count] = Room(self._limit, besides)
        room: Floats = self._limit - held - self._rooms[count].besides
        return room

    def fits(self, candidate: Candidate, schedule: Schedule) -> bool:
        """Returns whether the order keeps to the limit; where it doesn't, there is less room from now on."""
        most = self._peaks(candidate, schedule)
        return most is None or self._rooms[len(candidate.slices)].has_space(most)

    def least(self, candidate: Candidate, units: SlicedUnits) -> Schedule:
        """Returns the given order, or the one with the least memory: one microbatch after the other, with whole
        backwards."""
        order = self._problem.order(self._problem.given.placement, len(candidate.slices))
        if order is None:
            order = StepActions(
                self._problem.given.placement, (len(candidate.slices),) * self._problem.num_microbatches
            ).whole
        return units.without_frozen_backwards(order, candidate.bounds)

    def least_bytes(self, candidate: Candidate, units: SlicedUnits) -> Floats:
        """Returns the bytes of each rank in that order, without those that only the account counts."""
        sizes = np.bincount(self._problem.given.placement, units.stage_activations(candidate.bounds).sum(axis=1))
        total: Floats = self._held(candidate, units) + sizes
        return total

    def most(self, candidate: Candidate, units: SlicedUnits) -> Floats:
        """Returns the bytes of each rank in that order."""
        peaks = self._peaks(candidate, self.least(candidate, units))
        return self.least_bytes(candidate, units) if peaks is None else peaks

    def _held(self, candidate: Candidate, units: SlicedUnits) -> Floats:
        """The bytes of weights, gradients, optimizer state, and of a stage's recomputation."""
        state = np.bincount(self._problem.given.placement, np.diff(self._problem.state_sums[list(candidate.bounds)]))
        again = np.zeros(len(state))
        np.maximum.at(again, list(self._problem.given.placement), units.computed_again(candidate.bounds))
        held: Floats = state + again
        return held

    def _peaks(self, candidate: Candidate, schedule: Schedule) -> Floats | None:
        if self._problem.account is None:
            return None
        return np.array(self._problem.account(_plan_of(self._problem, candidate, schedule)), float)


def _plan_of(problem: JointProblem, candidate: Candidate, schedule: Schedule) -> Plan:
    partition = partition_of(candidate.bounds, problem.costs.units_per_layer)
    return Plan(recompute=problem.given.recompute).closed(
        schedule=schedule, partition=partition, slices=candidate.slices
    )


class QuickOrder:
    """The orders of one placement with one number of microbatches and slices, whatever the actions cost."""

    def __init__(
        self,
        placement: tuple[int, ...],
        num_microbatches: int,
        num_slices: int,
        split: bool,
        given: Schedule | None = None,
    ) -> None:
        """`given` is the only order; None: list scheduling has many."""
        self._actions = StepActions(placement, (num_slices,) * num_microbatches)
        self._split = split
        self._given = given
        lags = (0.0, 0.5, 1.0, 2.0) if num_microbatches > 1 else (0.0,)
        names = [*self._actions.splittings(split)]
        searched = rules_of(names, lags, (-1.0, 0.0, 0.25, 0.5, 1.0, 2.0), (0.0, 0.5, 1.0))
        self.rules = searched if given is None else (GIVEN,)

    def seconds(
        self, units: SlicedUnits, bounds: tuple[int, ...], room: Floats | None, rules: tuple[PriorityRule, ...] = ()
    ) -> dict[PriorityRule, float]:
        """Returns the seconds of a step by each of the rules, by default all; infinite where nothing fits.

        Args:
            units: the costs of the slices.
            bounds: the first unit of each stage, and the number of units.
            room: bytes that each rank has for activations. None: any number.
            rules: the rules to try.
        """
        held = units.stage_activations(bounds)
        if room is not None and (np.bincount(self._actions.placement, held.sum(axis=1)) > room).any():
            return dict.fromkeys(rules or self.rules, np.inf)
        times = {op: units.stage_seconds(op, bounds) for op in OPS}
        number = self._actions.num_microbatches
        seconds = {op: np.tile(unit_times, number) for op, unit_times in times.items()}
        travels = np.tile(units.message_seconds, number)
        # Messages don't wait for each other.
        links = travels, 0 * travels
        sends_back = units.costs.trains_below(bounds[:-1])
        costs = UnitTimes.of_slices(seconds, links, np.tile(held, number), sends_back)
        period = float((times[Op.F] + times[Op.B]).sum(axis=1).max())
        orders = QuickOrders(self._actions, costs, room, self._split, self._given, period=period)
        found = {rule: orders.by(rule) for rule in rules or self.rules}
        return {rule: inf if order is None else order.seconds for rule, order in found.items()}


_COUNTS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32)  # numbers of slices to start from
_SHARES = (0.0, 0.25, 0.5)  # attention's share of the time, for the first slices
# Improved by local search; more where the cut is given, as there are fewer changes.
_STARTS, _STARTS_OF_A_CUT = 5, 20
# Of the search's effort, for the best order of a candidate that is left at the end, and for one that holds less.
_ORDER_SHARE, _LESS_SHARE = 0.1, 0.03
_RULES = 6  # rules of list scheduling, after the first candidate of each number of slices
# Times the seconds that matter: a longer step in a quick order can't be made as short. Within a memory limit, quick
# orders are farther from the best ones.
_WITHIN_REACH, _WITHIN_REACH_OF_LIMITED = 1.05, 1.1
_TRIES = 3  # orders to try within the memory limit, with less and less room
_MOST_SLICED = 32  # slicings with costs kept, up to a megabyte each
_EXACT_CUTS = 256  # places to cut for the dynamic program


class PlacementSearch:
    """The search with one placement and one recomputation, which the problem gives."""

    def __init__(self, problem: JointProblem, on_effort: Callable[[float], None]) -> None:
        self.problem = problem
        self._on_effort = on_effort
        self.ranks: Ints = np.array(self.placement, np.int64)
        self.seconds = inf  # simulated seconds of the best candidate
        self.best: Candidate | None = None
        self.exact: Candidate | None = None  # the candidate with the dynamic program's slices
        self._effort = 0.0
        self.known: dict[Candidate, float] = {}  # seconds in quick orders
        self._sliced: dict[tuple[int, ...], SlicedUnits] = {}
        self._quick: dict[int, QuickOrder] = {}
        self._rules: dict[int, tuple[PriorityRule, ...]] = {}  # the best, by the number of slices
        limit = problem.memory_limit
        self.memory = None if limit is None else PlanMemory(problem, limit)

    @property
    def placement(self) -> tuple[int, ...]:
        """The rank of each stage."""
        return self.problem.given.placement

    def run(self, limit: float, effort: float) -> float:
        """Improves the starts of the least bounds, and returns the effort that is left."""
        self._effort = effort
        if not (starts := [*dict.fromkeys(self.starts())]):
            return effort
        first: list[Candidate] = []
        if self._may_have_exact_slices:
            self.exact = self._exact_slices(starts[0].bounds)
            first.append(self.exact)
        starts.sort(key=self.rough_bound)
        if min(map(self.rough_bound, (*first, starts[0]))) >= self.problem.most_seconds:
            return effort
        for candidate in starts:
            is_wanted = self.rough_bound(candidate) < min(self.seconds, limit) and self._effort > effort / 2
            if is_wanted or not first:
                first.append(candidate)
            self._simulated(first[-1])
        most = _STARTS if self.problem.given.is_open("partition") else _STARTS_OF_A_CUT
        for candidate in sorted(first, key=self._simulated)[:most]:
            if self._is_near(self._simulated(candidate)):
                self._descend(candidate)
        return max(0.0, self._effort)

    @property
    def _may_have_exact_slices(self) -> bool:
        """Whether neither slices nor their number are given."""
        return self.problem.given.is_open("slices") and not isinstance(self.problem.given.schedule, Schedule)

    @property
    def is_promising(self) -> bool:
        """Whether something fits that may be of interest in a better order."""
        return self.best is not None and self._is_near(self.seconds)

    def _is_near(self, seconds: float) -> bool:
        reach = _WITHIN_REACH if self.memory is None else _WITHIN_REACH_OF_LIMITED
        return seconds < reach * self.problem.most_seconds

    def plan(self, candidate: Candidate) -> JointPlan | None:
        """Returns the candidate with its best order; None where none was found that keeps to the memory limit."""
        schedule = self._ordered(candidate, _ORDER_SHARE * self.problem.effort)
        return None if schedule is None else self.plan_in(candidate, schedule)

    def plan_in(self, candidate: Candidate, schedule: Schedule) -> JointPlan:
        """Returns the candidate in an order."""
        seconds = self._makespan(candidate, schedule)
        bound = step_lower_bound(*self._counts(candidate), self._table(candidate), split=self.problem.split)
        return JointPlan(
            plan=_plan_of(self.problem, candidate, schedule),
            seconds=seconds,
            # The bound includes backwards of frozen stages, which take next to no time.
            bound=min(bound, seconds),
            ideal=self.problem.ideal(self.units(candidate.slices)),
        )

    def holding_less(self, candidate: Candidate, plan: JointPlan) -> JointPlan:
        """Returns the candidate's plan in an order with less memory, if no order is given and one takes hardly
        longer."""
        if not self.problem.given.is_open("schedule"):
            return plan
        try:
            problem = OrderingProblem(*self._counts(candidate), self._table(candidate), **self._limits(candidate))
        # There is no room, as was learned after the plan was accounted for.
        except SlipstreamError:
            return plan
        order = hold_less(problem, plan.schedule, plan.seconds, _LESS_SHARE * self.problem.effort)
        order = self.units(candidate.slices).without_frozen_backwards(order, candidate.bounds)
        fits = self.memory is None or self.memory.fits(candidate, order)
        return plan.in_order(order, self._makespan(candidate, order)) if fits else plan

    def seconds_in_order(self, candidate: Candidate, effort: float) -> float:
        """Returns the seconds of a step in an order that is searched for with this effort; infinite where none was
        found that keeps to the memory limit."""
        schedule = self._ordered(candidate, effort)
        return inf if schedule is None else self._makespan(candidate, schedule)

    def _makespan(self, candidate: Candidate, schedule: Schedule) -> float:
        return float(end_times(ActionArrays.of(schedule), self._table(candidate))[0].max())

    def bound(self, candidate: Candidate) -> float:
        """Returns the least seconds of a step in any order that is allowed; infinite where none keeps to the memory
        limit."""
        if not self.problem.given.is_open("schedule"):
            return self._simulated(candidate)
        try:
            return step_lower_bound(*self._counts(candidate), self._table(candidate), **self._limits(candidate))
        except SlipstreamError:  # learned since
            return inf

    def _ordered(self, candidate: Candidate, effort: float) -> Schedule | None:
        """Returns an order that keeps to the memory limit, the given one where there is one."""
        given = self.problem.order(self.placement, len(candidate.slices))
        if given is not None:
            order = self.units(candidate.slices).without_frozen_backwards(given, candidate.bounds)
            return order if self.memory is None or self.memory.fits(candidate, order) else None
        counts, costs = self._counts(candidate), self._table(candidate)
        memory = self.memory
        units = self.units(candidate.slices)

        def find(effort: float) -> Schedule | None:
            try:
                order = find_order(*counts, costs, **self._limits(candidate), effort=effort)
            # There is no room for one microbatch.
            except SlipstreamError:
                return None
            return units.without_frozen_backwards(order, candidate.bounds)

        if memory is None:
            return find(effort)

        def fits(order: Schedule) -> bool:
            return memory.fits(candidate, order)

        if (found := first_within(_TRIES * (effort,), find, fits)) is not None:
            return found
        least = memory.least(candidate, units)
        return least if fits(least) else None

    def _counts(self, candidate: Candidate) -> tuple[tuple[int, ...], int, int]:
        return self.placement, self.problem.num_microbatches, len(candidate.slices)

    def _limits(self, candidate: Candidate) -> dict[str, Any]:
        room = self._room(candidate)
        return {"memory_limit": None if room is None else room.tolist(), "split": self.problem.split}

    def _table(self, candidate: Candidate) -> TableCost:
        return self.units(candidate.slices).table(candidate.bounds)

    def num_actions(self, candidate: Candidate) -> int:
        """Returns three for each slice of each microbatch on each stage, as many as split backwards make."""
        return 3 * len(self.placement) * self.problem.num_microbatches * len(candidate.slices)

    def fits(self, candidate: Candidate) -> bool:
        """Returns whether an order is known with which the candidate keeps to the memory limit."""
        return self._simulated(candidate) < inf

    def units(self, slices: tuple[int, ...]) -> SlicedUnits:
        """Returns the units' costs on these slices."""
        if slices not in self._sliced:
            while len(self._sliced) >= _MOST_SLICED:
                del self._sliced[next(iter(self._sliced))]
            self._sliced[slices] = self.problem.units(slices, self.problem.given.recompute)
        return self._sliced[slices]

    def _room(self, candidate: Candidate) -> Floats | None:
        return None if self.memory is None else self.memory.room(candidate, self.units(candidate.slices))

    def _rank_bounds(self, slices: tuple[int, ...], cuts: Sequence[tuple[int, ...]]) -> list[tuple[float, float]]:
        """Returns the largest bound of a rank with all of its stages, and the sum of their squares, which tells even
        ranks from uneven ones, of each cut."""
        units = self.units(slices)
        bounds = np.array(cuts, np.int64)
        seconds = {op: units.stage_seconds(op, bounds) for op in OPS}
        sends_back = units.costs.trains_below(bounds[:, :-1])
        done, sent = rank_bounds(
            seconds, self.ranks, [0], units.message_seconds, self.problem.num_microbatches, sends_back
        )
        table = np.maximum(done, sent)[:, np.unique(self.ranks, return_index=True)[1]]
        return [*zip(table.max(axis=1).tolist(), (table**2).sum(axis=1).tolist(), strict=True)]

    def rough_bound(self, candidate: Candidate) -> float:
        """Returns a lower bound of the step, less close than `bound`, in a fraction of its time."""
        return self._rank_bounds(candidate.slices, [candidate.bounds])[0][0]

    def _rough_bounds(self, candidates: Sequence[Candidate]) -> Iterator[tuple[Candidate, float]]:
        """Yields candidates with their bounds, which are computed at once for neighbours with the same slices."""
        for slices, alike in groupby(candidates, key=attrgetter("slices")):
            same = [*alike]
            bounds = self._rank_bounds(slices, [candidate.bounds for candidate in same])
            yield from zip(same, (bound for bound, _ in bounds), strict=True)

    def _simulated(self, candidate: Candidate) -> float:
        """The seconds of the candidate in a good order; of the rules only the best for its number of slices count."""
        if candidate not in self.known:
            count = len(candidate.slices)
            if count not in self._quick:
                problem = self.problem
                given = problem.order(self.placement, count)
                self._quick[count] = QuickOrder(self.placement, problem.num_microbatches, count, problem.split, given)
            units = self.units(candidate.slices)
            rules = self._rules.get(count, ())
            seconds_by_rule = self._quick[count].seconds(units, candidate.bounds, self._room(candidate), rules)
            used = len(seconds_by_rule) * self.num_actions(candidate)
            self._effort -= used
            self._on_effort(used)
            self.known[candidate] = seconds = min(seconds_by_rule.values())
            if seconds < inf and not rules:
                self._rules[count] = tuple(sorted(seconds_by_rule, key=seconds_by_rule.__getitem__)[:_RULES])
            if seconds < self.seconds:
                self.seconds = seconds
                self.best = candidate
        return self.known[candidate]

    def starts(self) -> Iterator[Candidate]:
        """Yields the slices that are given, or those of equal time in several numbers, each with its evened cut, unless
        no cut is even enough."""
        problem = self.problem
        bounds: tuple[int, ...] | None = None
        for slices in self._first_slices():
            if problem.even_seconds(self.units(slices)) < problem.most_seconds:
                bounds = self._evened(Candidate(bounds or self._first_bounds(slices), slices)).bounds
                yield Candidate(bounds, slices)

    def _first_slices(self) -> Iterator[tuple[int, ...]]:
        problem = self.problem
        if not problem.given.is_open("slices"):
            yield problem.given.slices
            return
        allowed = problem.slice_counts
        for count in sorted({allowed[0], *_COUNTS} & {*allowed}):
            for share in _SHARES:
                slices = equal_time_slices(problem.seq_len, count, share, problem.cuts)
                if problem.cuts.allows(slices):
                    yield slices

    def _exact_slices(self, bounds: tuple[int, ...]) -> Candidate:
        """The optimal slices for one equal stage per rank, with the cut evened for them."""

        def time(op: Op) -> Callable[[Any, Any], Any]:
            return lambda length, context: self._mean_stage_seconds(op, length, context)

        problem = self.problem
        length = problem.seq_len
        cuts = problem.cuts.with_few_places(length, _EXACT_CUTS)
        while True:
            table = time_table([time(Op.F), time(Op.B)], length, cuts)
            slicing = best_slicing(table, problem.num_ranks, problem.num_microbatches)
            if len(slicing.slices) <= problem.slice_counts[-1] or 2 * cuts.granularity > problem.cuts.longest(length):
                return self._evened(Candidate(bounds, slicing.slices))
            cuts = cuts.every(2)

    def _mean_stage_seconds(self, op: Op, length: Any, context: Any) -> Any:
        """The seconds of all units on a slice, divided by the ranks, and of a stage besides."""
        lengths, contexts = np.broadcast_arrays(length, context)
        costs = self.problem.costs
        work = Work(op, lengths.ravel(), contexts.ravel())
        units = costs.each_seconds(work)[list(costs.parts)]
        return (units.sum(axis=0) / self.problem.num_ranks + costs.fixed_seconds(work)).reshape(lengths.shape)

    def _first_bounds(self, slices: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the stages that are given, or those of equal work, as far as units allow."""
        costs = self.problem.costs
        if not self.problem.given.is_open("partition"):
            return unit_bounds(self.problem.given.partition, costs.num_layers, costs.units_per_layer)
        total = np.cumsum(self.units(slices).unit_work())
        num_stages = len(self.placement)
        num_units = self.problem.num_units
        bounds = [0]
        for stage in range(1, num_stages):
            nearest = int(np.searchsorted(total, total[-1] * stage / num_stages))
            bounds.append(min(max(nearest, bounds[-1] + 1), num_units - num_stages + stage))
        return (*bounds, num_units)

    def _evened(self, candidate: Candidate) -> Candidate:
        """Moves units between neighbours as long as the ranks' bounds get lower or more even; a given cut stays."""
        if not self.problem.given.is_open("partition"):
            return candidate
        value = partial(self._rank_bounds, candidate.slices)
        return replace(candidate, bounds=steepest_descent(candidate.bounds, value, moved_cuts)[0])

    def _descend(self, candidate: Candidate) -> None:
        """Changes one thing at a time, until no change makes the simulated step shorter or the effort is used up."""
        now = self._simulated(candidate)
        first = 0
        while changes := self.changes(candidate):
            first %= len(changes)
            for number, (changed, bound) in enumerate(self._rough_bounds(changes[first:] + changes[:first]), 1):
                if self._effort <= 0:
                    return
                if bound < now and (seconds := self._simulated(changed)) < now * (1 - 1e-6):
                    candidate = changed
                    now = seconds
                    first = first + number
                    break
            else:
                return

    def changes(self, candidate: Candidate) -> list[Candidate]:
        """Returns the candidates one change away in what isn't given."""
        problem = self.problem
        cuts = candidate.cuts() if problem.given.is_open("partition") else ()
        slicings = candidate.slicings(problem) if problem.given.is_open("slices") else ()
        return [*cuts, *slicings]
