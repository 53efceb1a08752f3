"""The compiled simulation ends every action when the simulator does."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.planner.search.bounds import ScheduleShape, cached_schedule
from slipstream.schedule import SCHEDULES, Op, Schedule, predecessors
from slipstream.simulator import TableCost, simulate
from slipstream.simulator.action_graph import ActionArrays
from slipstream.simulator.time_kernel import end_times
from support.examples import examples


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    """As plans have them."""
    name = draw(st.sampled_from(sorted(SCHEDULES)))
    ranks, microbatches, slices, stages = (draw(st.integers(1, 4)) for _ in range(4))
    stages = stages if stages in SCHEDULES[name].stages_per_rank else SCHEDULES[name].stages_per_rank[0]
    ways = draw(st.booleans()), draw(st.sampled_from([0.0, 0.5, 1.0]))
    return cached_schedule(ScheduleShape(name, ranks, microbatches, slices, stages), *ways).schedule


@examples(150)
@given(schedules(), st.integers(0, 2**32))
def test_every_action_ends_when_it_does_in_the_simulator(schedule: Schedule, seed: int) -> None:
    """Random times of stages, slices and links."""
    slices, rng = schedule.num_slices, random.Random(seed)
    cost = TableCost(
        times={(g, s, op): rng.random() for g in range(schedule.num_stages) for s in range(slices) for op in Op},
        message_bytes=[rng.random() for _ in range(slices)],
        latency=rng.choice([0, rng.random()]),
        bandwidth=rng.choice([None, 0.5, 5.0]),
    )
    arrays = ActionArrays.of(schedule)
    ends, seconds = end_times(arrays, cost)
    spans = {span.action: span for span in simulate(schedule, cost).spans}
    actions = [action for row in schedule.actions for action in row]
    assert ends.tolist() == pytest.approx([spans[action].end for action in actions], rel=1e-12)
    assert seconds.tolist() == [cost.seconds(action) for action in actions]


@examples(60)
@given(schedules(), st.integers(0, 2**32))
def test_the_rules_of_one_microbatch_are_those_of_all_like_it(schedule: Schedule, seed: int) -> None:
    """Some attend to documents of their own, and others are recomputed or offloaded in part."""
    pick = random.Random(seed)
    rows = tuple(
        tuple(pick.randint(0, i) for i in range(schedule.num_slices)) for _ in range(schedule.num_microbatches)
    )
    schedule = replace(schedule, reach=pick.choice([None, rows]))
    actions = [action for row in schedule.actions for action in row]
    first_before, before, first_after, after = ActionArrays.of(schedule).precedence
    pairs = set()
    for number, action in enumerate(actions):
        mine = before[first_before[number] : first_before[number + 1]].tolist()
        assert {actions[each] for each in mine} == {*predecessors(action, schedule)}
        assert len({*mine}) == len(mine)
        pairs |= {(each, number) for each in mine}
    assert pairs == {
        (number, each)
        for number in range(len(actions))
        for each in after[first_after[number] : first_after[number + 1]].tolist()
    }
