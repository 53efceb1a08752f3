"""A step's plan keeps to a memory limit by the account it is given; where none can, the longest sequence is named."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.errors import SlipstreamError
from slipstream.planner.ragged import StepMemory, StepPlan, StepProblem, find_plan_within
from slipstream.schedule import validate
from slipstream.simulator import simulate
from support.examples import examples
from support.step_problems import problems, rates, sliced

STATE = 3000.0


def memory_of(problem: StepProblem, limit: float, more: float = 50.0) -> StepMemory:
    """Counts activations as the simulator does, the state, and some bytes for each slice, as messages take."""

    def account(plan: StepPlan) -> list[float]:
        rows = replace(problem, lengths=tuple(map(sum, plan.slices)), num_microbatches=None)
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
        plan = find_plan_within(problem, memory)
    except SlipstreamError as error:
        longest = int(np.argmax(problem.lengths))
        named = rf"inputs\[{longest}\] has {max(problem.lengths)} tokens.*give memory.limit=(\d+)"
        memory = memory_of(problem, int(re.findall(named, str(error))[0]))
        plan = find_plan_within(problem, memory)
    plan.check(problem.lengths)
    validate(plan.schedule)
    assert max(memory.account(plan)) <= memory.limit


def test_how_long_a_sequence_may_be_is_said() -> None:
    problem = example(100, 900, 80)
    memory = memory_of(problem, STATE + 60_000)
    with pytest.raises(SlipstreamError, match=r"inputs\[1\] has 900 tokens.*one of (\d+) tokens would fit") as error:
        find_plan_within(problem, memory)
    most = int(re.findall(r"one of (\d+) tokens", str(error.value))[0])
    assert 100 < most < 900
    shorter = example(most)
    plan = find_plan_within(shorter, memory_of(shorter, memory.limit))
    assert max(memory_of(shorter, memory.limit).account(plan)) <= memory.limit
    longer = example(most + 1)
    with pytest.raises(SlipstreamError, match=f"one of {most} tokens"):
        find_plan_within(longer, memory_of(longer, memory.limit))


@pytest.mark.parametrize("given", [{"schedule": "1f1b"}, {"num_microbatches": 2}], ids=str)
def test_what_is_given_stays_so_even_if_it_holds_too_much(given: dict[str, Any]) -> None:
    problem = replace(example(600, 900, 80), **given)
    plan = find_plan_within(problem, memory := memory_of(problem, STATE + 60_000))
    plan.check(problem.lengths)
    assert max(memory.account(plan)) > memory.limit


def example(*lengths: int) -> StepProblem:
    return StepProblem(lengths, (0, 1), rates(2), granularity=1)
