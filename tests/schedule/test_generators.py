"""Generated schedules are valid, look like their docstrings, and have their papers' bubbles and peaks."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from slipstream.schedule import (
    SCHEDULES,
    Schedule,
    ScheduleError,
    breadth_first,
    gpipe,
    interleaved_one_f_one_b,
    make_schedule,
    one_f_one_b,
    v_half,
    v_min,
    validate,
    zb_h1,
    zb_h2,
    zb_v,
)
from slipstream.simulator import simulate
from slipstream.simulator.costs import UnitCost
from support.examples import examples
from support.torch_schedules import torch_schedule

PICTURED = {
    "gpipe": (2, 2, 2),
    "1f1b": (2, 2, 2),
    "interleaved-1f1b": (2, 4, 1, 2),
    "breadth-first": (2, 3, 1, 2),
    "zb-h1": (2, 2, 2),
    "zb-h2": (2, 2, 2),
    "zb-v": (2, 3, 1),
    "v-half": (3, 3, 1),
    "v-min": (3, 3, 1),
}


def picture(function: Callable[..., Any]) -> str:
    """The lines of the docstring that begin with `rank`."""
    lines = [line for line in inspect.getdoc(function).splitlines() if line.startswith("    rank ")]
    return textwrap.dedent("\n".join(lines))


def test_rows_of_numbers_are_what_a_user_would_write() -> None:
    schedule = make_schedule("zb-v", 3, 2, 2, 2)
    written = replace(schedule, actions=tuple(schedule.actions))
    assert isinstance(written.actions, tuple)
    assert schedule == written == Schedule.parse(str(schedule))
    assert written == schedule
    assert (hash(schedule), schedule.checksum, schedule.kinds) == (hash(written), written.checksum, written.kinds)
    assert schedule != replace(written, actions=written.actions[::-1])


@pytest.mark.parametrize(("name", "counts"), PICTURED.items(), ids=PICTURED)
def test_the_docstrings_picture_is_the_timeline(name: str, counts: tuple[int, ...]) -> None:
    timeline = simulate(SCHEDULES[name].make(*counts), UnitCost(backward=1))
    assert picture(SCHEDULES[name].make) == timeline.to_text()


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_of_small_counts_is_valid(name: str) -> None:
    for p in range(1, 5):
        for m in range(1, 5):
            for s in range(1, 4):
                for v in (v for v in (1, 2, 3) if v in SCHEDULES[name].stages_per_rank):
                    schedule = make_schedule(name, p, m, s, v)
                    validate(schedule)
                    assert make_schedule(name, p, m, [s] * m, v) == schedule
                    assert (schedule.name, schedule.num_ranks, schedule.num_stages) == (name, p, p * v)
                    assert (schedule.num_microbatches, schedule.num_slices) == (m, s)


def test_without_a_second_stage_interleaving_is_1f1b_and_breadth_first_is_gpipe_turned_round() -> None:
    for p, m, s in [(1, 2, 3), (3, 4, 1), (4, 3, 5), (4, 2, 1)]:
        assert interleaved_one_f_one_b(p, m, s, 1, lead=1).actions == SCHEDULES["1f1b"].make(p, m, s).actions
        forward = [row[: m * s] for row in SCHEDULES["gpipe"].make(p, m, s).actions]
        assert [row[: m * s] for row in SCHEDULES["breadth-first"].make(p, m, s, 1).actions] == forward


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("counts", [(0, 1, 1), (1, 0, 1), (1, 1, -2)])
def test_counts_below_one_are_refused(name: str, counts: tuple[int, int, int]) -> None:
    with pytest.raises(ScheduleError, match=rf"^{name} needs at least 1 of \w+, not (0|-2)\.$"):
        SCHEDULES[name].make(*counts)


@pytest.mark.parametrize("lead", [0, 3])
def test_other_leads_are_refused(lead: int) -> None:
    with pytest.raises(ScheduleError, match=f"lead={lead}: give 2, .* or 1"):
        interleaved_one_f_one_b(2, 2, 2, 2, lead=lead)


@pytest.mark.parametrize(
    ("name", "stages_per_rank", "message"),
    [
        ("1f2b", 1, "schedule='1f2b' is not known; did you mean '1f1b'? Choose one of gpipe, 1f1b, "),
        ("ZB-V", 2, "schedule='ZB-V' is not known; did you mean 'zb-v'?"),
        ("interleaved", 2, "did you mean 'interleaved-1f1b'?"),
        ("?", 1, "schedule='?' is not known. Choose one of gpipe, "),
        ("gpipe", 2, "stages_per_rank=2, but the schedule 'gpipe' has exactly 1. Give stages_per_rank=1, "),
        ("1f1b", 3, "or a schedule that can have 3: interleaved-1f1b, breadth-first."),
        ("v-min", 1, "stages_per_rank=1, but the schedule 'v-min' has exactly 2. Give stages_per_rank=2"),
        (
            "breadth-first",
            0,
            "stages_per_rank=0, but the schedule 'breadth-first' has at least 1. Give stages_per_rank=1",
        ),
    ],
)
def test_what_a_name_does_not_allow_is_refused(name: str, stages_per_rank: int, message: str) -> None:
    with pytest.raises(ScheduleError, match=re.escape(message)):
        make_schedule(name, 2, 2, 2, stages_per_rank)


def orders_of_several_stages(
    name: str, num_ranks: int, stages_per_rank: int, num_microbatches: int
) -> tuple[list[list[str]], list[int]]:
    """The order that PyTorch's multi-stage schedule makes for every rank, and the rank of every stage."""
    theirs = torch_schedule(name, num_ranks, stages_per_rank, num_microbatches)
    orders = [[str(action) for action in theirs.pipeline_order[rank] if action] for rank in range(num_ranks)]
    return orders, [theirs.stage_index_to_group_rank[g] for g in range(num_ranks * stages_per_rank)]


def orders(schedule: Schedule) -> list[list[str]]:
    return [[schedule.text(action) for action in row] for row in schedule.actions]


@pytest.mark.parametrize(
    ("name", "generator", "stages_per_rank"),
    [
        *(("ScheduleInterleaved1F1B", interleaved_one_f_one_b, v) for v in (1, 2, 3, 4)),
        *(("ScheduleLoopedBFS", breadth_first, v) for v in (1, 2, 3, 4)),
        ("ScheduleInterleavedZeroBubble", lambda p, m, s, v: zb_h1(p, m, s), 1),
        ("ScheduleZBVZeroBubble", lambda p, m, s, v: zb_v(p, m, s), 2),
    ],
)
def test_several_stages_a_rank_and_split_backwards(
    name: str, generator: Callable[..., Schedule], stages_per_rank: int
) -> None:
    compared = 0
    for p in range(1, 7):
        for m in range(1, 14):
            if name.startswith("ScheduleInterleaved") and m % max(1, m // p):
                continue  # PyTorch refuses microbatches that don't form equal groups
            schedule = generator(p, m, 1, stages_per_rank)
            expected, placement = orders_of_several_stages(name, p, stages_per_rank, m)
            assert orders(schedule) == expected, (p, m)
            assert list(schedule.placement) == placement
            compared += 1
    assert compared > 40


ranks, microbatches, slices, stages = st.integers(1, 8), st.integers(1, 8), st.integers(1, 6), st.integers(1, 4)
leads = st.sampled_from([1, 2])
times = st.fractions(Fraction(1, 4), 4, max_denominator=6)
exactly = examples(40)
EQUAL = (Fraction(1), Fraction(1), Fraction(1))


def kept(schedule: Schedule) -> list[Fraction]:
    """Peak activations of each rank in microbatches, one microbatch being 1 on a rank's stages together."""
    of_a_pass = Fraction(schedule.num_ranks, schedule.num_stages * schedule.num_slices)
    return list(map(Fraction, simulate(schedule, UnitCost(activation=of_a_pass)).peak_memory))  # type: ignore[arg-type]


def step(schedule: Schedule, f: Fraction, i: Fraction, w: Fraction) -> Fraction:
    cost = UnitCost(forward=f, backward=i + w, input_gradient=i, weight_gradient=w)  # type: ignore[arg-type]
    return Fraction(simulate(schedule, cost).makespan)


@exactly
@given(ranks, microbatches, slices, times, times)
def test_gpipe_and_1f1b(p: int, m: int, s: int, f: Fraction, b: Fraction) -> None:
    for generator in (gpipe, one_f_one_b):
        assert step(generator(p, m, s), f, b, Fraction(0)) == (m * s + p - 1) * (f + b)
    assert kept(gpipe(p, m, s)) == [m] * p
    assert kept(one_f_one_b(p, m, s)) == [min(1 + Fraction(p - 1 - r, s), m) for r in range(p)]


def test_the_bubble_fraction_is_what_the_simulator_reports() -> None:
    assert simulate(one_f_one_b(4, 2, 3), UnitCost(backward=1)).idle_fraction == pytest.approx(3 / 9)
    assert simulate(interleaved_one_f_one_b(4, 2, 4, 3), UnitCost()).idle_fraction == pytest.approx(3 / 27)


@exactly
@given(ranks, microbatches, slices, stages, leads, st.sampled_from([1, 2, Fraction(1, 2)]))
def test_interleaving(p: int, m: int, s: int, v: int, lead: int, b: Fraction) -> None:
    schedule = interleaved_one_f_one_b(p, m, s, v, lead)
    if m * s >= p or v == 1:
        assert step(schedule, Fraction(1), Fraction(b), Fraction(0)) == (m * s * v + p - 1) * (1 + b)
    group = -(-m // max(m * s // (-(-p // s) * s), 1))  # microbatches of the first group: at least p slices
    if s >= p:
        assert group == 1
    peaks = [1 + (group - 1) * Fraction(v - 1, v) + Fraction(lead * (p - 1 - r), s * v) for r in range(p)]
    assert kept(schedule) == [min(peak, m) for peak in peaks]


@exactly
@given(ranks, microbatches, slices, stages)
def test_breadth_first(p: int, m: int, s: int, v: int) -> None:
    schedule = breadth_first(p, m, s, v)
    assert kept(schedule) == [m] * p
    assume(m * s >= p)
    assert step(schedule, Fraction(1), Fraction(1), Fraction(0)) == (m * s * v + p - 1) * 2


@exactly
@given(ranks, microbatches, slices, times, times, times)
def test_zb_h1(p: int, m: int, s: int, f: Fraction, i: Fraction, w: Fraction) -> None:
    """The paper's bubble, (p-1)(F+I-W), with the memory of 1F1B's first rank on every rank."""
    w = min(f, i, w)
    schedule = zb_h1(p, m, s)
    peaks = kept(schedule)
    assert max(peaks) == peaks[0] == kept(one_f_one_b(p, m, s))[0]
    if m * s >= p + s - 1:
        assert step(schedule, f, i, w) == m * s * (f + i + w) + (p - 1) * (f + i - w)
        assert peaks == [1 + Fraction(p - 1, s)] * p


@exactly
@given(ranks, st.integers(1, 14), slices)
def test_zb_h2(p: int, m: int, s: int) -> None:
    """No bubble when all passes take the same time; 2p-1 microbatches of one slice on every rank."""
    schedule = zb_h2(p, m, s)
    peaks = kept(schedule)
    assert max(peaks) <= min(1 + Fraction(2 * (p - 1), s), m)
    if m * s >= 2 * (p - 1) + s:
        assert step(schedule, *EQUAL) == 3 * m * s + p - 1
        assert peaks == [1 + Fraction(2 * (p - 1), s)] * p


@exactly
@given(ranks, st.integers(1, 14), slices)
def test_zb_v(p: int, m: int, s: int) -> None:
    """No bubble when all passes take the same time, with the memory of 1F1B's first rank on every rank."""
    schedule = zb_v(p, m, s)
    peaks = kept(schedule)
    assert max(peaks) <= min(1 + Fraction(p - 1, s), m)
    if m * s >= 2 * (p - 1) + s:
        assert step(schedule, *EQUAL) == 6 * m * s + p - 1
        assert peaks == [1 + Fraction(p - 1, s)] * p


@examples(30)
@given(st.integers(2, 10), st.integers(1, 14), st.integers(1, 5))
def test_v_half_and_v_min(p: int, m: int, s: int) -> None:
    """Half and a third of 1F1B's activations, as docstrings bound them; 1F1B waits 6(p-1) in these units."""
    half, least = v_half(p, m, s), v_min(p, m, s)
    assert max(kept(half)) <= min(1 + Fraction(p // 2, s), m)
    assert max(kept(least)) <= min(1 + Fraction(1 + 2 * p // 3, 2 * s), m)
    bubble = {name: step(x, *EQUAL) - 6 * m * s for name, x in (("half", half), ("min", least))}
    assert bubble["min"] <= 4 * p - 5
    assert bubble["half"] <= 4 * p - 5
    if m * s >= p + s - 1:
        assert bubble["half"] <= 3 * p - 4
        assert max(kept(half)) == 1 + Fraction(p // 2, s)


@pytest.mark.parametrize("p", [2, 4, 8, 16])
def test_v_half_and_v_min_reach_their_bounds_with_one_slice(p: int) -> None:
    m = 2 * p
    first = kept(one_f_one_b(p, m))[0]
    assert max(kept(v_half(p, m))) == 1 + Fraction(p, 2) == first / 2 + 1
    assert max(kept(v_min(p, m))) == Fraction(3 + 2 * p // 3, 2) <= first / 3 + Fraction(3, 2)
    assert step(v_half(p, m), *EQUAL) == 6 * m + max(3 * p - 7, 1)
