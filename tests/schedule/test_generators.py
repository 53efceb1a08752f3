"""Generated schedules are valid, look like their docstrings, and have their papers' bubbles and peaks."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable
from fractions import Fraction
from functools import partial
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from slipstream.planner.order.order_search import step_lower_bound
from slipstream.schedule import (
    SCHEDULES,
    Op,
    Schedule,
    ScheduleError,
    add_communication,
    add_reductions,
    breadth_first,
    forward_only,
    gpipe,
    in_flushes,
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
from support.schedules import torch_orders

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


@pytest.mark.parametrize(
    ("function", "schedule"),
    [
        *((SCHEDULES[name].make, SCHEDULES[name].make(*counts)) for name, counts in PICTURED.items()),
        (in_flushes, in_flushes(gpipe(2, 2), 2)),
    ],
    ids=[*PICTURED, "flushes"],
)
def test_the_docstrings_picture_is_the_timeline(function: Callable[..., Any], schedule: Schedule) -> None:
    assert picture(function) == simulate(schedule, UnitCost(backward=1)).to_text()


def test_the_docstrings_picture_is_the_schedule() -> None:
    """Of what is added to one: messages to all of it, and to its backwards the reductions of gradients."""
    assert str(add_communication(forward_only(gpipe(2, 1, 3)))).endswith(picture(add_communication))
    reduced = add_reductions(one_f_one_b(2, 2, 1))
    backwards = [[a for a in row if a.op in (Op.B, Op.REDUCE_GRAD)] for row in reduced.actions]
    assert [line.split()[2:] for line in picture(add_reductions).splitlines()] == [
        [str(a) if a.op is Op.REDUCE_GRAD else reduced.text(a)[1:] for a in row] for row in backwards
    ]


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


TWO = partial(make_schedule, num_ranks=2, num_microbatches=2, num_slices=2)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        *(
            (partial(SCHEDULES[name].make, *counts), rf"^{name} needs at least 1 of \w+, not (0|-2)\.$")
            for name in SCHEDULES
            for counts in ((0, 1, 1), (1, 0, 1), (1, 1, -2))
        ),
        (partial(make_schedule, "gpipe", 2, 2, [2, 0]), r"gpipe needs at least 1 of slices, not 0\."),
        (partial(make_schedule, "1f1b", 2, 3, [2, 1]), r"1f1b has 3 microbatches, but num_slices=\[2, 1\] are 2"),
        *((partial(interleaved_one_f_one_b, 2, 2, 2, 2, lead=n), f"lead={n}: give 2, .* or 1") for n in (0, 3)),
        (partial(TWO, "1f2b"), "='1f2b' is not known; did you mean '1f1b'. Choose one of gpipe, 1f1b, "),
        (partial(TWO, "ZB-V", stages_per_rank=2), "schedule='ZB-V' is not known; did you mean 'zb-v'"),
        (partial(TWO, "interleaved", stages_per_rank=2), "did you mean 'interleaved-1f1b'"),
        (partial(TWO, "?"), r"schedule='\?' is not known\. Choose one of gpipe, "),
        (
            partial(TWO, "gpipe", stages_per_rank=2),
            "stages_per_rank=2, but the schedule 'gpipe' has exactly 1. Give stages_per_rank=1, ",
        ),
        (partial(TWO, "1f1b", stages_per_rank=3), "or a schedule that can have 3: interleaved-1f1b, breadth-first."),
        (partial(TWO, "v-min", stages_per_rank=1), "schedule 'v-min' has exactly 2. Give stages_per_rank=2"),
        (partial(TWO, "breadth-first", stages_per_rank=0), "'breadth-first' has at least 1. Give stages_per_rank=1"),
    ],
)
def test_what_is_not_allowed_is_refused(make: Callable[[], Schedule], message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        make()


@pytest.mark.parametrize(
    ("name", "generator", "stages_per_rank"),
    [
        *(("ScheduleInterleaved1F1B", interleaved_one_f_one_b, v) for v in (1, 2, 3, 4)),
        *(("ScheduleLoopedBFS", breadth_first, v) for v in (1, 2, 3, 4)),
        ("ScheduleInterleavedZeroBubble", lambda p, m, s, v: zb_h1(p, m, s), 1),
        ("ScheduleZBVZeroBubble", lambda p, m, s, v: zb_v(p, m, s), 2),
    ],
)
def test_the_order_is_pytorchs(name: str, generator: Callable[..., Schedule], stages_per_rank: int) -> None:
    compared = 0
    for p in range(1, 7):
        for m in range(1, 18):
            if name.startswith("ScheduleInterleaved") and m % max(1, m // p):
                continue  # PyTorch refuses microbatches that don't form equal groups
            if name == "ScheduleZBVZeroBubble" and m <= max(p, 2 * (p - 1)):
                continue  # too few to fill the pipeline, and ours is shorter
            schedule = generator(p, m, 1, stages_per_rank)
            ours = [[schedule.text(action) for action in row] for row in schedule.actions]
            assert (ours, [*schedule.placement]) == torch_orders(name, p, stages_per_rank, m), (p, m)
            compared += 1
    assert compared > 35


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
        assert peaks == [1 + Fraction(p - 1, s)] * p
    if m * s >= p + s:
        assert step(schedule, *EQUAL) == 6 * m * s + p - 1
    else:
        assert step(schedule, *EQUAL) == step_lower_bound(schedule.placement, m, s, UnitCost(backward=2))


@pytest.mark.parametrize(("p", "m", "s", "others"), [(10, 11, 1, 100), (6, 4, 2, Fraction("66.7")), (8, 3, 4, 99)])
def test_zb_v_with_few_slices_suits_attention_too(p: int, m: int, s: int, others: Fraction) -> None:
    """Whose I is long and W short. `others` is the time with the first slices of a full pipeline in place of the last,
    or with V-Half's block."""
    assert step(zb_v(p, m, s), Fraction(1), Fraction("1.7"), Fraction("0.5")) < others


@examples(30)
@given(st.integers(2, 10), st.integers(1, 14), st.integers(1, 5))
def test_v_half_and_v_min(p: int, m: int, s: int) -> None:
    """Half and a third of 1F1B's activations, as docstrings bound them; 1F1B waits 6(p-1) in these units."""
    half, least = v_half(p, m, s), v_min(p, m, s)
    assert max(kept(half)) <= min(1 + Fraction(p // 2, s), m)
    assert max(kept(least)) <= min(1 + Fraction((p + 1) // 3, s), m)
    bubble = {name: step(x, *EQUAL) - 6 * m * s for name, x in (("half", half), ("min", least))}
    assert bubble["min"] <= 4 * p - 5
    assert bubble["half"] <= 4 * p - 5
    if m * s >= p + s - 1:
        assert bubble["half"] <= 3 * p - 4
        assert max(kept(half)) == 1 + Fraction(p // 2, s)


@pytest.mark.parametrize(("p", "held"), [(2, 4), (3, 4), (4, 4), (5, 6), (6, 6), (7, 6), (8, 8), (12, 10)])
def test_v_min_holds_as_few_stages_as_its_inventors_generator(p: int, held: int) -> None:
    """Activations of one slice and stage, measured with `zbv_greedy.py` of sail-sg/zero-bubble-pipeline-parallelism."""
    assert 2 * max(kept(v_min(p, 3 * p))) == held


@pytest.mark.parametrize("p", [2, 4, 8, 16])
def test_v_half_and_v_min_reach_their_bounds_with_one_slice(p: int) -> None:
    m = 2 * p
    first = kept(one_f_one_b(p, m))[0]
    assert max(kept(v_half(p, m))) == 1 + Fraction(p, 2) == first / 2 + 1
    assert max(kept(v_min(p, m))) == 1 + (p + 1) // 3 <= first / 3 + Fraction(4, 3)
    assert step(v_half(p, m), *EQUAL) == 6 * m + max(3 * p - 7, 1)
