"""Of plans that take about as long as the shortest the simplest comes first, and a sentence says why."""

from __future__ import annotations

from dataclasses import replace

import pytest

from slipstream.planner.plan import ONE_DEVICE, Plan
from slipstream.planner.search.simple_first import may_come_first, simpler_text, simplest
from slipstream.simulator import MemoryKind
from support.hand_made_plan import make_plan

SHORTEST = replace(
    ONE_DEVICE, pipeline_parallel=4, stages_per_rank=3, schedule="interleaved-1f1b", offload=0.5, data_parallel=2
)
BYTES = 70e9


@pytest.mark.parametrize(
    ("changes", "longer", "held", "why"),
    [
        ({"stages_per_rank": 1, "schedule": "1f1b"}, 0.004, 79e9, "0.4%: 1 stage per rank instead of 3"),
        ({"offload": 0.0}, 0.009, 79e9, "0.9%: nothing copied to the host"),
        ({"num_slices": 2}, 0.001, 60e9, "0.1%: 60.0 GB on the fullest rank instead of 70.0 GB"),
        ({"data_parallel": 1}, 0.01, 70.1e9, "1.0%: 1 kind of parallelism instead of 2"),
        ({"stages_per_rank": 1}, 0.011, 10e9, ""),
        ({"stages_per_rank": 4, "offload": 0.0}, 0.001, 10e9, ""),
        ({"num_slices": 2}, 0.001, 70.1e9, ""),
    ],
)
def test_what_counts_and_what_is_said(changes: dict[str, object], longer: float, held: float, why: str) -> None:
    other = replace(SHORTEST, **changes)  # type: ignore[arg-type]
    memory, seconds = {SHORTEST: BYTES, other: held}, {SHORTEST: 1.0, other: 1 + longer}
    first = simplest(seconds, memory.__getitem__)
    assert first == (other if why else SHORTEST)
    best = make_plan().best
    shortest, simpler = (
        replace(best, plan=plan, step_seconds=seconds[plan], memory=({MemoryKind.ACTIVATIONS: memory[plan]},))
        for plan in (SHORTEST, first)
    )
    said = why.replace(": ", " longer than the shortest, with ", 1)
    assert simpler_text(simpler, shortest) == (f"The first is {said}." if why else "")


def test_what_may_come_first_is_simpler_than_all_that_take_about_as_long() -> None:
    one_stage = replace(SHORTEST, stages_per_rank=1)
    assert may_come_first(one_stage, {SHORTEST: 1.0})
    assert may_come_first(replace(SHORTEST, offload=0.0), {SHORTEST: 1.0})
    assert not may_come_first(replace(SHORTEST, num_slices=2), {SHORTEST: 1.0})
    assert not may_come_first(one_stage, {SHORTEST: 1.0, replace(one_stage, offload=0.0): 1.005})
    assert may_come_first(one_stage, {SHORTEST: 1.0, replace(one_stage, offload=0.0): 1.05})


def test_memory_is_asked_for_only_where_plans_are_alike_so_far() -> None:
    def memory(plan: Plan) -> float:
        raise AssertionError(plan)

    one_stage = replace(SHORTEST, stages_per_rank=1)
    assert simplest({SHORTEST: 1.0, one_stage: 1.005}, memory) == one_stage
