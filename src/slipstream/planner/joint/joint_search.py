"""The joint search: for every placement the cut, the slices and the order with the shortest simulated step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from math import inf
from typing import Any

import numpy as np

from slipstream.array_types import Floats, Ints
from slipstream.errors import SlipstreamError
from slipstream.planner.joint.joint_plan import JointPlan
from slipstream.planner.joint.placements import placements
from slipstream.planner.joint.quick_order import QuickOrder, Rule
from slipstream.planner.joint.step_estimate import rank_bounds
from slipstream.planner.joint.unit_costs import SlicedUnits, UnitCosts
from slipstream.planner.order.best_order import find_order, step_lower_bound
from slipstream.planner.slicing import slice_tokens
from slipstream.planner.slicing.equal_time_cuts import equal_time_slices
from slipstream.schedule import Op
from slipstream.simulator import simulate

_COUNTS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32)  # slices to start from
_SHARES = (0.0, 0.25, 0.5)  # attention's share of the time, for the first slices
_STARTS = 10  # of each placement, improved by local search
_SHARE = 0.1  # of the search's effort, for the best order of each of the placements that are left at the end
_FINALISTS = 3
_RULES = 6  # of list scheduling, for all but the first candidate of each number of slices
_EXACT_CUTS = 256  # places to cut for the dynamic program


@dataclass(frozen=True)
class JointProblem:
    """What is searched for: a step of `num_microbatches` sequences of `seq_len` tokens on `num_ranks` ranks.

    Args:
        costs: what each unit of the model costs, for a microbatch.
        granularity: slices begin at multiples of this many tokens.
        most_slices: the largest number of slices of a sequence.
        longest_slice: tokens of the longest slice. None: the sequence.
        memory_limit: bytes of each rank, for weights, gradients, optimizer state and activations. None: no limit.
        split: whether backwards may be split into input and weight gradients.
        effort: how many actions list scheduling may place; some 5 million take a second.
    """

    costs: UnitCosts
    seq_len: int
    num_ranks: int
    num_microbatches: int = 1
    granularity: int = 64
    most_slices: int = 32
    longest_slice: int | None = None
    memory_limit: float | None = None
    split: bool = True
    effort: float = 1.5e8

    @property
    def longest(self) -> int:
        """The number of tokens of the longest slice that is allowed."""
        return self.longest_slice or self.seq_len

    @cached_property
    def num_units(self) -> int:
        """The embedding, the layers or their halves, and the head."""
        return self.costs.num_layers * self.costs.units_per_layer + 2

    @cached_property
    def ideal(self) -> float:
        """All work divided by the ranks, in as few slices as are allowed."""
        count = -(-self.seq_len // self.longest)
        whole = SlicedUnits(self.costs, equal_time_slices(self.seq_len, count, 0.0, self.granularity))
        return float(whole.unit_work().sum()) * self.num_microbatches / self.num_ranks


@dataclass(frozen=True)
class _Candidate:
    """A cut, given by the first unit of each stage and the number of units, and slices."""

    bounds: tuple[int, ...]
    slices: tuple[int, ...]


def find_joint_plan(problem: JointProblem, on_progress: Callable[[str, int, int], None] | None = None) -> JointPlan:
    """Returns the plan with the shortest simulated step that the search finds. The same problem gives the same plan.

    For each placement the slices and cuts with the least lower bounds are improved by local search: units move between
    neighbouring stages and tokens between neighbouring slices, slices are halved and joined. What can't beat the best
    known by its lower bound isn't simulated. Among the slices to start from are those that are optimal for equal stages
    (TeraPipe, Algorithm 1). The best placements get their best order (`find_order`). Where nothing fits the memory
    limit, forwards are computed again in the backward.

    Raises:
        SlipstreamError: where nothing fits the memory limit even so.
    """
    for recompute in (False, True):
        searches = _search(problem, recompute, on_progress or (lambda *_: None))
        if searches:
            plans = sorted((search.plan() for search in searches), key=lambda plan: plan.seconds)
            return replace(plans[0], rejected=tuple(plans[1:]))
        if problem.memory_limit is None:
            break
    raise SlipstreamError(
        f"memory.limit={problem.memory_limit:.6g} bytes, but nothing that was searched fits on {problem.num_ranks} "
        "ranks, even with every forward computed again. Use more ranks, smaller microbatches, or shard_optimizer=True."
    )


def _search(
    problem: JointProblem, recompute: bool, on_progress: Callable[[str, int, int], None]
) -> list[_PlacementSearch]:
    """Returns the searches of the placements that were best, with at least one candidate that fits."""
    choices = placements(problem.num_ranks, problem.num_units)
    searches = [_PlacementSearch(problem, placement, recompute) for placement in choices]
    best, left = inf, problem.effort
    for number, search in enumerate(searches):
        on_progress("placements", number, len(searches))
        share = left / (len(searches) - number)
        left += search.run(best, share) - share
        best = min(best, search.seconds)
    found = sorted((search for search in searches if search.best), key=lambda search: search.seconds)
    return found[:_FINALISTS]


class _PlacementSearch:
    """The search with one placement."""

    def __init__(self, problem: JointProblem, placement: tuple[int, ...], recompute: bool) -> None:
        self.problem, self.placement, self.recompute = problem, placement, recompute
        self.ranks: Ints = np.array(placement, np.int64)
        self.seconds = inf  # of the best candidate, simulated
        self.best: _Candidate | None = None
        self.exact: _Candidate | None = None  # with the slices of the dynamic program
        self._effort = 0.0
        self._known: dict[_Candidate, float] = {}
        self._sliced: dict[tuple[int, ...], SlicedUnits] = {}
        self._quick: dict[int, QuickOrder] = {}
        self._rules: dict[int, tuple[Rule, ...]] = {}  # the best, by the number of slices

    def run(self, limit: float, effort: float) -> float:
        """Improves the starts of the least bounds, and returns the effort that is left."""
        self._effort = effort
        starts = [*dict.fromkeys(self._starts())]
        self.exact = self._exact_slices(starts[0].bounds)
        first: list[_Candidate] = [self.exact]
        for candidate in sorted(starts, key=self._bound):
            if self._bound(candidate) < min(self.seconds, limit) and self._effort > effort / 2:
                first.append(candidate)
            self._simulated(first[-1])
        for candidate in sorted(first, key=self._simulated)[:_STARTS]:
            self._descend(candidate)
        return max(0.0, self._effort)

    def plan(self) -> JointPlan:
        """Returns the best candidate with its best order."""
        assert self.best is not None
        assert self.exact is not None
        problem, best = self.problem, self.best
        units = self._units(best.slices)
        cost, room = units.table(best.bounds), self._room(best)
        counts = self.placement, problem.num_microbatches, len(best.slices)
        limits = None if room is None else room.tolist()
        schedule = find_order(*counts, cost, memory_limit=limits, split=problem.split, effort=_SHARE * problem.effort)
        return JointPlan(
            schedule=schedule,
            partition=_partition(best.bounds, problem.costs.units_per_layer),
            slices=best.slices,
            seconds=simulate(schedule, cost).makespan,
            bound=step_lower_bound(*counts, cost, memory_limit=limits, split=problem.split),
            ideal=problem.ideal,
            recompute=self.recompute,
            exact_slices=self.exact.slices,
            exact_seconds=self._simulated(self.exact),
        )

    def _units(self, slices: tuple[int, ...]) -> SlicedUnits:
        if slices not in self._sliced:
            self._sliced[slices] = SlicedUnits(self.problem.costs, slices, self.recompute)
        return self._sliced[slices]

    def _room(self, candidate: _Candidate) -> Floats | None:
        """Bytes that each rank has for activations."""
        if self.problem.memory_limit is None:
            return None
        state = np.concatenate([[0.0], np.cumsum(self.problem.costs.state_bytes())])
        held = np.diff(state[list(candidate.bounds)])
        again = np.zeros(self.problem.num_ranks)
        np.maximum.at(again, self.ranks, self._units(candidate.slices).computed_again(candidate.bounds))
        units = self._units(candidate.slices)
        besides = units.message_allowance(self.problem.num_microbatches) + units.workspace_allowance()
        room: Floats = self.problem.memory_limit - np.bincount(self.ranks, held) - again - besides
        return room

    def _rank_bounds(self, candidate: _Candidate) -> tuple[float, float]:
        """The largest bound of a rank, and the sum of their squares, which tells even ranks from uneven ones."""
        units = self._units(candidate.slices)
        found = rank_bounds(units, candidate.bounds, self.ranks, self.problem.num_microbatches)
        return float(found.max()), float((found**2).sum())

    def _bound(self, candidate: _Candidate) -> float:
        return self._rank_bounds(candidate)[0]

    def _simulated(self, candidate: _Candidate) -> float:
        """The seconds of the candidate in a good order; of the rules only the best for its number of slices count."""
        if candidate not in self._known:
            count = len(candidate.slices)
            if count not in self._quick:
                counts = self.problem.num_microbatches, count
                self._quick[count] = QuickOrder(self.placement, *counts, self.problem.split)
            units, rules = self._units(candidate.slices), self._rules.get(count, ())
            found = self._quick[count].seconds(units, candidate.bounds, self._room(candidate), rules)
            self._effort -= len(found) * 3 * len(self.placement) * self.problem.num_microbatches * count
            self._known[candidate] = seconds = min(found.values())
            if seconds < inf and not rules:
                self._rules[count] = tuple(sorted(found, key=found.__getitem__)[:_RULES])
            if seconds < self.seconds:
                self.seconds, self.best = seconds, candidate
        return self._known[candidate]

    def _starts(self) -> Iterator[_Candidate]:
        """Slices of equal time in several numbers, each with its evened cut."""
        problem = self.problem
        units, bounds = max(1, problem.seq_len // problem.granularity), None
        for count in _COUNTS:
            if count <= min(problem.most_slices, units):
                for share in _SHARES:
                    slices = equal_time_slices(problem.seq_len, count, share, problem.granularity)
                    if max(slices) > problem.longest:
                        continue
                    bounds = self._evened(_Candidate(bounds or self._even_bounds(slices), slices)).bounds
                    yield _Candidate(bounds, slices)

    def _exact_slices(self, bounds: tuple[int, ...]) -> _Candidate:
        """The slices that are optimal for as many equal stages as ranks, with the cut evened for them."""

        def time(op: Op) -> Callable[[Any, Any], Any]:
            return lambda length, context: self._mean_stage_seconds(op, length, context)

        problem = self.problem
        step = max(problem.granularity, problem.seq_len // _EXACT_CUTS)
        found = slice_tokens(
            time(Op.F),
            problem.seq_len,
            problem.num_ranks,
            step,
            backward=time(Op.B),
            num_microbatches=problem.num_microbatches,
        )
        return self._evened(_Candidate(bounds, found.slices))

    def _mean_stage_seconds(self, op: Op, length: Any, context: Any) -> Any:
        """The seconds of all units on a slice, divided by the ranks, and of a stage besides."""
        lengths, contexts = np.broadcast_arrays(length, context)
        known = np.minimum(lengths, self.problem.longest)
        units, fixed = self.problem.costs.seconds(op, known.ravel(), contexts.ravel())
        seconds = (units.sum(axis=0) / self.problem.num_ranks + fixed).reshape(lengths.shape)
        return np.where(lengths > self.problem.longest, inf, seconds)

    def _even_bounds(self, slices: tuple[int, ...]) -> tuple[int, ...]:
        """Stages of equal work, as far as units allow."""
        total = np.cumsum(self._units(slices).unit_work())
        num_stages, num_units = len(self.placement), self.problem.num_units
        bounds = [0]
        for stage in range(1, num_stages):
            nearest = int(np.searchsorted(total, total[-1] * stage / num_stages))
            bounds.append(min(max(nearest, bounds[-1] + 1), num_units - num_stages + stage))
        return (*bounds, num_units)

    def _evened(self, candidate: _Candidate) -> _Candidate:
        """Moves units between neighbours as long as the ranks' bounds get lower or more even."""
        value = self._rank_bounds(candidate)
        while True:
            moved = min(_cuts(candidate), key=self._rank_bounds, default=candidate)
            if (found := self._rank_bounds(moved)) >= value:
                return candidate
            candidate, value = moved, found

    def _descend(self, candidate: _Candidate) -> None:
        """Changes one thing at a time, until no change makes the simulated step shorter or the effort is used up."""
        now = self._simulated(candidate)
        changes, number, failed = self._changes(candidate), 0, 0
        while failed < len(changes) and self._effort > 0:
            changed = changes[number % len(changes)]
            number, failed = number + 1, failed + 1
            if self._bound(changed) < now and (found := self._simulated(changed)) < now * (1 - 1e-6):
                candidate, now, failed = changed, found, 0
                changes = self._changes(candidate)

    def _changes(self, candidate: _Candidate) -> list[_Candidate]:
        longest = self.problem.longest
        slicings = (each for each in _slicings(candidate, self.problem) if max(each.slices) <= longest)
        return [*_cuts(candidate), *slicings]


def _cuts(candidate: _Candidate) -> Iterator[_Candidate]:
    """Yields the candidate with one or two neighbouring cuts moved by one or two units."""
    bounds = candidate.bounds
    inner = range(1, len(bounds) - 1)
    for first in inner:
        for last in range(first, min(first + 3, len(bounds) - 1)):
            for step in (-1, 1, -2, 2):
                moved = tuple(b + step * (first <= i <= last) for i, b in enumerate(bounds))
                if all(a < b for a, b in pairwise(moved)):
                    yield replace(candidate, bounds=moved)


def _slicings(candidate: _Candidate, problem: JointProblem) -> Iterator[_Candidate]:
    """Yields the candidate with tokens moved between slices, a slice halved, or two joined."""
    slices, step = candidate.slices, problem.granularity
    count = len(slices)
    for portion in (4 * step, step):
        for giver in range(count):
            for taker in {giver - 1, giver + 1, 0, count - 1} - {giver}:
                if 0 <= taker < count and slices[giver] > portion:
                    changed = list(slices)
                    changed[giver] -= portion
                    changed[taker] += portion
                    yield replace(candidate, slices=tuple(changed))
    for i, tokens in enumerate(slices):
        half = tokens // 2 // step * step
        if half and count < problem.most_slices:
            yield replace(candidate, slices=(*slices[:i], half, tokens - half, *slices[i + 1 :]))
    for i in range(count - 1):
        yield replace(candidate, slices=(*slices[:i], slices[i] + slices[i + 1], *slices[i + 2 :]))


def _partition(bounds: Sequence[int], units_per_layer: int) -> tuple[float, ...]:
    """Layers of each stage; the embedding and the head don't count."""
    last = bounds[-1] - 1
    inner = [min(max(bound, 1), last) - 1 for bound in bounds]
    counts = [(b - a) / units_per_layer for a, b in pairwise(inner)]
    return tuple(int(each) if each == int(each) else each for each in counts)
