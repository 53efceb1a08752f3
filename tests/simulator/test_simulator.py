"""The simulator equals closed formulas exactly: bubbles, peaks, flow shops and links."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.errors import SlipstreamError
from slipstream.schedule import Action, Op, Schedule, ScheduleError, add_communication, forward_only, gpipe, one_f_one_b
from slipstream.simulator import simulate
from slipstream.simulator.costs import MeasuredCost, TableCost, UnitCost
from slipstream.timeline import Timeline
from support.parameters import each_once

COUNTS = list(product(range(1, 9), range(1, 7), range(1, 7)))  # ranks p, microbatches m, slices s
POSITIVE = st.integers(1, 50)


def unit_cost(forward: int, backward: int, num_slices: int) -> UnitCost:
    """Exact times, and activations in microbatches."""
    return UnitCost(Fraction(forward), Fraction(backward), activation=Fraction(1, num_slices))


@pytest.mark.parametrize(
    ("generator", "forward", "backward"), each_once([gpipe, one_f_one_b], [(1, 2), (5, 3), (1, 1)])
)
def test_bubble_and_peaks(generator: Callable[..., Schedule], forward: int, backward: int) -> None:
    for p, m, s in COUNTS:
        timeline = simulate(generator(p, m, s), unit_cost(forward, backward, s))
        assert timeline.idle_fraction == Fraction(p - 1, m * s + p - 1)
        assert timeline.makespan == (m * s + p - 1) * (forward + backward)
        peaks = [m if generator is gpipe else min(1 + Fraction(p - 1 - r, s), m) for r in range(p)]
        assert list(timeline.peak_memory) == peaks
        if generator is one_f_one_b and s == 1:
            assert peaks == [min(m, p - r) for r in range(p)]
        assert all(steps[-1][1] == 0 for steps in timeline.memory)


@pytest.mark.parametrize("generator", [gpipe, one_f_one_b])
def test_lowered_schedules_have_the_same_bubble_and_peaks(generator: Callable[..., Schedule]) -> None:
    for p, m, s in [(1, 2, 2), (2, 1, 6), (3, 4, 1), (4, 2, 4), (8, 3, 2)]:
        schedule, cost = generator(p, m, s), unit_cost(1, 2, s)
        lowered = simulate(add_communication(schedule), cost)
        assert lowered.compute_spans == simulate(schedule, cost).spans
        assert lowered.idle_fraction == Fraction(p - 1, m * s + p - 1)


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


@given(st.lists(st.tuples(POSITIVE, POSITIVE), min_size=1, max_size=6), st.integers(1, 6), st.integers(1, 3))
def test_flush_over_identical_stages(slices: list[tuple[int, int]], num_stages: int, num_microbatches: int) -> None:
    """sum(f) + sum(b) + (K-1)(max f + max b)."""
    f, b = map(list, zip(*slices, strict=True))
    schedule = gpipe(num_stages, num_microbatches, len(slices))
    timeline = simulate(schedule, TableCost(table([f] * num_stages, [b] * num_stages)))
    assert timeline.makespan == num_microbatches * sum(f + b) + (num_stages - 1) * (max(f) + max(b))
    latency = simulate(schedule, TableCost(table([f] * num_stages, [b] * num_stages), latency=7))
    assert latency.makespan == timeline.makespan + 2 * 7 * (num_stages - 1)


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


def test_memory_of_a_split_backward_is_freed_by_the_weight_gradient() -> None:
    schedule = Schedule.parse(
        "schedule: split\nplacement: 0\nmicrobatches: 2\nslices: 1\nrank 0: 0F0 0I0 0F1 0W0 0I1 0W1"
    )
    timeline = simulate(schedule, UnitCost(activation=10))
    assert timeline.memory == (((0, 10), (2, 20), (4, 10), (6, 0)),)
    assert timeline.peak_memory == (20,)


def test_evaluation_keeps_nothing() -> None:
    assert simulate(forward_only(gpipe(2, 3)), UnitCost()).peak_memory == (0, 0)


def test_a_deadlock_names_its_cycle() -> None:
    schedule = Schedule.parse(
        "schedule: stuck\nplacement: 0 1\nmicrobatches: 2\nslices: 1\nrank 0: 0F0 0B0 0F1 0B1\nrank 1: 1F1 1F0 1B0 1B1"
    )
    with pytest.raises(ScheduleError, match=r"0B0 \(rank 0\) waits for 1B0.*\n.*1F1 \(rank 1\) waits for 0F1"):
        simulate(schedule, UnitCost())


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


def test_gradient_reduction_takes_no_time_unless_measured() -> None:
    rows = tuple((*row, Action(Op.REDUCE_GRAD, g)) for g, row in enumerate(gpipe(2, 2).actions))
    schedule = replace(gpipe(2, 2), actions=rows)
    assert simulate(schedule, UnitCost()).makespan == simulate(gpipe(2, 2), UnitCost()).makespan == 9


def test_sixteen_ranks_microbatches_and_slices_take_well_under_a_second() -> None:
    schedule = one_f_one_b(16, 16, 16)
    start = time.process_time()
    simulate(schedule, UnitCost())
    assert time.process_time() - start < 1
