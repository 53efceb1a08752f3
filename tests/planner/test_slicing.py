"""No way to cut a sequence, or a batch and its tokens, is faster than the one chosen, by trying all.

Slicings judged by the simulator start from the closed form and are as fast as any way to cut.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import cache, partial
from itertools import combinations, combinations_with_replacement, pairwise, product
from math import inf
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream import SlipstreamError, simulate
from slipstream.planner.cuts import Cuts
from slipstream.planner.slicing.equal_stage_slicing import (
    CutPath,
    TimeTable,
    best_slicing,
    equal_time_cuts,
    equal_time_slices,
    minimize,
    search_compiled,
    search_numpy,
    shortest_path,
    slice_batch,
    slice_batch_with_flushes,
    slice_tokens,
    slicing_frontier,
    split_batch,
    time_table,
)
from slipstream.planner.slicing.equal_work_slicing import equal_work_cuts
from slipstream.planner.slicing.schedule_slicing import schedule_costs, slice_for_schedule
from slipstream.schedule import Op, Schedule, forward_only, gpipe, one_f_one_b, split_backwards
from slipstream.simulator import CostModel
from support.examples import examples

Table = list[list[float]]  # [i][j]: i tokens after j


def every_slicing(length: int) -> Iterator[tuple[int, ...]]:
    for count in range(length):
        for cuts in combinations(range(1, length), count):
            yield tuple(b - a for a, b in pairwise((0, *cuts, length)))


def times_of(table: Table, slices: tuple[int, ...]) -> list[float]:
    return [table[tokens][sum(slices[:i])] for i, tokens in enumerate(slices)]


def eq5(slices: tuple[int, ...], table: Table, num_stages: int) -> float:
    times = times_of(table, slices)
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
        assert found.latency == min(eq5(slices, table, num_stages) for slices in every_slicing(length))
        assert eq5(found.slices, table, num_stages) == found.latency


@pytest.mark.parametrize("seed", range(4))
def test_forward_and_backward_with_maxima_of_their_own(seed: int) -> None:
    draw = random.Random(100 + seed)
    for _ in range(250):
        length, num_stages, num_microbatches = draw.randint(1, 7), draw.randint(1, 9), draw.randint(1, 4)
        tables = random_table(draw, length), random_table(draw, length)
        if inf in tables[0][length] + tables[1][length]:
            continue  # not every combination of forbidden slices leaves one
        every = ([times_of(table, slices) for table in tables] for slices in every_slicing(length))
        best = min(num_microbatches * (sum(f) + sum(b)) + (num_stages - 1) * (max(f) + max(b)) for f, b in every)
        found = slice_tokens(tables[0], length, num_stages, backward=tables[1], num_microbatches=num_microbatches)
        assert found.latency == best


def attention_heavy(i: Any, j: Any) -> Any:
    return 3e-4 + 1e-6 * i + 2e-10 * i * (2 * j + i)


@pytest.mark.parametrize("backward", [False, True])
def test_numba_and_numpy_agree_to_the_last_bit(backward: bool) -> None:
    draw = np.random.default_rng(1)
    tables = [draw.integers(0, 50, (41, 41)), np.sort(draw.random((41, 41)), axis=0)][: 1 + backward]
    for each in (
        time_table(tables, 40, Cuts(1)),
        time_table([attention_heavy] * (1 + backward), 4096, Cuts(100, None, 150)),
    ):
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
        table = time_table(draw.random((2, 41, 41)) + 1, 40, Cuts(1))
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
    every = {(sum(times), max(times)) for times in map(partial(times_of, table), every_slicing(length))}
    best = {(a, b) for a, b in every if not any((c <= a and d <= b) and (c, d) != (a, b) for c, d in every)}
    frontier = slicing_frontier(table, length)
    assert [(point.total, point.slowest) for point in frontier] == sorted(best)
    for num_stages, num_microbatches in ((1, 1), (3, 1), (9, 4)):
        expected = slice_tokens(table, length, num_stages, num_microbatches=num_microbatches).latency
        assert min(point.latency(num_stages, num_microbatches) for point in frontier) == expected


# --- a batch ---------------------------------------------------------------------------------------------------------


def every_division(batch: int) -> Iterator[tuple[int, ...]]:
    for count in range(1, batch + 1):
        yield from (sizes for sizes in combinations_with_replacement(range(1, batch + 1), count) if sum(sizes) == batch)


@pytest.mark.parametrize("seed", range(3))
def test_no_division_is_faster(seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(25):
        batch, length, num_stages = draw.randint(1, 4), draw.randint(1, 4), draw.randint(1, 6)
        table = {key: draw.randint(0, 20) for key in product(range(1, batch + 1), range(1, length + 1), range(length))}

        def times(b: int, slices: tuple[int, ...]) -> list[int]:
            return [table[b, tokens, sum(slices[:i])] for i, tokens in enumerate(slices)]  # noqa: B023

        pipelined = flushed = inf
        for sizes in every_division(batch):
            for chosen in product(every_slicing(length), repeat=len(sizes)):
                each = [times(b, slices) for b, slices in zip(sizes, chosen, strict=True)]
                total = sum(map(sum, each))
                pipelined = min(pipelined, total + (num_stages - 1) * max(map(max, each)))
                flushed = min(flushed, total + (num_stages - 1) * sum(map(max, each)))

        def t(b: int, i: int, j: int) -> float:
            return table[int(b), int(i), int(j)]  # noqa: B023

        found = slice_batch(t, batch, length, num_stages)
        assert found.latency == pipelined
        each = [times(group.num_sequences, group.slices) for group in found.microbatches]
        assert sum(map(sum, each)) + (num_stages - 1) * max(map(max, each)) == pipelined
        assert slice_batch_with_flushes(t, batch, length, num_stages).latency == flushed


def t(b: int, i: Any, j: Any) -> Any:
    return np.maximum(300, b * i) + 1e-3 * b * i * j


def test_one_sequence_is_slicing_and_limits_on_sequences_are_kept() -> None:
    found = slice_batch(t, 1, 2048, 8, granularity=64)
    alone = slice_tokens(partial(t, 1), 2048, 8, granularity=64)
    assert (found.latency, found.microbatches[0].slices) == (alone.latency, alone.slices)
    assert slice_batch_with_flushes(t, 1, 2048, 8, granularity=64) == found
    few = slice_batch(t, 8, 1024, 4, granularity=64, max_sequences=3)
    assert max(group.num_sequences for group in few.microbatches) <= 3
    by_memory = slice_batch(lambda b, i, j: t(b, i, j) + (inf if b > 3 else 0), 8, 1024, 4, granularity=64)
    assert by_memory == few


# --- judged by the simulator -----------------------------------------------------------------------------------------


@given(st.integers(1, 40), st.floats(0, 1))
def test_the_cuts_take_equal_time(num_slices: int, attention_share: float) -> None:
    def time_of_first(x: float) -> float:
        return (1 - attention_share) * x + attention_share * x**2

    cuts = [0, *equal_time_cuts(num_slices, attention_share), 1]
    for before, after in pairwise(cuts):
        assert time_of_first(after) - time_of_first(before) == pytest.approx(1 / num_slices, abs=1e-12)


@given(st.integers(1, 5000), st.integers(1, 64), st.floats(0, 1), st.data())
def test_equal_time_slices_are_whole_multiples(
    length: int, granularity: int, share: float, data: st.DataObject
) -> None:
    units = -(-length // granularity)
    slices = equal_time_slices(length, data.draw(st.integers(1, units)), share, Cuts(granularity))
    assert sum(slices) == length
    assert min(slices) >= 1
    assert all(tokens % granularity == 0 for tokens in slices[:-1])


def seconds(stage: int, op: Op, tokens: int, context: int) -> float:
    """Two stages, the last with a head; a fixed cost per slice; whole and split backwards."""
    forward = 3 + 0.1 * tokens + 2e-4 * tokens * (2 * context + tokens) + 0.05 * stage * tokens
    return {Op.F: forward, Op.B: 2.1 * forward, Op.I: 1.2 * forward, Op.W: 0.9 * forward}[op]


Make = Callable[[int, int, int], Schedule]


def candidate(
    make: Make, num_stages: int, num_microbatches: int
) -> Callable[[tuple[int, ...]], tuple[Schedule, CostModel]]:
    schedule = cache(lambda count: split_backwards(make(num_stages, num_microbatches, count)))

    def with_costs(slices: tuple[int, ...]) -> tuple[Schedule, CostModel]:
        own = schedule(len(slices))
        return own, schedule_costs(own, slices, seconds, bytes_per_token=10, latency=0.5, bandwidth=1000)

    return with_costs


@pytest.mark.parametrize("make", [gpipe, one_f_one_b])
@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_close_to_the_best_of_all_ways_to_cut(make: Make, num_microbatches: int) -> None:
    judge = candidate(make, 2, num_microbatches)
    every = (tuple(64 * units for units in slices) for slices in every_slicing(8))
    found = slice_for_schedule(judge, 512, granularity=64)
    assert found.latency == simulate(*judge(found.slices)).makespan
    assert found.latency <= 1.002 * min(simulate(*judge(slices)).makespan for slices in every)


def test_forwards_of_equal_stages_come_to_eq5() -> None:
    def equal(stage: int, op: Op, tokens: int, context: int) -> float:
        return seconds(0, op, tokens, context)

    def judge(slices: tuple[int, ...]) -> tuple[Schedule, CostModel]:
        schedule = forward_only(gpipe(4, 1, len(slices)))
        return schedule, schedule_costs(schedule, slices, equal)

    exact = slice_tokens(lambda i, j: seconds(0, Op.F, i, j), 1024, 4, granularity=64)
    found = slice_for_schedule(judge, 1024, granularity=64)
    assert exact.latency <= found.latency * (1 + 1e-12)
    assert found.latency <= exact.latency * 1.005


JUDGE = candidate(one_f_one_b, 2, 1)


def test_limits_are_kept() -> None:
    found = slice_for_schedule(JUDGE, 1000, granularity=64, min_slice=150, max_slices=4)
    assert sum(found.slices) == 1000
    assert min(found.slices) >= 150
    assert len(found.slices) <= 4
    assert all(tokens % 64 == 0 for tokens in found.slices[:-1])


def cut(**changed: Any) -> object:
    return slice_tokens(**{"t": lambda i, j: i * 1.0, "length": 64, "num_stages": 4, **changed})


@pytest.mark.parametrize(
    ("refused", "message"),
    [
        (partial(cut, length=0), "length=0, granularity=1: both are tokens, 1 or more"),
        (partial(cut, granularity=0), "granularity=0"),
        (partial(cut, length=10**6), r"1000000 possible cuts; at most 8192 .* Use granularity=123 or more"),
        (partial(cut, num_stages=0), "num_stages=0"),
        (partial(cut, num_microbatches=0), "num_microbatches=0"),
        (partial(cut, min_slice=65), "min_slice=65: a slice has 1 to 64 tokens"),
        (partial(cut, t=lambda i, j: i - 3.0), r"t\(1, 0\) is -2.0: a slice takes 0 seconds or more"),
        (partial(cut, t=lambda i, j: i * float("nan")), r"t\(1, 0\) is nan"),
        (partial(cut, t=lambda i, j: i * inf), "No way to cut 64 tokens has finite times only"),
        (partial(cut, t=np.ones((64, 64))), r"shape \(64, 64\) .* needs shape \(65, 64\) or more"),
        (partial(cut, t=np.ones((9, 9)), granularity=10), "multiple of 10"),
        (partial(slice_batch, t, 0, 64, 2, 64), "batch=0"),
        (partial(slice_batch, t, 4, 64, 2, 64, max_sequences=0), "max_sequences=0"),
        (partial(slice_batch, lambda b, i, j: i * (1.0 if b == 2 else inf), 3, 8, 2), "No way to cut a batch of 3"),
        (partial(split_batch, [inf, 1.0], 3), "A batch of 3 has no division"),
        (partial(slice_for_schedule, JUDGE, 1000, min_slice=2000), "min_slice=2000.* at most length"),
        (partial(equal_time_slices, 400, 5, 0.5, cuts=Cuts(100)), "use 1 to 4 slices"),
        (partial(equal_time_cuts, 4, 1.5), r"attention_share=1.5: .* 0 to 1"),
    ],
)
def test_bad_input_is_explained(refused: Callable[[], object], message: str) -> None:
    with pytest.raises(SlipstreamError, match=message):
        refused()


@examples(30)
@given(
    st.lists(st.tuples(st.integers(1, 300), st.integers(1, 12)), min_size=1, max_size=5),
    st.sampled_from([1, 16, 64]),
    st.integers(0, 3),
)
def test_slices_of_rows_have_equal_work(rows: list[tuple[int, int]], granularity: int, power: int) -> None:
    """As many as are asked for where there are places; no cut is farther from its share than the nearest place."""
    cuts, lengths = Cuts(granularity), np.array([length for length, _ in rows])
    within, firsts = cuts.places_of_rows(lengths)
    ends = np.cumsum([0, *lengths])
    places = np.append(np.repeat(ends[:-1], np.diff(firsts)) + within, ends[-1])
    density = np.linspace(1, 2, ends[-1]) ** power
    work = np.append(0.0, np.cumsum(density))[places]
    found = equal_work_cuts(places, firsts, work, np.array([count for _, count in rows]))
    assert set(ends.tolist()) <= set(found.tolist()) <= set(places.tolist())
    assert (np.diff(found) > 0).all()
    counts = [min(count, cuts.num_places(length)) for length, count in rows]
    assert np.diff(np.searchsorted(found, ends)).tolist() == counts
    if granularity == 1:
        for number, (length, count) in enumerate(rows):
            begin, end = ends[number], ends[number + 1]
            slices = np.diff(work[np.append(found[(found >= begin) & (found < end)], end)])
            assert slices.max() - slices.min() <= 2 * density[begin:end].max() or length < 2 * count
