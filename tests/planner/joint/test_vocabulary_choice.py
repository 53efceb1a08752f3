"""A plan spreads the head's rows over the ranks where that makes the simulated step shorter."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest

from planner.joint.test_joint_search import ToyCosts, problem
from schedule.test_memory_passes import in_flight
from slipstream.array_types import Floats, Ints
from slipstream.planner.joint import find_joint_plan, find_vocabulary_plan
from slipstream.planner.joint.joint_search import find_spread_plan, spread_costs
from slipstream.schedule import Action, Op, Schedule, validate
from slipstream.simulator import result_seconds, simulate

HEAVY = ToyCosts(num_layers=6, head=7.0, overhead=1.0)


def ignored(share: float) -> None:
    """Takes what is told about progress."""


@pytest.mark.more
def test_a_heavy_head_is_spread() -> None:
    task = problem(costs=HEAVY)
    plan = find_vocabulary_plan(task, "auto", ignored)
    assert plan.other_head is not None
    assert (plan.head, plan.other_head.head) == ("spread", "whole")
    assert plan.other_head == find_joint_plan(task)
    assert plan.seconds < 1.05 * plan.ideal < plan.other_head.seconds
    assert plan.ideal <= plan.bound <= plan.seconds
    validate(plan.schedule)
    cost = spread_costs(task, plan.partition, plan.slices)
    assert simulate(plan.schedule, cost).makespan == plan.seconds
    lines = plan.table().splitlines()
    assert [line.split()[-1] for line in (lines[0], lines[1])] == ["head", "spread"]
    assert f"whole, on one rank, a step takes +{plan.other_head.seconds / plan.seconds - 1:.1%}" in lines[-1]


@dataclass(frozen=True)
class CostlyLogits(ToyCosts):
    """A head whose tokens take the longer the more of them there are in a slice."""

    def seconds(self, op: Op, lengths: Ints, contexts: Ints) -> tuple[Floats, Floats]:
        units, fixed = super().seconds(op, lengths, contexts)
        return np.concatenate([units[:-1], units[-1:] * (0.25 + lengths / 256)]), fixed


@pytest.mark.more
def test_work_counts_in_the_slices_of_the_plan() -> None:
    """In one slice all work takes so long that a whole head's plan is shorter than an equal share of it."""
    task = problem(costs=CostlyLogits(num_layers=6, head=7.0, overhead=1.0))
    plan = find_vocabulary_plan(task, "auto", ignored)
    assert plan.other_head is not None
    assert plan.head == "spread"


@pytest.mark.more
def test_a_spread_head_loses_where_actions_cost_much() -> None:
    plan = find_vocabulary_plan(problem(costs=ToyCosts(num_layers=6, head=2.0, overhead=200.0)), "auto", ignored)
    assert plan.other_head is not None
    assert (plan.head, plan.other_head.head) == ("whole", "spread")
    assert "with its rows spread over the ranks a step takes +" in plan.table()


@pytest.mark.more
@pytest.mark.parametrize("head", [0.1, 0.75])
def test_a_light_head_is_no_question(head: float) -> None:
    task = problem(costs=ToyCosts(num_layers=8, head=head))
    plan = find_vocabulary_plan(task, "auto", ignored)
    assert plan == find_joint_plan(task)
    assert "head" not in plan.table()


def test_what_is_asked_for_is_what_is_planned() -> None:
    task = problem(costs=HEAVY)
    for vocabulary in ("whole", "spread"):
        plan = find_vocabulary_plan(task, vocabulary, ignored)
        assert (plan.head, plan.other_head) == (vocabulary, None)


def test_all_parts_together_cost_what_the_head_does_and_their_actions_besides() -> None:
    """The seconds of V's and VW's on all ranks are those of the head's F, I and W."""
    task = problem(costs=HEAVY, num_ranks=4)
    slices = (200, 312)
    cost = spread_costs(task, (2, 2, 2, 0), slices)
    for index, (length, context) in enumerate(((200, 0), (312, 200))):
        each = [HEAVY.seconds(op, np.array([length]), np.array([context])) for op in (Op.F, Op.I, Op.W)]
        head, fixed = sum(float(units[-1, 0]) for units, _ in each), HEAVY.overhead
        parts = [cost.seconds(Action(op, g, 0, index)) for op in (Op.V, Op.VW) for g in range(4)]
        assert sum(parts) == pytest.approx(head + 8 * fixed)
        assert cost.seconds(Action(Op.L, 3, 0, index)) == fixed
        assert cost.seconds(Action(Op.F, 3, 0, index)) == fixed


@pytest.mark.more
def test_a_tied_embedding_is_spread_with_the_head() -> None:
    """Every rank then looks at every token, as the first one does for a whole embedding."""
    task = problem(costs=HEAVY, tied=True)
    plan = find_vocabulary_plan(task, "auto", ignored)
    assert plan.other_head is not None
    assert (plan.schedule.spreads_embedding, plan.other_head.schedule.spreads_embedding) == (True, False)
    validate(plan.schedule)
    cost = spread_costs(task, plan.partition, plan.slices)
    assert simulate(plan.schedule, cost).makespan == plan.seconds
    for op, like in ((Op.E, Op.F), (Op.EW, Op.W)):
        units, _ = HEAVY.seconds(like, np.array(plan.slices), np.zeros(len(plan.slices), np.int64))
        for g in plan.schedule.vocabulary_stages:
            assert cost.seconds(Action(op, g, 0, 0)) == units[0, 0]


def test_a_part_of_a_slice_is_two_tensors_and_the_sums_are_none() -> None:
    cost = spread_costs(problem(costs=ToyCosts(latency=0.5, bandwidth=8.0)), (2, 2), (256, 256))
    sent = 256 * 4 / 8
    wanted = {Op.F: 0.5 + sent, Op.V: 0.5 + 2 * sent, Op.L: 0.5}
    assert {op: result_seconds(cost, Action(op, 1, 0, 0), 1, 0) for op in wanted} == wanted


@pytest.mark.more
def test_one_more_microbatch_is_in_flight_where_memory_allows_it() -> None:
    """By the account of the whole plan, which here counts the microbatches between their forward and backward."""
    task = problem(num_ranks=4, costs=HEAVY, num_microbatches=8, most_slices=1, effort=1e5)
    free = find_spread_plan(task)

    def account(partition: tuple[float, ...], slices: tuple[int, ...], schedule: Schedule, again: bool) -> list[float]:
        return [float(in_flight(row)) for row in schedule.actions]

    most = max(account(free.partition, free.slices, free.schedule, False))
    limited = find_spread_plan(replace(task, memory_limit=most - 1, account=account))
    assert max(account(limited.partition, limited.slices, limited.schedule, False)) < most
    assert free.seconds < limited.seconds
