"""The joint search: of all placements, with the rows of the head spread over the ranks, or whole."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from math import inf

from slipstream.cost import WithoutHead, unit_bounds
from slipstream.errors import SlipstreamError
from slipstream.planner.joint.joint_plan import JointPlan
from slipstream.planner.joint.joint_search import search_placements
from slipstream.planner.joint.problem import JointProblem, MemoryAccount
from slipstream.planner.joint.sliced_units import SlicedUnits
from slipstream.planner.plan import Plan
from slipstream.planner.progress import ProgressReport
from slipstream.schedule import Op, Schedule, ScheduleError, spread_vocabulary
from slipstream.simulator import TableCost, result_seconds, simulate

# A whole head is kept if its plan is this close to the ideal step.
_VOCABULARY_CHOICE_NEAR = 1.03
# A lighter head, as a share of a rank's work, isn't worth the loss.
_HEAVY = 0.25
# A spread head has to gain this much, as the times of V, L and VW are derived and not measured.
_WORTH = 0.99
# V and L lie between the last forward and the first backward, so one more microbatch may be in flight.
_MOST_AHEAD = 1
# Ranks without a whole head are soon even, so this share of the effort is enough.
_EFFORT = 0.5


def search_jointly(problem: JointProblem, progress: ProgressReport) -> JointPlan:
    """Returns the plan with the shortest simulated step on a mesh.

    The head is whole or spread as is given. Where that is open, and ranks may spread it, it is whichever is faster:
    both are tried where a whole head is heavy and leaves the step far from the ideal one.

    Args:
        problem: the step, and what its plan must keep to.
        progress: called with the percentage of a search's effort that is used up.

    Raises:
        OutOfMemoryError: where nothing fits the memory limit.
        SlipstreamError: where no slices are allowed, or nothing was found that takes less than `most_seconds`.
    """
    if problem.given.vocabulary == "spread":
        return _find_spread_plan(problem, progress)
    if not (problem.may_spread and problem.given.is_open("vocabulary")):
        return search_placements(problem, progress)
    try:
        whole = search_placements(problem, progress)
    except SlipstreamError as nothing_fits:
        lacks_room = problem.memory_limit is not None and problem.most_seconds == inf
        if not lacks_room and not _is_heavy(problem, problem.units(problem.cuts.fewest(problem.seq_len))):
            raise
        return _spread_if_it_fits(problem, progress, nothing_fits)
    if not _is_worth_a_search(problem, whole):
        return whole
    try:
        spread = _find_spread_plan(replace(problem, effort=_EFFORT * problem.effort), progress)
    # Nothing fits the memory limit.
    except SlipstreamError:
        return whole
    chosen, other = (spread, whole) if spread.seconds < _WORTH * whole.seconds else (whole, spread)
    return replace(chosen, other_head=other)


def _spread_if_it_fits(problem: JointProblem, progress: ProgressReport, nothing_fits: SlipstreamError) -> JointPlan:
    try:
        return _find_spread_plan(problem, progress)
    except SlipstreamError:
        raise nothing_fits from None


def _find_spread_plan(problem: JointProblem, progress: ProgressReport) -> JointPlan:
    """Returns the plan with the shortest simulated step where every rank has an equal part of the head's rows.

    The search is for a model whose head takes no time. Into its plans V, L and VW are put where ranks wait
    (`slipstream.schedule.spread_vocabulary`), and the whole is simulated. A memory limit is kept by the whole.
    """
    without = replace(problem, costs=WithoutHead(problem.costs), account=_account_of_parts(problem))
    best = search_placements(without, progress)
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
        # The ranks of this order would wait for each other.
        except ScheduleError:
            continue
        fits = limit is None or ahead == 0
        if limit is not None and account is not None and ahead:
            fits = max(account(plan.plan.closed(schedule=schedule))) <= limit
        if fits:
            orders.append((simulate(schedule, cost).makespan, ahead, schedule))
    seconds, _, schedule = min(orders, key=lambda timed: timed[:2])
    busiest = max(sum(map(cost.seconds, row)) for row in schedule.actions)
    return replace(
        plan.in_order(schedule, seconds),
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

    def account(plan: Plan) -> Sequence[float]:
        cost = spread_costs(problem, plan.partition, plan.slices, plan.recompute)
        assert isinstance(plan.schedule, Schedule)
        return whole(plan.closed(schedule=_with_parts(problem, plan.schedule, cost)))

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
    costs = problem.costs
    last = len(partition) - 1
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
