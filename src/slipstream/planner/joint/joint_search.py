"""The joint search: for every placement the cut, the slices and the order with the shortest simulated step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from heapq import heappop, heappush, nsmallest
from math import ceil, inf
from typing import TYPE_CHECKING, Literal, NamedTuple

from slipstream.cost import BY_LAYER, WithoutHead, unit_bounds
from slipstream.errors import SlipstreamError
from slipstream.planner.joint.problem import Candidate, JointPlan, JointProblem, MemoryAccount
from slipstream.planner.joint.sliced_units import SlicedUnits
from slipstream.schedule import Op, Schedule, ScheduleError, spread_vocabulary
from slipstream.simulator import TableCost, result_seconds, simulate

if TYPE_CHECKING:
    from slipstream.planner.joint.placement_search import PlacementSearch, PlanMemory


def placements(num_ranks: int, num_units: int) -> list[tuple[int, ...]]:
    """Returns the placements to search, the rank of each stage, of at most `num_units` stages.

    An incomplete last round gives the first ranks a stage more than the others, such as (0, 1, 0): with an end of the
    model as a short first or last stage that evens out ranks whose work can't be divided equally.
    """
    loop = list(range(num_ranks))
    lengths = (rounds * num_ranks + more for rounds in range(1, _MOST_ROUNDS + 1) for more in (0, 1))
    loops = [tuple(loop * (length // num_ranks + 1))[:length] for length in lengths]
    v_shape = (*loop, *reversed(loop))
    orders = dict.fromkeys([*loops, v_shape] if num_ranks > 1 else [(0,)])
    return [placement for placement in orders if len(placement) <= num_units]


_MOST_ROUNDS = 3  # of stages over the ranks
_FIRST = 12  # candidates of a placement, of which one is to fit the memory limit
_NEAR = 200  # candidates, of the shortest quick orders
_SHARE = 0.2  # of the search's effort, for all bounds and orders
_ORDER_SHARE = 0.01  # for one order
_ACCOUNT = 200  # times an order's actions: the effort of an account of memory
_BOUND = 100  # times an order's actions: the effort of a bound, of which little is compiled


class FinalistSearch:
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
_SAVINGS = (("none",), ("stage", "full"), ("stage+full",))  # of memory, by their cost
_FINALISTS = 3  # placements whose best candidate gets its best order


class OutOfMemoryError(SlipstreamError):
    """No plan that was searched keeps to the memory limit; the message has the remedy."""


def find_joint_plan(problem: JointProblem, on_progress: Callable[[float], None] = lambda share: None) -> JointPlan:
    """Returns the plan with the shortest simulated step that the search finds. The same problem gives the same plan.

    For each placement the slices and cuts with the least lower bounds are improved by local search: units move between
    neighbouring stages and tokens between neighbouring slices, slices are halved and joined. Candidates that can't beat
    the best known by their lower bound aren't simulated. Among the slices to start from are those that are optimal for
    equal stages (TeraPipe, Algorithm 1). The best placements' candidates get better orders (`find_order`), the least
    bounds first. Where nothing fits the memory limit, stages or layers are computed again, whichever steps are shorter,
    or else both.

    `on_progress` is called with the share of the effort that is used up.

    Raises:
        OutOfMemoryError: where nothing fits the memory limit even so.
        SlipstreamError: where no slices are allowed, or nothing was found that takes less than `most_seconds`.
    """
    problem.check()
    least: list[_Least] = []
    for savings in _SAVINGS if problem.memory_limit is not None else _SAVINGS[:1]:
        plans: list[JointPlan] = []
        for recompute in savings:
            searches = _search(replace(problem, effort=problem.effort / len(savings)), recompute, on_progress)
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
        best, candidate = exact, winner.exact
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
    again = f", memory.recompute={least.search.recompute!r}" if least.search.recompute != "none" else ""
    return OutOfMemoryError(
        f"memory.limit={problem.memory_limit:.6g} bytes, but nothing that was searched fits on {problem.num_ranks} "
        f"ranks. The least that was found is {most:.6g}, on rank {least.bytes.index(most)}, with one microbatch after "
        f"the other{again}, and slices of at most {max(least.candidate.slices)} tokens. Give "
        f"memory.limit={ceil(most)} or more, more ranks, or smaller microbatches."
    )


def _search(problem: JointProblem, recompute: str, on_progress: Callable[[float], None]) -> list[PlacementSearch]:
    """Returns the searches of the placements, the best first; those in which nothing fits have no best candidate."""
    from slipstream.planner.joint.placement_search import PlacementSearch  # loads numba

    used = 0.0
    if recompute in BY_LAYER:
        problem = replace(problem, split=False)  # or W would hold all that layers recompute

    def on_effort(effort: float) -> None:
        nonlocal used
        used += effort
        on_progress(min(1.0, used / problem.effort))

    choices = placements(problem.num_ranks, problem.num_units)
    searches = [PlacementSearch(problem, placement, recompute, on_effort) for placement in choices]
    best, left = problem.most_seconds, problem.effort
    for index, search in enumerate(searches):
        share = left / (len(searches) - index)
        left += search.run(best, share) - share
        best = min(best, search.seconds)
    return sorted(searches, key=lambda search: search.seconds)


Vocabulary = Literal["auto", "whole", "spread"]
Progress = Callable[[float], None]

_VOCABULARY_CHOICE_NEAR = 1.03  # times the ideal step: a whole head's plan that is as near is taken
_HEAVY = 0.25  # of a rank's share of the work: a lighter head isn't worth the loss
_WORTH = 0.99  # of the step with a whole head: the times of V, L and VW are derived, not measured
_MOST_AHEAD = 1  # microbatches more in flight: V and L lie between the last forward and the first backward
_EFFORT = 0.5  # of a search with a whole head: without one ranks are soon even


def find_vocabulary_plan(problem: JointProblem, vocabulary: Vocabulary, on_progress: Progress) -> JointPlan:
    """Returns the plan of `find_joint_plan`, with the head whole or spread as is asked for; "auto": whichever is
    faster, where a whole head is heavy and leaves the step far from the ideal one.

    Raises SlipstreamError as `find_joint_plan` does.
    """
    if vocabulary == "spread":
        return find_spread_plan(problem, on_progress)
    if vocabulary == "whole":
        return find_joint_plan(problem, on_progress)
    try:
        whole = find_joint_plan(problem, on_progress)
    except SlipstreamError as nothing_fits:
        lacks_room = problem.memory_limit is not None and problem.most_seconds == inf
        if not lacks_room and not _is_heavy(problem, problem.units(problem.fewest_slices)):
            raise
        return _spread_if_it_fits(problem, on_progress, nothing_fits)
    if not _is_worth_a_search(problem, whole):
        return whole
    try:
        spread = find_spread_plan(replace(problem, effort=_EFFORT * problem.effort), on_progress)
    except SlipstreamError:  # nothing fits the memory limit
        return whole
    chosen, other = (spread, whole) if spread.seconds < _WORTH * whole.seconds else (whole, spread)
    return replace(chosen, other_head=other)


def _spread_if_it_fits(problem: JointProblem, on_progress: Progress, nothing_fits: SlipstreamError) -> JointPlan:
    try:
        return find_spread_plan(problem, on_progress)
    except SlipstreamError:
        raise nothing_fits from None


def find_spread_plan(problem: JointProblem, on_progress: Progress = lambda share: None) -> JointPlan:
    """Returns the plan with the shortest simulated step where every rank has an equal part of the head's rows.

    The search is for a model whose head takes no time. Into its plans V, L and VW are put where ranks wait
    (`slipstream.schedule.spread_vocabulary`), and the whole is simulated. A memory limit is kept by the whole.
    """
    without = replace(problem, costs=WithoutHead(problem.costs), account=_account_of_parts(problem))
    best = find_joint_plan(without, on_progress)
    plans = sorted((_spread(problem, plan) for plan in (best, *best.rejected)), key=lambda plan: plan.seconds)
    return replace(plans[0], rejected=tuple(plans[1:]))


def _is_worth_a_search(problem: JointProblem, whole: JointPlan) -> bool:
    """Returns whether the head is heavy, and the step with a whole one is far from the ideal."""
    is_far = whole.seconds > _VOCABULARY_CHOICE_NEAR * whole.ideal
    return is_far and _is_heavy(problem, problem.units(whole.slices), whole.ideal)


def _is_heavy(problem: JointProblem, units: SlicedUnits, ideal: float | None = None) -> bool:
    head = float(units.unit_work()[-1]) * problem.num_microbatches
    return head > _HEAVY * (problem.ideal(units) if ideal is None else ideal)


def _spread(problem: JointProblem, plan: JointPlan) -> JointPlan:
    """Returns the plan with the head's rows on all ranks, given one for the same model without a head: in its order, or
    with one more microbatch in flight where that is shorter and fits the memory limit."""
    cost = spread_costs(problem, plan.partition, plan.slices, plan.recompute)
    limit, account = problem.memory_limit, problem.account
    orders: list[tuple[float, int, Schedule]] = []
    for ahead in range(_MOST_AHEAD + 1):
        try:
            schedule = _with_parts(problem, plan.schedule, cost, ahead)
        except ScheduleError:  # an order whose ranks would wait for each other
            continue
        fits = limit is None or ahead == 0
        if limit is not None and account is not None and ahead:
            fits = max(account(plan.partition, plan.slices, schedule, plan.recompute)) <= limit
        if fits:
            orders.append((simulate(schedule, cost).makespan, ahead, schedule))
    seconds, _, schedule = min(orders, key=lambda timed: timed[:2])
    busiest = max(sum(map(cost.seconds, row)) for row in schedule.actions)
    return replace(
        plan,
        schedule=schedule,
        seconds=seconds,
        bound=max(plan.bound, float(busiest)),
        ideal=problem.ideal(problem.units(plan.slices)),
        exact=None,
    )


def _with_parts(problem: JointProblem, schedule: Schedule, cost: TableCost, ahead: int = 0) -> Schedule:
    ends = schedule.placement[-1], (schedule.placement[-1] + 1) % schedule.num_ranks
    link = partial(result_seconds, cost, source=ends[0], destination=ends[1])
    return spread_vocabulary(schedule, cost.seconds, link, embedding=problem.tied, ahead=ahead)


def _account_of_parts(problem: JointProblem) -> MemoryAccount | None:
    """Returns the ranks' memory where the parts of the head are put into an order without them."""
    whole = problem.account
    if whole is None:
        return None

    def account(
        partition: tuple[float, ...], slices: tuple[int, ...], schedule: Schedule, recompute: str
    ) -> Sequence[float]:
        cost = spread_costs(problem, partition, slices, recompute)
        return whole(partition, slices, _with_parts(problem, schedule, cost), recompute)

    return account


def spread_costs(
    problem: JointProblem, partition: tuple[float, ...], slices: tuple[int, ...], recompute: str = "none"
) -> TableCost:
    """Returns the simulator's costs of stages without a head, and of every rank's part of its rows.

    V computes logits and their gradient for the head's input, as the head's F and I do, and VW their weights'; L adds
    a few numbers up. Each takes the fixed part of an action too, and the time of its messages: V takes one and sends
    one, L as many as there are other ranks, and the others take one.

    Where the head is tied, E and EW go through every token on every rank, as the whole embedding's F and W do, with no
    model's code around them. The first stage adds the embeddings up, which takes it about as long as a lookup: its F
    keeps the embedding's time.
    """
    costs, last = problem.costs, len(partition) - 1
    table = SlicedUnits(WithoutHead(costs), slices, problem.link, recompute).table(
        unit_bounds(partition, costs.num_layers, costs.units_per_layer)
    )
    units = problem.units(slices)
    (forward, fixed), (inputs, _), (weights, also_fixed) = map(units.seconds, (Op.F, Op.I, Op.W))
    message = units.handling
    logits = (forward[-1] + inputs[-1]) / problem.num_ranks + fixed + 2 * message
    rows = weights[-1] / problem.num_ranks + also_fixed + message
    losses = fixed + 2 * (problem.num_ranks - 1) * message
    times = dict(table.times)
    for index in range(len(slices)):
        times[last, index, Op.L] = float(losses[index])
        for stage in range(last + 1):
            times[stage, index, Op.V] = float(logits[index])
            times[stage, index, Op.VW] = float(rows[index])
            if problem.tied:
                times[stage, index, Op.E] = float(forward[0, index] + message[index])
                times[stage, index, Op.EW] = float(weights[0, index] + message[index])
    return replace(table, times=times)
