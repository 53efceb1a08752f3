"""The joint search: for every placement the cut, the slices and the order with the shortest simulated step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import inf
from typing import TYPE_CHECKING

from slipstream.errors import SlipstreamError
from slipstream.planner.joint.joint_plan import JointPlan
from slipstream.planner.joint.joint_problem import JointProblem
from slipstream.planner.joint.placements import placements

if TYPE_CHECKING:
    from slipstream.planner.joint.placement_search import PlacementSearch

_FINALISTS = 3  # placements whose best candidate gets its best order


def find_joint_plan(problem: JointProblem, on_progress: Callable[[float], None] = lambda share: None) -> JointPlan:
    """Returns the plan with the shortest simulated step that the search finds. The same problem gives the same plan.

    For each placement the slices and cuts with the least lower bounds are improved by local search: units move between
    neighbouring stages and tokens between neighbouring slices, slices are halved and joined. What can't beat the best
    known by its lower bound isn't simulated. Among the slices to start from are those that are optimal for equal stages
    (TeraPipe, Algorithm 1). The best placements' candidates get better orders (`find_order`), the least bounds first.
    Where nothing fits the memory limit, forwards are computed again in the backward.

    `on_progress` is called with the share of the effort that is used up.

    Raises:
        SlipstreamError: where nothing fits the memory limit even so, or no slices are allowed.
    """
    problem.check()
    for recompute in (False, True):
        searches = _search(problem, recompute, on_progress)
        if searches:
            return _best(searches)
        if problem.memory_limit is None:
            break
    raise SlipstreamError(
        f"memory.limit={problem.memory_limit:.6g} bytes, but nothing that was searched fits on {problem.num_ranks} "
        "ranks, even with every forward computed again. Use more ranks, smaller microbatches, or shard_optimizer=True."
    )


def _best(searches: list[PlacementSearch]) -> JointPlan:
    """Returns the best of the placements' plans, or that with the dynamic program's slices where it is better yet."""
    from slipstream.planner.joint.finals import Finals

    finals = Finals(searches)
    finals.run()
    ordered = [(search.plan(best), search) for search, best in finals.best.items() if best]
    plans = sorted(ordered, key=lambda pair: pair[0].seconds)
    best, winner = plans[0]
    if winner.exact and winner.fits(winner.exact):
        exact = winner.plan(winner.exact)
        best = replace(min(best, exact, key=lambda plan: plan.seconds), exact=exact)
    rejected = [plan for plan, _ in plans[1:]]
    ideal = min(plan.ideal for plan in (best, *rejected))
    return replace(best, ideal=ideal, rejected=tuple(replace(plan, ideal=ideal) for plan in rejected))


def _search(problem: JointProblem, recompute: bool, on_progress: Callable[[float], None]) -> list[PlacementSearch]:
    """Returns the searches of the placements that were best, with at least one candidate that fits."""
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
    found = sorted((search for search in searches if search.best), key=lambda search: search.seconds)
    return found[:_FINALISTS]
