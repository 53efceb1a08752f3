"""A step's plan has each sequence once, is valid, takes as long as it says, and keeps to a memory limit.

That limit is kept by the account it is given; where no plan can, the longest sequence is named.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.errors import SlipstreamError
from slipstream.planner.cuts import Cuts
from slipstream.planner.find_plan import find_plan
from slipstream.planner.order.order_search import step_lower_bound
from slipstream.planner.plan import Plan
from slipstream.planner.ragged import StepMemory, StepPlan, StepProblem
from slipstream.planner.ragged.step_search import candidates, lower_bound
from slipstream.planner.room import OutOfMemoryError
from slipstream.schedule import Op, make_schedule, validate
from slipstream.simulator import simulate
from support.examples import examples
from support.step_problems import problems, rates, sliced

STATE = 3000.0


@pytest.mark.parametrize("limited", [False, True])
@examples(10)
@given(data=st.data())
def test_a_plan_is_valid_and_takes_as_long_as_it_says(limited: bool, data: st.DataObject) -> None:
    problem = data.draw(problems(limited=limited))
    plan = find_plan(problem)
    plan.check(problem.lengths)  # each sequence once, and slices that add up to them
    validate(plan.schedule)
    assert plan.schedule.placement == problem.placement
    timeline = simulate(plan.schedule, sliced(problem, plan).costs())
    assert plan.seconds == pytest.approx(timeline.makespan)
    assert lower_bound(problem, sliced(problem, plan)) <= plan.seconds * (1 + 1e-9)
    given = problem.given
    if not given.is_open("num_microbatches") and problem.packs:
        assert len(plan.groups) == given.num_microbatches
    if not given.is_open("num_slices"):
        assert max(map(len, plan.slices)) <= given.num_slices
    if not problem.packs:
        assert all(len(group) == 1 for group in plan.groups)
    for peak, room in zip(timeline.peak_memory, problem.room or (), strict=problem.room is not None):
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
    fixed = {op: seconds * [1.0, 0.0, 0.0] for op, seconds in costs.rates.items()}
    problem = StepProblem((197, 64, 5), replace(costs, rates=fixed), Plan(placement=(0, 1), num_slices=3))
    plan = find_plan(problem)
    plan.check(problem.lengths)
    assert max(max(each) for each in plan.slices) == 128


@pytest.mark.parametrize(
    ("placement", "quick"), [((0,), 1), ((0, 1), 1), ((0, 1, 2, 3), 1), ((0,), 2)], ids=["1", "2", "4", "split"]
)
def test_a_single_slice_takes_as_long_as_its_bound(placement: tuple[int, ...], quick: int) -> None:
    """It passes all stages forward and back, with the links between them; split where that takes less."""
    costs = rates(len(placement), bandwidth=100.0)
    costs = replace(costs, rates={**costs.rates, Op.W: costs.rates[Op.W] / quick})
    given = Plan(placement=placement, num_microbatches=1, num_slices=1)
    problem = StepProblem((700,), costs, given, split=quick > 1)
    plan = find_plan(problem)
    assert (Op.W in plan.schedule.ops) == (quick > 1)
    assert lower_bound(problem, sliced(problem, plan)) == pytest.approx(plan.seconds, rel=1e-9)


def test_no_message_to_frozen_stages_counts() -> None:
    """Two stages on two ranks, the first without backwards: its gradient's message would end the step."""
    costs = rates(2)
    trained = np.array([[0.0], [1.0]])
    seconds = {op: each if op is Op.F else trained * each for op, each in costs.rates.items()}
    frozen = replace(costs, rates=seconds, latency=1e4)
    given = Plan(placement=(0, 1), num_microbatches=1, num_slices=1)
    plan = find_plan(StepProblem((700,), frozen, given, split=False))
    each = {op: frozen.stage_seconds(op, np.array([700]), frozen.scores(np.array([700]))) for op in (Op.F, Op.B)}
    assert frozen.num_frozen_parts == 1
    assert plan.seconds == pytest.approx(each[Op.F].sum() + 1e4 + each[Op.B][1, 0])


def memory_of(problem: StepProblem, limit: float, more: float = 50.0) -> StepMemory:
    """Counts activations as the simulator does, the state, and some bytes for each slice, as messages take."""

    def account(plan: StepPlan) -> list[float]:
        rows = replace(problem, lengths=tuple(map(sum, plan.slices)), given=Plan(placement=problem.placement))
        alone = replace(plan, groups=tuple((number,) for number in range(len(plan.slices))))
        peaks = simulate(plan.schedule, sliced(rows, alone).costs()).peak_memory
        return [STATE + peak + more * sum(map(len, plan.slices)) for peak in peaks]

    return StepMemory(limit, [STATE] * problem.num_ranks, account)


@examples(8)
@given(problems(limited=True), st.floats(0.3, 4.0))
def test_a_plan_keeps_to_the_limit_or_the_longest_sequence_is_named(problem: StepProblem, share: float) -> None:
    assert problem.room is not None
    memory = memory_of(problem, STATE + share * problem.room[0])
    problem = replace(problem, room=None)
    try:
        plan = find_plan(replace(problem, memory=memory))
    except SlipstreamError as error:
        longest = int(np.argmax(problem.lengths))
        named = rf"inputs\[{longest}\] has {max(problem.lengths)} tokens.*give memory.limit=(\d+)"
        memory = memory_of(problem, int(re.findall(named, str(error))[0]))
        plan = find_plan(replace(problem, memory=memory))
    plan.check(problem.lengths)
    validate(plan.schedule)
    assert max(memory.account(plan)) <= memory.limit


def test_how_long_a_sequence_may_be_is_said() -> None:
    problem = example(100, 900, 80)
    memory = memory_of(problem, STATE + 60_000)
    with pytest.raises(OutOfMemoryError, match=r"inputs\[1\] has 900 tokens.*one of (\d+) tokens would fit") as error:
        find_plan(replace(problem, memory=memory))
    most = int(re.findall(r"one of (\d+) tokens", str(error.value))[0])
    assert 100 < most < 900
    shorter = example(most)
    plan = find_plan(replace(shorter, memory=memory_of(shorter, memory.limit)))
    assert max(memory_of(shorter, memory.limit).account(plan)) <= memory.limit
    longer = example(most + 1)
    with pytest.raises(SlipstreamError, match=f"one of {most} tokens"):
        find_plan(replace(longer, memory=memory_of(longer, memory.limit)))


@pytest.mark.parametrize("given", [{"schedule": "1f1b"}, {"num_microbatches": 2}], ids=str)
def test_what_is_given_stays_so_even_if_it_holds_too_much(given: dict[str, Any]) -> None:
    problem = replace(example(600, 900, 80), given=Plan(placement=(0, 1), **given))
    plan = find_plan(replace(problem, memory=(memory := memory_of(problem, STATE + 60_000))))
    plan.check(problem.lengths)
    assert max(memory.account(plan)) > memory.limit


def example(*lengths: int) -> StepProblem:
    return StepProblem(lengths, rates(2), Plan(placement=(0, 1)), cuts=Cuts(1, most_slices=None))


@pytest.mark.parametrize(
    ("given", "named"),
    [
        (Plan(), "leaves the placement open"),
        (Plan(placement=(0, 1), slices=(50, 50)), "has slices, but sequences of different lengths have their own"),
        (Plan(placement=(0, 1), schedule=make_schedule("1f1b", 2, 1, 1)), "has an order.*give a schedule by its name"),
        (Plan(placement=(0, 1), num_microbatches=3), "num_microbatches=3, but the step has 2 sequences"),
        (Plan(placement=(0, 1, 1, 0)), r"rates of 2 stages for a placement of 4"),
        (Plan(placement=(1, 0), schedule="1f1b"), r"stages on the ranks \[0, 1\], but placement=\[1, 0\]"),
    ],
    ids=str,
)
def test_what_cannot_be_given_is_refused_by_name(given: Plan, named: str) -> None:
    with pytest.raises(SlipstreamError, match=named):
        find_plan(replace(example(100, 100), given=given))
