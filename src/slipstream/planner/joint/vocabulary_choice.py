"""The choice between a whole head and one whose rows are spread over the ranks, by their simulated steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Literal

import numpy as np

from slipstream.array_types import Floats, Ints
from slipstream.errors import SlipstreamError
from slipstream.planner.costs import unit_bounds
from slipstream.planner.joint.joint_problem import JointPlan, JointProblem, MemoryAccount
from slipstream.planner.joint.joint_search import find_joint_plan
from slipstream.planner.joint.unit_costs import SlicedUnits, UnitCosts
from slipstream.schedule import Op, Schedule, spread_vocabulary
from slipstream.simulator import TableCost, result_seconds, simulate

Vocabulary = Literal["auto", "whole", "spread"]
Progress = Callable[[float], None]

_NEAR = 1.03  # times the ideal step: a whole head's plan that is as near is taken
_HEAVY = 0.25  # of a rank's share of the work: a lighter head is no reason for what is lost
_WORTH = 0.99  # of the step with a whole head: what V, L and VW take is derived, not measured
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
        if problem.memory_limit is None:
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

    The search is for a model whose head takes no time. Into what it finds, V, L and VW are put where ranks wait
    (`slipstream.schedule.spread_vocabulary`), and the whole is simulated. A memory limit is kept by the whole.
    """
    without = replace(problem, costs=UnitsWithoutHead(problem.costs), account=_account_of_parts(problem))
    found = find_joint_plan(without, on_progress)
    plans = sorted((_spread(problem, plan) for plan in (found, *found.rejected)), key=lambda plan: plan.seconds)
    return replace(plans[0], rejected=tuple(plans[1:]))


def _is_worth_a_search(problem: JointProblem, whole: JointPlan) -> bool:
    """Returns whether the head is heavy, and the step with a whole one is far from the ideal."""
    head = float(SlicedUnits(problem.costs, whole.slices).unit_work()[-1]) * problem.num_microbatches
    return whole.seconds > _NEAR * whole.ideal and head > _HEAVY * whole.ideal


def _spread(problem: JointProblem, plan: JointPlan) -> JointPlan:
    """Returns the plan with the head's rows on all ranks, given one for the same model without a head."""
    cost = spread_costs(problem, plan.partition, plan.slices, plan.recompute)
    schedule = _with_parts(problem, plan.schedule, cost)
    timeline = simulate(schedule, cost)
    busiest = max(sum(map(cost.seconds, row)) for row in schedule.actions)
    return replace(
        plan,
        schedule=schedule,
        seconds=timeline.makespan,
        bound=max(plan.bound, float(busiest)),
        ideal=problem.ideal(SlicedUnits(problem.costs, plan.slices)),
        exact=None,
    )


def _with_parts(problem: JointProblem, schedule: Schedule, cost: TableCost) -> Schedule:
    ends = schedule.placement[-1], (schedule.placement[-1] + 1) % schedule.num_ranks
    return spread_vocabulary(
        schedule, cost.seconds, lambda action: result_seconds(cost, action, *ends), embedding=problem.tied
    )


def _account_of_parts(problem: JointProblem) -> MemoryAccount | None:
    """Returns what the ranks hold where the parts of the head are put into an order without them."""
    whole = problem.account
    if whole is None:
        return None

    def account(
        partition: tuple[float, ...], slices: tuple[int, ...], schedule: Schedule, recompute: bool
    ) -> Sequence[float]:
        cost = spread_costs(problem, partition, slices, recompute)
        return whole(partition, slices, _with_parts(problem, schedule, cost), recompute)

    return account


def spread_costs(
    problem: JointProblem, partition: tuple[float, ...], slices: tuple[int, ...], recompute: bool = False
) -> TableCost:
    """Returns the simulator's costs of stages without a head, and of every rank's part of its rows.

    V computes logits and their gradient for the head's input, as the head's F and I do, and VW their weights'; L adds
    a few numbers up. Each takes the fixed part of an action too, and the time of its messages: V takes one and sends
    one, L as many as there are other ranks, and the others take one.

    Where the head is tied, E and EW go through every token on every rank, as the whole embedding's F and W do, with no
    model's code around them. The first stage adds up what was looked up, which takes it about as long as a lookup: its
    F keeps the embedding's time.
    """
    costs, last = problem.costs, len(partition) - 1
    table = SlicedUnits(UnitsWithoutHead(costs), slices, recompute).table(
        unit_bounds(partition, costs.num_layers, costs.units_per_layer)
    )
    lengths, contexts = np.array(slices, np.int64), np.array([0, *accumulate(slices)][:-1], np.int64)
    (forward, fixed), (inputs, _), (weights, also_fixed) = (
        costs.seconds(op, lengths, contexts) for op in (Op.F, Op.I, Op.W)
    )
    message = costs.handling_seconds(lengths)
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


@dataclass(frozen=True)
class UnitsWithoutHead:
    """The costs of a model's units (see `UnitCosts`), of which the head takes nothing."""

    costs: UnitCosts

    @property
    def num_layers(self) -> int:
        return self.costs.num_layers

    @property
    def num_frozen_units(self) -> int:
        return 0  # the rows of a head that is trained are next to any stage, also to frozen ones

    @property
    def units_per_layer(self) -> int:
        return self.costs.units_per_layer

    @property
    def latency(self) -> float:
        return self.costs.latency

    @property
    def bandwidth(self) -> float | None:
        return self.costs.bandwidth

    def seconds(self, op: Op, lengths: Ints, contexts: Ints) -> tuple[Floats, Floats]:
        return _without_last(*self.costs.seconds(op, lengths, contexts))

    def activation_bytes(self, lengths: Ints) -> tuple[Floats, Floats]:
        return _without_last(*self.costs.activation_bytes(lengths))

    def kept_bytes(self, lengths: Ints) -> tuple[Floats, Floats]:
        return _without_last(*self.costs.kept_bytes(lengths))

    def state_bytes(self) -> Floats:
        return _without_last(self.costs.state_bytes(), np.zeros(0))[0]

    def message_bytes(self, lengths: Ints) -> Floats:
        return self.costs.message_bytes(lengths)

    def handling_seconds(self, lengths: Ints) -> Floats:
        return self.costs.handling_seconds(lengths)


def _without_last(units: Floats, fixed: Floats) -> tuple[Floats, Floats]:
    """Returns what units and a stage have, with nothing for the last unit."""
    return np.concatenate([units[:-1], np.zeros_like(units[-1:])]), fixed
