"""For stages with different times, no way to cut a sequence is faster than the one chosen."""

from __future__ import annotations

import random
from itertools import accumulate, combinations, pairwise
from typing import Any

import pytest

from slipstream import SlipstreamError, simulate
from slipstream.planner.slicing.equal_stage_slicing import slice_tokens
from slipstream.planner.slicing.unequal_stage_slicing import slice_for_stages
from slipstream.schedule import Op, forward_only, gpipe
from slipstream.simulator import TableCost

Table = list[list[float]]


def simulated(times: list[Table], slices: tuple[int, ...]) -> float:
    """The forwards of one microbatch in the simulator, which knows no recurrence."""
    starts = list(accumulate(slices, initial=0))
    cost = {
        (stage, i, Op.F): table[tokens][starts[i]]
        for stage, table in enumerate(times)
        for i, tokens in enumerate(slices)
    }
    return simulate(forward_only(gpipe(len(times), 1, len(slices))), TableCost(cost)).makespan


@pytest.mark.parametrize("seed", range(3))
def test_no_way_to_cut_is_faster(seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(30):
        length, num_stages = draw.randint(1, 6), draw.randint(1, 4)
        times = [
            [[float(draw.randint(0, 20)) for _ in range(length)] for _ in range(length + 1)] for _ in range(num_stages)
        ]
        every = [
            tuple(b - a for a, b in pairwise((0, *cuts, length)))
            for count in range(length)
            for cuts in combinations(range(1, length), count)
        ]
        found = slice_for_stages(times, length)
        assert found.latency == min(simulated(times, slices) for slices in every)
        assert found.latency == simulated(times, found.slices)
        assert found.optimal


def layers(i: Any, j: Any) -> Any:
    return 4 + 0.1 * i + 2e-4 * i * (2 * j + i)


def with_head(i: Any, j: Any) -> Any:
    return layers(i, j) + 0.06 * i


def test_equal_stages_give_eq5() -> None:
    found = slice_for_stages([layers] * 4, 512, granularity=16)
    assert found.latency == pytest.approx(slice_tokens(layers, 512, 4, 16).latency, rel=1e-12)
    assert found.optimal


def test_a_heavy_head_is_judged_as_it_runs() -> None:
    """Eq. 5 with the slowest stage everywhere overestimates; its slices are not the best either."""
    times = [layers, layers, layers, with_head]
    found = slice_for_stages(times, 512, granularity=16)
    table = [[[float(t(16 * i, 16 * j)) for j in range(32)] for i in range(33)] for t in times]
    in_units = tuple(tokens // 16 for tokens in found.slices)
    assert simulated(table, in_units) == pytest.approx(found.latency, rel=1e-12)
    pessimistic = slice_tokens(with_head, 512, 4, 16)
    assert found.latency < simulated(table, tuple(tokens // 16 for tokens in pessimistic.slices)) < pessimistic.latency
    assert found.optimal


def test_what_is_not_proven_has_a_bound() -> None:
    times = [lambda i, j, k=k: layers(i, j) * (1 + 0.1 * (k % 3)) for k in range(8)]
    found = slice_for_stages(times, 2048, granularity=8)
    assert not found.optimal
    assert 0.75 * found.latency < found.lower_bound < found.latency
    assert found.lower_bound >= slice_tokens(layers, 2048, 8, 8).latency * (1 - 1e-12)


def test_impossible_slices_are_refused() -> None:
    with pytest.raises(SlipstreamError, match="No way to cut 8 tokens"):
        slice_for_stages([lambda i, j: i * 1.0, lambda i, j: i * float("inf")], 8)
