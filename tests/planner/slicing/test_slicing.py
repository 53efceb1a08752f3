"""For equal stages, no way to cut a sequence is faster than the one chosen."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import combinations, pairwise
from math import inf
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream import SlipstreamError
from slipstream.planner.slicing.equal_stage_slicing import (
    CutPath,
    TimeTable,
    best_slicing,
    minimize,
    search_compiled,
    search_numpy,
    shortest_path,
    slice_tokens,
    slicing_frontier,
    time_table,
)

Table = list[list[float]]  # [i][j]: i tokens after j


def every_cut(length: int) -> Iterator[tuple[tuple[int, int], ...]]:
    """All slicings as (length, context) of every slice."""
    for count in range(length):
        for cuts in combinations(range(1, length), count):
            yield tuple((b - a, a) for a, b in pairwise((0, *cuts, length)))


def eq5(slices: tuple[tuple[int, int], ...], table: Table, num_stages: int) -> float:
    times = [table[i][j] for i, j in slices]
    return inf if inf in times else sum(times) + (num_stages - 1) * max(times)


def random_table(draw: random.Random, length: int) -> Table:
    """Any integers, or roughly what attention costs; some slices forbidden. Sums of integers are exact in floats."""
    if draw.random() < 0.5:
        return [[float(draw.randint(0, 30)) for _ in range(length)] for _ in range(length + 1)]
    fixed, linear, square = draw.randint(0, 20), draw.randint(1, 9), draw.randint(0, 4)
    longest = draw.randint(1, length)
    return [
        [fixed + linear * i + square * i * (2 * j + i) if i <= longest else inf for j in range(length)]
        for i in range(length + 1)
    ]


@pytest.mark.parametrize("seed", range(4))
def test_no_way_to_cut_is_faster(seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(500):
        length, num_stages = draw.randint(1, 8), draw.randint(1, 12)
        table = random_table(draw, length)
        found = slice_tokens(table, length, num_stages)
        assert found.latency == min(eq5(cut, table, num_stages) for cut in every_cut(length))
        starts = [sum(found.slices[:i]) for i in range(len(found.slices))]
        assert eq5(tuple(zip(found.slices, starts, strict=True)), table, num_stages) == found.latency


@pytest.mark.parametrize("seed", range(4))
def test_forward_and_backward_with_maxima_of_their_own(seed: int) -> None:
    draw = random.Random(100 + seed)
    for _ in range(250):
        length, num_stages, num_microbatches = draw.randint(1, 7), draw.randint(1, 9), draw.randint(1, 4)
        forward, backward = random_table(draw, length), random_table(draw, length)
        if inf in forward[length] + backward[length]:
            continue  # not every combination of forbidden slices leaves one

        def latency(cut: tuple[tuple[int, int], ...], forward: Table = forward, backward: Table = backward) -> float:
            f, b = [forward[i][j] for i, j in cut], [backward[i][j] for i, j in cut]
            return num_microbatches * (sum(f) + sum(b)) + (num_stages - 1) * (max(f) + max(b))  # noqa: B023

        found = slice_tokens(forward, length, num_stages, backward=backward, num_microbatches=num_microbatches)
        assert found.latency == min(map(latency, every_cut(length)))


def attention_heavy(i: Any, j: Any) -> Any:
    return 3e-4 + 1e-6 * i + 2e-10 * i * (2 * j + i)


@pytest.mark.parametrize("backward", [False, True])
def test_numba_and_numpy_agree_to_the_last_bit(backward: bool) -> None:
    draw = np.random.default_rng(1)
    tables = [draw.integers(0, 50, (41, 41)), np.sort(draw.random((41, 41)), axis=0)][: 1 + backward]
    for each in (time_table(tables, 40, 1, None), time_table([attention_heavy] * (1 + backward), 4096, 100, 150)):
        finite = [sorted(time[np.isfinite(time)]) for time in each.times]
        for share in (0.001, 0.01, 0.1, 0.3, 0.6, 1.0):
            limits = tuple(float(times[int(share * (len(times) - 1))]) for times in finite)
            plain, fast = (shortest_path(each, limits, search) for search in (search_numpy, search_compiled()))
            assert fast == plain
            assert all(a <= b for a, b in zip(fast.maxima, limits, strict=True))


@pytest.mark.parametrize("tolerance", [0.0, 0.01, 0.1])
def test_what_is_within_a_tolerance_takes_fewer_solves(tolerance: float) -> None:
    draw, num_solves, missed = np.random.default_rng(2), [0, 0], 0.0
    for _ in range(20):
        table = time_table(draw.random((2, 41, 41)) + 1, 40, 1, None)
        for which, share in enumerate((0.0, tolerance)):

            def solve(limits: tuple[float, ...], which: int = which, table: TimeTable = table) -> CutPath:
                num_solves[which] += 1
                return shortest_path(table, limits)

            minimize(solve, table.least, 7, share)
        exact, found = best_slicing(table, 8).latency, best_slicing(table, 8, tolerance=tolerance).latency
        missed = max(missed, 1 - exact / found)
    assert 0 <= missed <= tolerance
    assert (num_solves[1] < num_solves[0]) == (tolerance > 0)


def test_functions_of_one_slice_and_tables_say_the_same() -> None:
    def one_slice(tokens: int, context: int) -> float:
        return max(20, tokens) + 0.25 * tokens * context if tokens else 0.0

    expected = slice_tokens(lambda i, j: np.maximum(20, i) + 0.25 * i * j, 60, 5, granularity=4)
    table = [[one_slice(4 * i, 4 * j) for j in range(15)] for i in range(16)]
    assert slice_tokens(one_slice, 60, 5, granularity=4) == expected == slice_tokens(table, 60, 5, granularity=4)


def test_granularity_and_minimum() -> None:
    found = slice_tokens(lambda i, j: i + 0.01 * i * j, 1000, 8, granularity=64, min_slice=128)
    assert sum(found.slices) == 1000
    assert min(found.slices) >= 128
    assert all(tokens % 64 == 0 for tokens in found.slices[:-1])
    assert slice_tokens(lambda i, j: 1.0 * i, 100, 3, granularity=30).slices == (30, 30, 30, 10)


@given(st.data())
def test_the_frontier_holds_the_best_for_every_pipeline(data: st.DataObject) -> None:
    length = data.draw(st.integers(1, 7))
    rows = st.lists(st.integers(0, 20).map(float), min_size=length, max_size=length)
    table = data.draw(st.lists(rows, min_size=length + 1, max_size=length + 1))
    every = {(sum(times), max(times)) for cut in every_cut(length) for times in [[table[i][j] for i, j in cut]]}
    best = {(a, b) for a, b in every if not any((c <= a and d <= b) and (c, d) != (a, b) for c, d in every)}
    frontier = slicing_frontier(table, length)
    assert [(point.total, point.slowest) for point in frontier] == sorted(best)
    for num_stages, num_microbatches in ((1, 1), (3, 1), (9, 4)):
        expected = slice_tokens(table, length, num_stages, num_microbatches=num_microbatches).latency
        assert min(point.latency(num_stages, num_microbatches) for point in frontier) == expected


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"length": 0}, "length=0, granularity=1: both are tokens, 1 or more"),
        ({"granularity": 0}, "granularity=0"),
        ({"length": 10**6}, r"1000000 possible cuts; at most 8192 .* Use granularity=123 or more"),
        ({"num_stages": 0}, "num_stages=0"),
        ({"num_microbatches": 0}, "num_microbatches=0"),
        ({"min_slice": 65}, "min_slice=65: a slice has 1 to 64 tokens"),
        ({"t": lambda i, j: i - 3.0}, r"t\(1, 0\) is -2.0: a slice takes 0 seconds or more"),
        ({"t": lambda i, j: i * float("nan")}, r"t\(1, 0\) is nan"),
        ({"t": lambda i, j: i * inf}, "No way to cut 64 tokens has finite times only"),
        ({"t": np.ones((64, 64))}, r"shape \(64, 64\) .* needs shape \(65, 64\) or more"),
        ({"t": np.ones((9, 9)), "granularity": 10}, "multiple of 10"),
    ],
)
def test_bad_input_is_explained(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(SlipstreamError, match=message):
        slice_tokens(**{"t": lambda i, j: i * 1.0, "length": 64, "num_stages": 4, **arguments})
