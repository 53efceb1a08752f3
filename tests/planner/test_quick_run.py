"""The compiled simulator against the one that everything else asks."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.cost import TableCost
from slipstream.planner.quick_run import ActionArrays
from slipstream.planner.written import written
from slipstream.schedule.action import Op
from slipstream.schedule.generators import GENERATORS, STAGES_PER_RANK
from slipstream.simulator import simulate


@settings(deadline=None, max_examples=150)
@given(
    st.sampled_from([name for name in GENERATORS if name != "auto"]),
    *[st.integers(1, 4)] * 4,
    st.booleans(),
    st.sampled_from([0.0, 0.5, 1.0]),
    st.integers(0, 2**32),
)
def test_every_action_ends_when_it_does_in_the_simulator(
    name: str, ranks: int, microbatches: int, slices: int, stages: int, recompute: bool, offload: float, seed: int
) -> None:
    """Random times of stages, slices and links."""
    stages = stages if stages in STAGES_PER_RANK[name] else STAGES_PER_RANK[name][0]
    schedule = written(name, ranks, microbatches, slices, stages, recompute, offload).schedule
    rng = random.Random(seed)
    cost = TableCost(
        times={(g, s, op): rng.random() for g in range(schedule.num_stages) for s in range(slices) for op in Op},
        message_bytes=[rng.random() for _ in range(slices)],
        latency=rng.choice([0, rng.random()]),
        bandwidth=rng.choice([None, 0.5, 5.0]),
    )
    arrays = ActionArrays.of(schedule)
    ends, seconds = arrays.ends(cost)
    spans = {span.action: span for span in simulate(schedule, cost).spans}
    actions = [action for row in schedule.actions for action in row]
    assert ends.tolist() == pytest.approx([spans[action].end for action in actions], rel=1e-12)
    assert seconds.tolist() == [cost.seconds(action) for action in actions]
