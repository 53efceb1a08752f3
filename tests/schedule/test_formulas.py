"""The simulated bubbles and peaks of every schedule are the formulas of its paper."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from slipstream.schedule import (
    Schedule,
    breadth_first,
    gpipe,
    interleaved_one_f_one_b,
    one_f_one_b,
    v_half,
    v_min,
    zb_h1,
    zb_h2,
    zb_v,
)
from slipstream.simulator import simulate
from slipstream.simulator.costs import UnitCost
from support.examples import examples

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
