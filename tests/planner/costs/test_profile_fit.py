"""TeraPipe's time model is recovered from synthetic times of exactly its form."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.cost.fit import AttentionWindow, SlicePoint, TimeFit, find_window, fit_nonnegative, fit_times
from slipstream.errors import SlipstreamError

LENGTHS = (1, 16, 64, 128, 256)
CONTEXTS = (0, 32, 128, 300, 512)
POINTS = [(i, j) for i in LENGTHS for j in CONTEXTS]
WINDOWS = [
    AttentionWindow(),
    AttentionWindow("sliding", 7),
    AttentionWindow("blockwise", 16),
    AttentionWindow("sliding", 100),
    AttentionWindow("blockwise", 10),
]


def relative_errors(fit: TimeFit, seconds: Mapping[SlicePoint, float]) -> dict[SlicePoint, float]:
    """|t(i, j) - measured| / measured at every point."""
    return {point: abs(fit(*point) - measured) / measured for point, measured in seconds.items()}


def base(length: int) -> float:
    """Flat for short slices as on a GPU, then a line: what no polynomial in i would fit."""
    return 1e-3 * max(1.0, length / 64)


def linear(i: int, j: int) -> float:
    """An exact instance of t(i, j)."""
    return base(i) + (2e-4 + 3e-7 * i + 5e-8 * j + 7e-9 * i * j if j else 0.0)


def count_scores(window: AttentionWindow, length: int, context: int) -> int:
    """By walking over the queries."""
    return sum(q - window.first(q) + 1 for q in range(context, context + length))


def test_the_fit_recovers_the_model_exactly() -> None:
    """At points that weren't measured too; of arrays as of single ones."""
    fit = fit_times({point: linear(*point) for point in POINTS})
    assert fit.coefficients == pytest.approx((2e-4, 3e-7, 5e-8, 7e-9), rel=1e-6)
    unseen = {(i, j): linear(i, j) for i in LENGTHS for j in (1, 77, 200, 1000)}
    assert max(relative_errors(fit, unseen).values()) < 1e-9
    assert fit(64, 0) == pytest.approx(base(64), rel=1e-12)  # the table itself
    lengths, contexts = (1, 64, 100), (0, 5, 300)
    table = fit(np.array(lengths)[:, None], np.array(contexts))
    assert table.tolist() == [[fit(i, j) for j in contexts] for i in lengths]


def test_between_lengths_attention_grows_with_the_square() -> None:
    """As the straight line between two lengths doesn't: 640 tokens, of which none were measured."""

    def attention(i: int, j: int) -> float:
        return 1e-3 + 2e-5 * i + 1e-8 * (i * (i + 1) / 2 + i * j)

    fit = fit_times({(i, j): attention(i, j) for i, j in itertools.product((64, 512, 1024), (0, 512, 1024))})
    for i, j in ((100, 0), (640, 0), (640, 300), (1000, 2048)):
        assert fit(i, j) == pytest.approx(attention(i, j), rel=1e-9)


def test_between_lengths_the_table_is_a_straight_line_without_attention() -> None:
    fit = fit_times({(10, 0): 1.0, (20, 0): 3.0, (40, 0): 4.0})
    assert [fit(i, 0) for i in (10, 15, 20, 30, 40)] == pytest.approx([1.0, 2.0, 3.0, 3.5, 4.0])
    assert fit(15, 100) == fit(15, 0)  # without a measured context only the table is left
    assert fit_times({(4, 0): 1.0}) == TimeFit((4,), (1.0,), (AttentionWindow(),), (0.0,) * 4)


@pytest.mark.parametrize(
    ("refused", "message"),
    [
        (lambda: fit_times({(10, 0): 1.0, (40, 0): 4.0})(9, 0), "10 to 40 were measured"),
        (lambda: fit_times({(10, 0): 1.0, (40, 0): 4.0})(41, 0), "10 to 40 were measured"),
        (lambda: fit_times({(4, 2): 1.0}), r"add points \(length, 0\)"),
        (lambda: find_window({100: 90, 99: 40}), "neither full attention, a sliding window nor blocks"),
    ],
)
def test_what_was_not_measured_or_is_not_known_is_refused(refused: Callable[[], object], message: str) -> None:
    with pytest.raises(SlipstreamError, match=message):
        refused()


def test_the_error_that_is_minimised_is_relative() -> None:
    """Noise of 1% on times over three decades leaves about 1% everywhere, in short slices too."""
    noise = random.Random(0)
    noisy = {(i, j): linear(i, j) * (1 + noise.uniform(-0.01, 0.01)) for i in LENGTHS for j in range(0, 8000, 250)}
    errors = relative_errors(fit_times(noisy), {(i, j): linear(i, j) for i in LENGTHS for j in (100, 1100, 7000)})
    assert max(errors.values()) < 0.02


@given(st.integers(0, 10_000))
def test_noise_makes_no_slice_cheaper_after_a_context(seed: int) -> None:
    """Where few points were measured, of something that takes as long after any context: a long slice after a short
    one, which wasn't, takes as long too, within the noise."""
    noise = random.Random(seed)
    measured = [(64, 0), (128, 0), (256, 0), (512, 0), (1024, 0), (64, 1024), (128, 512), (128, 1920), (512, 512)]
    fit = fit_times({(i, j): i * (1 + noise.uniform(-0.1, 0.1)) for i, j in measured})
    assert min(fit.base + fit.coefficients) >= 0
    assert fit(960, 64) >= fit(960, 0) > 0.88 * 960


@given(st.integers(0, 10_000), st.integers(1, 6))
def test_coefficients_are_the_best_that_are_not_negative(seed: int, num_columns: int) -> None:
    """The gradient is 0 where a coefficient is free, and points below 0 where it isn't (Karush, Kuhn, Tucker)."""
    numbers = np.random.default_rng(seed)
    columns, wanted = numbers.normal(size=(12, num_columns)), numbers.normal(size=12)
    found = fit_nonnegative(columns, wanted)
    gradient = columns.T @ (wanted - columns @ found)
    assert found.min() >= 0
    assert gradient.max() < 1e-9
    assert np.abs(gradient[found > 0]).max(initial=0.0) < 1e-9


@given(st.sampled_from([point for point in POINTS if point[1]]))
def test_a_spoiled_point_stands_out(spoiled: SlicePoint) -> None:
    """Among the points not used in the fit it alone is off, by what was added to it."""
    held_out = {(i, j): linear(i, j) for i, j in POINTS}
    held_out[spoiled] *= 1.5
    clean = fit_times({(i, j): linear(i, j) for i in LENGTHS for j in (0, 20, 200, 600)})
    errors = relative_errors(clean, held_out)
    assert {point for point, error in errors.items() if error > 0.02} == {spoiled}
    assert errors[spoiled] == pytest.approx(1 / 3, rel=1e-6)


@pytest.mark.parametrize("window", WINDOWS, ids=str)
@given(length=st.integers(1, 60), context=st.integers(0, 200))
def test_context_keys_and_scores_are_counted(window: AttentionWindow, length: int, context: int) -> None:
    assert window.context_keys(context) == (context - window.first(context))
    extra = count_scores(window, length, context) - count_scores(window, length, 0)
    assert window.context_scores(length, context) == extra


@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_a_window_is_found_from_what_queries_see(window: AttentionWindow) -> None:
    last = 255
    positions = {last, last - 1, last // 2, last // 3, window.first(last) - 1} - {-1}
    assert find_window({position: window.first(position) for position in positions}) == window


def test_a_sliding_windows_time_stops_growing() -> None:
    """With the keys and scores it has, four coefficients still fit; with full attention's they can't."""
    window = AttentionWindow("sliding", 64)

    def time(i: int, j: int) -> float:
        extra = 1e-4 + 1e-6 * window.context_keys(j) + 1e-6 * window.context_scores(i, j)
        return base(i) + (float(extra) if j else 0.0)

    points = {(i, j): time(i, j) for i in LENGTHS for j in (0, 8, 40, 64, 200, 800)}
    unseen = {(i, j): time(i, j) for i in LENGTHS for j in (4, 50, 100, 2000)}
    assert max(relative_errors(fit_times(points, [window]), unseen).values()) < 1e-9
    assert max(relative_errors(fit_times(points), unseen).values()) > 0.02
