"""The joint search: for every placement the cut, the slices and the order with the shortest simulated step."""

from __future__ import annotations

from dataclasses import replace
from math import ceil, inf
from typing import TYPE_CHECKING, NamedTuple

from slipstream.cost import BY_LAYER
from slipstream.errors import SlipstreamError
from slipstream.planner.joint.candidate import Candidate
from slipstream.planner.joint.finalists import FinalistSearch
from slipstream.planner.joint.joint_plan import JointPlan
from slipstream.planner.joint.problem import JointProblem
from slipstream.planner.plan import placement_of
from slipstream.planner.progress import ProgressReport
from slipstream.planner.room import OutOfMemoryError
from slipstream.schedule import SCHEDULES, Schedule

if TYPE_CHECKING:
    from slipstream.planner.joint.placement_search import PlacementSearch, PlanMemory


_MOST_ROUNDS = 3  # rounds of stages over the ranks


def placements(num_ranks: int, num_units: int, most_rounds: int = _MOST_ROUNDS) -> list[tuple[int, ...]]:
    """Returns the placements to search, the rank of each stage, of at most `num_units` stages.

    An incomplete last round gives the first ranks a stage more than the others, such as (0, 1, 0): with an end of the
    model as a short first or last stage that evens out ranks whose work can't be divided equally.
    """
    loop = list(range(num_ranks))
    lengths = (rounds * num_ranks + more for rounds in range(1, most_rounds + 1) for more in (0, 1))
    loops = [tuple(loop * (length // num_ranks + 1))[:length] for length in lengths]
    v_shape = (*loop, *reversed(loop))
    orders = dict.fromkeys([*loops, v_shape] if num_ranks > 1 else [(0,)])
    return [placement for placement in orders if len(placement) <= num_units]


def allowed_placements(problem: JointProblem) -> list[tuple[int, ...]]:
    """Returns the placements to search with what is given.

    Raises:
        SlipstreamError: where none has as many stages as are given, or the order has another than is given.
    """
    given = problem.given
    if not given.is_open("placement"):
        problem.order(given.placement, 1)
        return [given.placement]
    if isinstance(given.schedule, Schedule):
        return [given.schedule.placement]
    rounds = None if given.is_open("stages_per_rank") else given.stages_per_rank
    if not given.is_open("schedule"):
        allowed = SCHEDULES[given.schedule].stages_per_rank
        numbers = [n for n in range(1, _MOST_ROUNDS + 1) if n in allowed] if rounds is None else [rounds]
        choices = [placement_of(given.schedule, problem.num_ranks, number) for number in numbers]
    else:
        choices = placements(problem.num_ranks, problem.num_units, max(_MOST_ROUNDS, rounds or 1))
    fitting = [
        placement
        for placement in choices
        if len(placement) <= problem.num_units
        and rounds in (None, placement.count(0))
        and not (problem.whole_rounds and len(placement) % problem.num_ranks)
        and (given.is_open("partition") or len(placement) == len(given.partition))
    ]
    if not fitting:
        partition = "" if given.is_open("partition") else f", partition={[*given.partition]}"
        raise SlipstreamError(
            f"schedule={given.schedule!r}, stages_per_rank={rounds}{partition}: no placement on {problem.num_ranks} "
            f"ranks has as many stages, of a model with {problem.costs.num_layers} layers. Leave one of them out."
        )
    return fitting


_ACCOUNTED = 24  # candidates that are accounted for, those that seem to need least memory
_SAVINGS = (("none",), ("stage", "full"), ("stage+full",))  # policies in groups, by their cost in time
_FINALISTS = 3  # placements whose best candidate gets its best order


def search_placements(problem: JointProblem, progress: ProgressReport) -> JointPlan:
    """Returns the plan with the shortest simulated step of all placements that are allowed, with the head's rows where
    the costs have them.

    For each placement the slices and cuts with the least lower bounds are improved by local search: units move between
    neighbouring stages and tokens between neighbouring slices, slices are halved and joined. Candidates that can't beat
    the best known by their lower bound aren't simulated. Among the slices to start from are those that are optimal for
    equal stages (TeraPipe, Algorithm 1). The best placements' candidates get better orders (`find_order`), the least
    bounds first. Where nothing fits the memory limit, stages or layers are computed again, whichever steps are shorter,
    or else both.

    `progress` is called with the percentage of the effort that is used up.

    Raises:
        OutOfMemoryError: where nothing fits the memory limit even so.
        SlipstreamError: where no slices are allowed, or nothing was found that takes less than `most_seconds`.
    """
    problem.check()
    least: list[_Least] = []
    for savings in _savings(problem):
        plans: list[JointPlan] = []
        for recompute in savings:
            searches = _search(replace(problem, effort=problem.effort / len(savings)), recompute, progress)
            plan = _best(searches[:_FINALISTS])
            plans += [] if plan is None else [plan]
            least += [_least(searches)] if plan is None and problem.most_seconds == inf else []
        if plans:
            return min(plans, key=lambda plan: plan.seconds)
    if problem.most_seconds < inf:
        raise SlipstreamError(f"nothing was found that fits and takes less than {problem.most_seconds:.4g} seconds.")
    fitting = [candidate for candidate in least if max(candidate.bytes) <= (problem.memory_limit or inf)]
    if fitting:
        return fitting[0].search.plan_in(fitting[0].candidate, fitting[0].schedule)
    raise _nothing_fits(problem, min(least, key=lambda candidate: max(candidate.bytes)))


def _savings(problem: JointProblem) -> tuple[tuple[str, ...], ...]:
    """Returns the recomputations to try, those at once that cost about as much."""
    if not problem.given.is_open("recompute"):
        return ((problem.given.recompute,),)
    return _SAVINGS if problem.memory_limit is not None else _SAVINGS[:1]


def _best(searches: list[PlacementSearch]) -> JointPlan | None:
    """Returns the best of the placements' plans, or that with the dynamic program's slices where it is better yet."""
    finals = FinalistSearch([search for search in searches if search.is_promising])
    finals.run()
    ordered = [(search.plan(best), search, best) for search, best in finals.best.items() if best]
    plans = sorted(((plan, search, best) for plan, search, best in ordered if plan), key=lambda pair: pair[0].seconds)
    if not plans:
        return None
    best, winner, candidate = plans[0]
    exact = winner.plan(winner.exact) if winner.exact and winner.fits(winner.exact) else None
    if winner.exact and exact is not None and exact.seconds < best.seconds:
        best = exact
        candidate = winner.exact
    best = replace(winner.holding_less(candidate, best), exact=exact)
    rejected = [plan for plan, *_ in plans[1:]]
    ideal = min(plan.ideal for plan in (best, *rejected))
    return replace(best, ideal=ideal, rejected=tuple(replace(plan, ideal=ideal) for plan in rejected))


class _Least(NamedTuple):
    """The candidate with the least memory of all that were tried, and the bytes of each rank."""

    bytes: tuple[float, ...]
    search: PlacementSearch
    candidate: Candidate
    schedule: Schedule


def _least(searches: list[PlacementSearch]) -> _Least:
    """Returns the candidate with the least memory: of even cuts and slices, one microbatch after the other."""
    tried: list[tuple[float, int, PlacementSearch, PlanMemory, Candidate]] = []
    for search in searches:
        assert search.memory is not None
        for candidate in dict.fromkeys(search.starts()):
            size = float(search.memory.least_bytes(candidate, search.units(candidate.slices)).max())
            tried.append((size, len(tried), search, search.memory, candidate))
    tries = []
    for _, _, search, memory, candidate in sorted(tried)[:_ACCOUNTED]:
        units = search.units(candidate.slices)
        most = tuple(memory.most(candidate, units).tolist())
        tries.append(_Least(most, search, candidate, memory.least(candidate, units)))
    return min(tries, key=lambda least: max(least.bytes))


def _nothing_fits(problem: JointProblem, least: _Least) -> OutOfMemoryError:
    most = max(least.bytes)
    recompute = least.search.problem.given.recompute
    if most == inf:
        return OutOfMemoryError(
            f"nothing that was searched on {problem.num_ranks} ranks fits the hosts, not even one microbatch after the "
            "other. Give a larger memory.host_limit, keep less on the host, or give more ranks or smaller microbatches."
        )
    again = f", memory.recompute={recompute!r}" if recompute != "none" else ""
    return OutOfMemoryError(
        f"memory.limit={problem.memory_limit:.6g} bytes, but nothing that was searched fits on {problem.num_ranks} "
        f"ranks. The least that was found is {most:.6g}, on rank {least.bytes.index(most)}, with one microbatch after "
        f"the other{again}, and slices of at most {max(least.candidate.slices)} tokens. Give "
        f"memory.limit={ceil(most)} or more, more ranks, or smaller microbatches."
    )


def _search(problem: JointProblem, recompute: str, progress: ProgressReport) -> list[PlacementSearch]:
    """Returns the searches of the placements, the best first; those in which nothing fits have no best candidate."""
    from slipstream.planner.joint.placement_search import PlacementSearch  # loads numba

    used = 0.0
    if recompute in BY_LAYER:
        # A split backward's W would keep everything that the layers recompute.
        problem = replace(problem, split=False)

    def on_effort(effort: float) -> None:
        nonlocal used
        used += effort
        progress("cuts and orders, percent", round(100 * min(1.0, used / problem.effort)), 100)

    searches = []
    for placement in allowed_placements(problem):
        given = replace(problem.given, placement=placement, recompute=recompute)
        searches.append(PlacementSearch(replace(problem, given=given), on_effort))
    best, left = problem.most_seconds, problem.effort
    for index, search in enumerate(searches):
        share = left / (len(searches) - index)
        left += search.run(best, share) - share
        best = min(best, search.seconds)
    return sorted(searches, key=lambda search: search.seconds)
