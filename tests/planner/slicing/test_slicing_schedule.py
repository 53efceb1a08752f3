"""Slicings judged by the simulator start from the closed form and are as fast as any way to cut."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream import SlipstreamError, simulate
from slipstream.planner.slicing.equal_stage_slicing import equal_time_cuts, equal_time_slices, slice_tokens
from slipstream.planner.slicing.schedule_slicing import schedule_costs, slice_for_schedule
from slipstream.schedule import Op, Schedule, forward_only, gpipe, one_f_one_b, split_backwards
from slipstream.simulator import CostModel


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
    slices = equal_time_slices(length, data.draw(st.integers(1, units)), share, granularity)
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
    every = [
        tuple(64 * (b - a) for a, b in pairwise((0, *cuts, 8)))
        for count in range(8)
        for cuts in combinations(range(1, 8), count)
    ]
    best = min(simulate(*judge(slices)).makespan for slices in every)
    found = slice_for_schedule(judge, 512, granularity=64)
    assert found.latency == simulate(*judge(found.slices)).makespan
    assert found.latency <= 1.002 * best


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


def test_limits_are_kept() -> None:
    judge = candidate(one_f_one_b, 2, 1)
    found = slice_for_schedule(judge, 1000, granularity=64, min_slice=150, max_slices=4)
    assert sum(found.slices) == 1000
    assert min(found.slices) >= 150
    assert len(found.slices) <= 4
    assert all(tokens % 64 == 0 for tokens in found.slices[:-1])
    with pytest.raises(SlipstreamError, match=r"min_slice=2000.* at most length"):
        slice_for_schedule(judge, 1000, min_slice=2000)


def test_bad_counts_and_shares_are_refused() -> None:
    with pytest.raises(SlipstreamError, match="use 1 to 4 slices"):
        equal_time_slices(400, 5, 0.5, granularity=100)
    with pytest.raises(SlipstreamError, match=r"attention_share=1.5: .* 0 to 1"):
        equal_time_cuts(4, 1.5)
