"""The joint search: for every placement the cut, the slices and the order with the shortest simulated step."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from heapq import heappop, heappush, nsmallest
from itertools import chain
from math import ceil, inf
from typing import TYPE_CHECKING, NamedTuple

from slipstream.errors import SlipstreamError
from slipstream.planner.joint.candidates import Candidate
from slipstream.planner.joint.joint_problem import JointPlan, JointProblem
from slipstream.schedule import Schedule

if TYPE_CHECKING:
    from slipstream.planner.joint.placement_search import PlacementSearch, PlanMemory


def placements(num_ranks: int, num_units: int, most_rounds: int = 3) -> list[tuple[int, ...]]:
    """Returns the placements to search, the rank of each stage, of at most `num_units` stages.

    An incomplete last round gives the first ranks a stage more than the others, such as (0, 1, 0): with an end of the
    model as a short first or last stage that evens out ranks whose work can't be divided equally.
    """
    loop = list(range(num_ranks))
    lengths = chain.from_iterable(_lengths(num_ranks, rounds) for rounds in range(1, most_rounds + 1))
    loops = [tuple(loop * (length // num_ranks + 1))[:length] for length in lengths]
    v_shape = (*loop, *reversed(loop))
    found = dict.fromkeys([*loops, v_shape] if num_ranks > 1 else [(0,)])
    return [placement for placement in found if len(placement) <= num_units]


def _lengths(num_ranks: int, rounds: int) -> list[int]:
    return [rounds * num_ranks, rounds * num_ranks + 1]


_FIRST = 12  # candidates of a placement, of which one is to fit the memory limit
_NEAR = 200  # candidates, of the shortest quick orders
_SHARE = 0.2  # of the search's effort, for all bounds and orders
_ORDER_SHARE = 0.01  # for one order
_ACCOUNT = 200  # times an order's actions: the effort of an account of memory
_BOUND = 100  # times an order's actions: the effort of a bound, of which little is compiled


class Finals:
    """The best candidate of each placement by orders that are searched for.

    Quick orders are some 2% longer than the best ones, and not all alike, while the best orders are close to their
    lower bounds. So the candidates with the least bounds get better orders, and where one is the best so far, what is
    one change from it takes part too.
    """

    def __init__(self, searches: list[PlacementSearch]) -> None:
        self._searches = searches
        # under a memory limit only an order that was accounted for is known to fit
        self.best = {search: search.best if search.memory is None else None for search in searches}
        self._least = {search: search.seconds if search.memory is None else inf for search in searches}
        self._left = _SHARE * searches[0].problem.effort if searches else 0.0
        self._waiting: list[tuple[float, int, PlacementSearch, Candidate]] = []
        self._seen: set[tuple[PlacementSearch, Candidate]] = set()

    def run(self) -> None:
        """Orders the candidates of the least bounds until none can be better, or the effort is used up."""
        for search in self._searches:
            if search.memory is not None:
                self._begin_within_limit(search)
        known = [(seconds, search, each) for search in self._searches for each, seconds in search.known.items()]
        for _, search, candidate in nsmallest(_NEAR, known, key=lambda each: each[0]):
            self._add(search, [candidate])
        while self._waiting and self._left > 0:
            bound, _, search, candidate = heappop(self._waiting)
            if bound >= min(self._least.values()):
                return
            effort = _ORDER_SHARE * search.problem.effort
            self._left -= effort if search.memory is None else effort + _ACCOUNT * search.num_actions(candidate)
            seconds = search.seconds_in_order(candidate, effort)
            if seconds < self._least[search]:
                self._least[search], self.best[search] = seconds, candidate
                if seconds == min(self._least.values()):
                    self._add(search, search.changes(candidate))

    def _begin_within_limit(self, search: PlacementSearch) -> None:
        """Takes the first of the candidates with the shortest quick orders that has an order within the limit."""
        for candidate in nsmallest(_FIRST, search.known, key=search.known.__getitem__):
            seconds = search.seconds_in_order(candidate, _ORDER_SHARE * search.problem.effort)
            if seconds < inf:
                self._least[search], self.best[search] = seconds, candidate
                return

    def _add(self, search: PlacementSearch, candidates: Iterable[Candidate]) -> None:
        for candidate in candidates:
            least = min(self._least.values())
            if (search, candidate) in self._seen or search.rough_bound(candidate) >= least or self._left <= 0:
                continue
            self._seen.add((search, candidate))
            if search.fits(candidate):
                self._left -= _BOUND * search.num_actions(candidate)
                heappush(self._waiting, (search.bound(candidate), len(self._seen), search, candidate))


_ACCOUNTED = 24  # of those that seem to hold least
_FINALISTS = 3  # placements whose best candidate gets its best order


class OutOfMemoryError(SlipstreamError):
    """Nothing that was searched keeps to the memory limit; the message says what would."""


def find_joint_plan(problem: JointProblem, on_progress: Callable[[float], None] = lambda share: None) -> JointPlan:
    """Returns the plan with the shortest simulated step that the search finds. The same problem gives the same plan.

    For each placement the slices and cuts with the least lower bounds are improved by local search: units move between
    neighbouring stages and tokens between neighbouring slices, slices are halved and joined. What can't beat the best
    known by its lower bound isn't simulated. Among the slices to start from are those that are optimal for equal stages
    (TeraPipe, Algorithm 1). The best placements' candidates get better orders (`find_order`), the least bounds first.
    Where nothing fits the memory limit, forwards are computed again in the backward.

    `on_progress` is called with the share of the effort that is used up.

    Raises:
        OutOfMemoryError: where nothing fits the memory limit even so.
        SlipstreamError: where no slices are allowed.
    """
    problem.check()
    least: list[_Least] = []
    for recompute in (False, True) if problem.memory_limit is not None else (False,):
        searches = _search(problem, recompute, on_progress)
        plan = _best(searches[:_FINALISTS])
        if plan is not None:
            return plan
        least.append(_least(searches))
    fitting = [each for each in least if max(each.bytes) <= (problem.memory_limit or inf)]
    if fitting:
        return fitting[0].search.plan_in(fitting[0].candidate, fitting[0].schedule)
    raise _nothing_fits(problem, min(least, key=lambda each: max(each.bytes)))


def _best(searches: list[PlacementSearch]) -> JointPlan | None:
    """Returns the best of the placements' plans, or that with the dynamic program's slices where it is better yet."""
    finals = Finals([search for search in searches if search.best])
    finals.run()
    ordered = [(search.plan(best), search) for search, best in finals.best.items() if best]
    plans = sorted(((plan, search) for plan, search in ordered if plan), key=lambda pair: pair[0].seconds)
    if not plans:
        return None
    best, winner = plans[0]
    exact = winner.plan(winner.exact) if winner.exact and winner.fits(winner.exact) else None
    if exact is not None:
        best = replace(min(best, exact, key=lambda plan: plan.seconds), exact=exact)
    rejected = [plan for plan, _ in plans[1:]]
    ideal = min(plan.ideal for plan in (best, *rejected))
    return replace(best, ideal=ideal, rejected=tuple(replace(plan, ideal=ideal) for plan in rejected))


class _Least(NamedTuple):
    """What holds least of all that was tried, and the bytes of each rank."""

    bytes: tuple[float, ...]
    search: PlacementSearch
    candidate: Candidate
    schedule: Schedule


def _least(searches: list[PlacementSearch]) -> _Least:
    """Returns what holds least: of even cuts and slices, one microbatch after the other."""
    tried: list[tuple[float, int, PlacementSearch, PlanMemory, Candidate]] = []
    for search in searches:
        assert search.memory is not None
        for candidate in dict.fromkeys(search.starts()):
            size = float(search.memory.least_bytes(candidate, search.units(candidate.slices)).max())
            tried.append((size, len(tried), search, search.memory, candidate))
    found = []
    for _, _, search, memory, candidate in sorted(tried)[:_ACCOUNTED]:
        units = search.units(candidate.slices)
        most = tuple(memory.most(candidate, units).tolist())
        found.append(_Least(most, search, candidate, memory.least(candidate, units)))
    return min(found, key=lambda each: max(each.bytes))


def _nothing_fits(problem: JointProblem, least: _Least) -> OutOfMemoryError:
    most = max(least.bytes)
    again = ", every forward computed again" if least.search.recompute else ""
    return OutOfMemoryError(
        f"memory.limit={problem.memory_limit:.6g} bytes, but nothing that was searched fits on {problem.num_ranks} "
        f"ranks. The least that was found is {most:.6g}, on rank {least.bytes.index(most)}, with one microbatch after "
        f"the other{again}, and slices of at most {max(least.candidate.slices)} tokens. Give "
        f"memory.limit={ceil(most)} or more, more ranks, or smaller microbatches."
    )


def _search(problem: JointProblem, recompute: bool, on_progress: Callable[[float], None]) -> list[PlacementSearch]:
    """Returns the searches of the placements, the best first; those in which nothing fits have no best candidate."""
    from slipstream.planner.joint.placement_search import PlacementSearch  # loads numba

    used = 0.0

    def on_effort(effort: float) -> None:
        nonlocal used
        used += effort
        on_progress(min(1.0, used / problem.effort))

    choices = placements(problem.num_ranks, problem.num_units)
    searches = [PlacementSearch(problem, placement, recompute, on_effort) for placement in choices]
    best, left = inf, problem.effort
    for number, search in enumerate(searches):
        share = left / (len(searches) - number)
        left += search.run(best, share) - share
        best = min(best, search.seconds)
    return sorted(searches, key=lambda search: search.seconds)
