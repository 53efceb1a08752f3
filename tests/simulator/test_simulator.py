"""The simulator equals closed formulas exactly, and the one over arrays ends every action when it does."""

from __future__ import annotations

import random
from dataclasses import replace
from fractions import Fraction
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.errors import SlipstreamError
from slipstream.planner.search.schedule_shape import ScheduleShape, cached_schedule
from slipstream.schedule import (
    Action,
    Op,
    Schedule,
    ScheduleError,
    add_communication,
    add_offload,
    forward_only,
    gpipe,
    one_f_one_b,
    predecessors,
    spread_vocabulary,
)
from slipstream.schedule.action_arrays import ActionArrays
from slipstream.simulator import MicrobatchCost, TableCost, activation_peaks, simulate, step_seconds
from slipstream.simulator.costs import MeasuredCost, UnitCost
from slipstream.simulator.simulation import end_times
from slipstream.timeline import Timeline
from support.examples import examples
from support.schedules import named_schedules

POSITIVE = st.integers(1, 50)


def table(forwards: list[list[int]], backwards: list[list[int]]) -> dict[tuple[int, int, Op], float]:
    """Costs from one list of slices per stage."""
    return {
        (g, i, op): seconds
        for op, rows in ((Op.F, forwards), (Op.B, backwards))
        for g, row in enumerate(rows)
        for i, seconds in enumerate(row)
    }


def flow_shop(times: list[list[int]], start: list[int] | None = None) -> list[list[int]]:
    """C(k,i) = max(C(k-1,i), C(k,i-1)) + t(k,i): when machine k ends job i."""
    ends: list[list[int]] = []
    for k, row in enumerate(times):
        free = start[k] if start else 0
        ends.append([])
        for i, seconds in enumerate(row):
            free = max(free, ends[k - 1][i] if k else 0) + seconds
            ends[k].append(free)
    return ends


@st.composite
def unequal_times(draw: st.DrawFn) -> tuple[list[list[int]], list[list[int]]]:
    num_slices = draw(st.integers(1, 6))
    row = st.lists(POSITIVE, min_size=num_slices, max_size=num_slices)
    forwards = draw(st.lists(row, min_size=1, max_size=5))
    return forwards, [draw(row) for _ in forwards]


@given(unequal_times(), st.integers(1, 3))
def test_flush_over_unequal_stages(times: tuple[list[list[int]], list[list[int]]], num_microbatches: int) -> None:
    """Forward is a flow shop; backward one through the stages in reverse, from where their forwards end."""
    forwards, backwards = times
    schedule = gpipe(len(forwards), num_microbatches, len(forwards[0]))
    up = flow_shop([row * num_microbatches for row in forwards])
    down = flow_shop([row[::-1] * num_microbatches for row in backwards[::-1]], start=[ends[-1] for ends in up[::-1]])
    cost = TableCost(table(forwards, backwards))
    assert simulate(forward_only(schedule), cost).makespan == up[-1][-1]
    assert simulate(schedule, cost).makespan == down[-1][-1]


@given(unequal_times(), st.data())
def test_links_are_machines_of_the_flow_shop(
    times: tuple[list[list[int]], list[list[int]]], data: st.DataObject
) -> None:
    """A message keeps its channel for bytes/bandwidth; latency delays it but not the next one."""
    forwards, backwards = times
    num_bytes = [data.draw(POSITIVE) for _ in forwards[0]]
    machines = [forwards[0]]
    for row in forwards[1:]:
        machines += [num_bytes, [3] * len(row), row]  # link, then latency, which holds nothing up
    ends: list[int] = [0] * len(num_bytes)
    for k, row in enumerate(machines):
        free = 0
        for i, seconds in enumerate(row):
            start = ends[i] if k % 3 == 2 else max(ends[i], free)
            free = ends[i] = start + seconds
    cost = TableCost(table(forwards, backwards), num_bytes, latency=3, bandwidth=Fraction(1))
    schedule = forward_only(gpipe(len(forwards), 1, len(num_bytes)))
    assert simulate(schedule, cost).makespan == ends[-1]
    assert simulate(add_communication(schedule, ahead=99), cost).makespan == ends[-1]


def test_a_message_leaves_when_both_ends_are_posted() -> None:
    schedule = add_communication(forward_only(gpipe(2, 1, 2)), ahead=0)
    timeline = simulate(schedule, UnitCost(forward=4, link=1))
    spans = {str(span.action): (span.start, span.end) for span in timeline.spans}
    assert spans == {
        "0F0.0": (0, 4),
        "0F0.1": (4, 8),
        "0SEND_F0.0": (4, 5),
        "1RECV_F0.0": (0, 5),
        "1F0.0": (5, 9),
        "0SEND_F0.1": (8, 10),
        "1RECV_F0.1": (9, 10),  # posted after 1F0.0, so the message waits from 8 to 9
        "1F0.1": (10, 14),
    }


def test_evaluation_keeps_nothing_and_reducing_gradients_takes_no_time_unless_measured() -> None:
    assert simulate(forward_only(gpipe(2, 3)), UnitCost()).peak_memory == (0, 0)
    plain = gpipe(2, 2)
    reduced = replace(plain, actions=tuple((*row, Action(Op.REDUCE_GRAD, g)) for g, row in enumerate(plain.actions)))
    assert simulate(reduced, UnitCost()).makespan == simulate(plain, UnitCost()).makespan == 9


@given(unequal_times(), st.integers(1, 3), st.integers(0, 3), st.data())
def test_measured_costs_give_the_run_again(
    times: tuple[list[list[int]], list[list[int]]], num_microbatches: int, ahead: int, data: st.DataObject
) -> None:
    num_bytes = [data.draw(POSITIVE) for _ in times[0][0]]
    cost = TableCost(table(*times), num_bytes, latency=2, bandwidth=Fraction(2))
    lowered = add_communication(one_f_one_b(len(times[0]), num_microbatches, len(num_bytes)), ahead)
    run = simulate(lowered, cost)
    again = simulate(lowered, MeasuredCost(run))
    assert again.compute_spans == run.compute_spans


def test_measured_costs_leave_out_what_the_executor_added() -> None:
    """Each of ten actions took 3 seconds and 0.5 more went by before the next."""
    schedule = gpipe(1, 5)
    spans = simulate(schedule, UnitCost(forward=3, backward=3)).spans
    slow = Timeline(tuple(replace(s, start=s.start + n / 2, end=s.end + n / 2) for n, s in enumerate(spans)), 1)
    assert slow.makespan == 34.5
    assert simulate(schedule, MeasuredCost(slow)).makespan == 30


def test_costs_that_are_missing_are_named() -> None:
    schedule = gpipe(2, 1, 2)
    with pytest.raises(SlipstreamError, match=r"No time for 0F0\.1: add times\[0, 1, Op\.F\]"):
        simulate(schedule, TableCost({(0, 0, Op.F): 1}))
    with pytest.raises(SlipstreamError, match=r"0F0\.0 did not run in the measured timeline"):
        simulate(schedule, MeasuredCost(Timeline((), 2)))
    for bandwidth, num_bytes in ((0, [1]), (-1, [1]), (1, [])):
        with pytest.raises(SlipstreamError, match=f"bandwidth={bandwidth}"):
            TableCost({}, num_bytes, bandwidth=bandwidth)


def test_a_ranks_copies_take_turns_while_it_computes() -> None:
    """F0 OFFLOAD0 F1 OFFLOAD1 F2 OFFLOAD2 F3 RELOAD2 B3 RELOAD1 B2 RELOAD0 B1 B0: copies end at 5, 9, ... and 25."""
    schedule = add_offload(gpipe(1, 1, 4))
    cost = TableCost(table([[1] * 4], [[2] * 4]), copies={(0, index): 4 for index in range(4)})
    assert simulate(schedule, replace(cost, copies={})).makespan == 12
    ends = {span.action: span.end for span in simulate(schedule, cost).spans}
    assert [ends[Action(Op.F, 0, 0, index)] for index in range(4)] == [1, 2, 3, 4]
    assert [ends[Action(Op.B, 0, 0, index)] for index in (3, 2, 1, 0)] == [6, 19, 23, 27]


@st.composite
def planned_schedules(draw: st.DrawFn) -> Schedule:
    """As plans have them, recomputed and offloaded in part."""
    named = draw(named_schedules())
    shape = ScheduleShape(
        named.name, named.num_ranks, named.num_microbatches, named.num_slices, named.num_stages // named.num_ranks
    )
    return cached_schedule(shape, draw(st.booleans()), draw(st.sampled_from([0.0, 0.5, 1.0]))).schedule


@pytest.mark.parametrize(
    "strategy", [planned_schedules(), named_schedules(most=7, ragged=True)], ids=["planned", "ragged"]
)
@examples(150)
@given(data=st.data(), seed=st.integers(0, 2**32))
def test_every_action_ends_when_it_does_in_the_simulator(
    strategy: st.SearchStrategy[Schedule], data: st.DataObject, seed: int
) -> None:
    """Random times of stages, slices, links and copies to the host, of all microbatches or of each.

    Receives posted at the start make the lowered schedule take as long.
    """
    schedule = data.draw(strategy)
    rng, stages = random.Random(seed), range(schedule.num_stages)
    latency, bandwidth = rng.choice([0, rng.random()]), rng.choice([None, 0.5, 5.0])

    def random_cost(slices: int) -> TableCost:
        return TableCost(
            times={(g, s, op): rng.random() for g in stages for s in range(slices) for op in Op},
            message_bytes=[rng.random() for _ in range(slices)],
            latency=latency,
            bandwidth=bandwidth,
            copies={(g, s): 2 * rng.random() for g in stages for s in range(slices)},
        )

    alike = not schedule.is_ragged and rng.random() < 0.5
    cost = random_cost(schedule.num_slices) if alike else MicrobatchCost([*map(random_cost, schedule.slice_counts)])
    ends, seconds = end_times(ActionArrays.of(schedule, alike=alike), cost)
    timeline = simulate(schedule, cost)
    actions = [action for row in schedule.actions for action in row]
    assert ends.tolist() == pytest.approx([timeline.span_of[action].end for action in actions], rel=1e-12)
    assert seconds.tolist() == [cost.seconds(action) for action in actions]
    assert timeline.schedule.slice_counts == schedule.slice_counts
    late = simulate(add_communication(schedule, ahead=10**6), cost)
    assert late.makespan == pytest.approx(timeline.makespan)


@examples(60)
@given(planned_schedules(), st.integers(0, 2**32), st.sampled_from(["whole", "spread", "embedding too"]))
def test_arrays_give_the_step_and_its_activations_as_objects_do(schedule: Schedule, seed: int, head: str) -> None:
    """Of a spread head too, whose results go to ranks that aren't equally far."""
    pick = random.Random(seed)
    if head != "whole" and not schedule.num_frozen_stages:
        schedule = spread_vocabulary(schedule, embedding=head == "embedding too")
    units = list(product(range(schedule.num_stages), range(schedule.num_slices)))
    cost = TableCost(
        {(*unit, op): pick.uniform(0.1, 2) for unit in units for op in Op},
        message_bytes=[pick.uniform(0.1, 1) for _ in range(schedule.num_slices)],
        bandwidth=1.0,
        activations={unit: pick.uniform(1, 2) for unit in units},
        kept={unit: pick.uniform(0, 1) for unit in units},
        copies={unit: pick.uniform(0, 1) for unit in units},
    )
    timeline = simulate(schedule, cost)
    assert step_seconds(schedule, cost) == timeline.makespan
    assert activation_peaks(schedule, cost) == pytest.approx(timeline.peak_memory, rel=1e-12)
    lowered = add_communication(schedule)
    assert step_seconds(lowered, cost) == simulate(lowered, cost).makespan


def test_a_step_whose_ranks_get_stuck_has_no_seconds() -> None:
    plain = gpipe(1, 1, 2)
    first, second, *backwards = plain.actions[0]
    with pytest.raises(ScheduleError, match=r"0F0\.1 \(rank 0\) waits for 0F0\.0"):
        step_seconds(replace(plain, actions=((second, first, *backwards),)), UnitCost())
    with pytest.raises(ScheduleError, match=r"0B0\.1 waits for 0F0\.1, which the schedule lacks"):
        step_seconds(replace(plain, actions=((first, *backwards),)), UnitCost())


@examples(60)
@given(planned_schedules(), st.integers(0, 2**32))
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
