"""A step's plan has each sequence once, is valid, takes as long as it says, and keeps to the ranks' memory."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given

from slipstream.planner.order.order_search import step_lower_bound
from slipstream.planner.ragged import StageRates, StepProblem, find_step_plan
from slipstream.planner.ragged.step_search import candidates, lower_bound
from slipstream.schedule import Op, validate
from slipstream.simulator import simulate
from support.examples import examples
from support.step_problems import problems, rates, sliced


@examples(10)
@given(problems())
def test_a_plan_is_valid_and_takes_as_long_as_it_says(problem: StepProblem) -> None:
    plan = find_step_plan(problem)
    plan.check(problem.lengths)  # each sequence once, and slices that add up to them
    validate(plan.schedule)
    assert plan.schedule.placement == problem.placement
    assert plan.seconds == pytest.approx(simulate(plan.schedule, sliced(problem, plan).costs()).makespan)
    assert lower_bound(problem, sliced(problem, plan)) <= plan.seconds * (1 + 1e-9)
    if problem.num_microbatches and problem.packs:
        assert len(plan.groups) == problem.num_microbatches
    if problem.num_slices:
        assert max(map(len, plan.slices)) <= problem.num_slices
    if not problem.packs:
        assert all(len(group) == 1 for group in plan.groups)


@examples(8)
@given(problems(limited=True))
def test_a_plan_keeps_to_the_memory(problem: StepProblem) -> None:
    plan = find_step_plan(problem)
    timeline = simulate(plan.schedule, sliced(problem, plan).costs())
    assert problem.room is not None
    for peak, room in zip(timeline.peak_memory, problem.room, strict=True):
        assert peak <= room * (1 + 1e-9)


@examples(4)
@given(problems())
def test_no_order_beats_the_bound(problem: StepProblem) -> None:
    step = next(iter(candidates(problem)))
    counts = step.counts.tolist()
    exact = step_lower_bound(problem.placement, len(counts), counts, step.costs(), split=problem.may_split)
    assert lower_bound(problem, step) <= exact * (1 + 1e-9)


def test_where_only_slices_cost_something_parts_are_of_equal_length() -> None:
    """As is measured of models so small that no time grows with the tokens."""
    costs = rates(2)
    fixed = {op: seconds * [1.0, 0.0, 0.0] for op, seconds in costs.seconds.items()}
    problem = StepProblem((197, 64, 5), (0, 1), replace(costs, seconds=fixed), num_slices=3)
    plan = find_step_plan(problem)
    plan.check(problem.lengths)
    assert max(max(each) for each in plan.slices) == 128


@pytest.mark.parametrize("placement", [(0,), (0, 1), (0, 1, 2, 3)])
def test_a_single_slice_takes_as_long_as_its_bound(placement: tuple[int, ...]) -> None:
    """It passes all stages forward and back, with the links between them."""
    costs = rates(len(placement), bandwidth=100.0)
    problem = StepProblem((700,), placement, costs, num_microbatches=1, num_slices=1, split=False)
    plan = find_step_plan(problem)
    assert lower_bound(problem, sliced(problem, plan)) == pytest.approx(plan.seconds, rel=1e-9)


def test_a_backward_counts_as_long_as_it_takes_split_where_that_is_less() -> None:
    costs = rates(1)
    quick = StageRates({**costs.seconds, Op.W: costs.seconds[Op.W] / 2}, costs.activation_bytes, 4.0, 5.0)
    problem = StepProblem((700,), (0,), quick, num_microbatches=1, num_slices=1)
    plan = find_step_plan(problem)
    assert Op.W in plan.schedule.ops
    assert lower_bound(problem, sliced(problem, plan)) == pytest.approx(plan.seconds, rel=1e-9)


def test_no_message_to_frozen_stages_counts() -> None:
    """Two stages on two ranks, the first without backwards: its gradient's message would end the step."""
    costs = rates(2)
    trained = np.array([[0.0], [1.0]])
    seconds = {op: each if op is Op.F else trained * each for op, each in costs.seconds.items()}
    frozen = replace(costs, seconds=seconds, latency=1e4)
    plan = find_step_plan(StepProblem((700,), (0, 1), frozen, num_microbatches=1, num_slices=1, split=False))
    each = {op: frozen.stage_seconds(op, np.array([700]), frozen.scores(np.array([700]))) for op in (Op.F, Op.B)}
    assert frozen.num_frozen == 1
    assert plan.seconds == pytest.approx(each[Op.F].sum() + 1e4 + each[Op.B][1, 0])
