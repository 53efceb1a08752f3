"""The joint search: for every placement the cut, the slices and the order with the shortest simulated step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import ceil, inf
from typing import TYPE_CHECKING, NamedTuple

from slipstream.errors import SlipstreamError
from slipstream.planner.joint.candidates import Candidate
from slipstream.planner.joint.joint_plan import JointPlan
from slipstream.planner.joint.joint_problem import JointProblem
from slipstream.planner.joint.placements import placements
from slipstream.schedule import Schedule

if TYPE_CHECKING:
    from slipstream.planner.joint.placement_search import PlacementSearch
    from slipstream.planner.joint.plan_memory import PlanMemory

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
    from slipstream.planner.joint.finals import Finals

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
