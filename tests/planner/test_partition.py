"""Layers to stages, against every partition there is."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream import SlipstreamError, partition_layers


def stage_costs(costs: list[int], counts: tuple[int, ...] | list[int]) -> list[int]:
    bounds = [sum(counts[:i]) for i in range(len(counts) + 1)]
    return [sum(costs[a:b]) for a, b in pairwise(bounds)]


@given(st.data())
def test_min_max_then_min_variance(data: st.DataObject) -> None:
    costs = data.draw(st.lists(st.integers(0, 9), min_size=1, max_size=9))
    num_stages = data.draw(st.integers(1, len(costs)))
    cuts = combinations(range(1, len(costs)), num_stages - 1)
    every = [tuple(b - a for a, b in pairwise((0, *cut, len(costs)))) for cut in cuts]
    best = min(
        (max(stage_costs(costs, counts)), sum(cost**2 for cost in stage_costs(costs, counts))) for counts in every
    )
    found = partition_layers(costs, num_stages)
    assert sum(found) == len(costs)
    assert min(found) >= 1
    assert (max(stage_costs(costs, found)), sum(cost**2 for cost in stage_costs(costs, found))) == best


def test_a_heavy_head_gets_fewer_layers() -> None:
    assert partition_layers([1, 1, 1, 1, 1, 1, 1, 3], 2) == [5, 3]


@pytest.mark.parametrize("num_stages", [0, 4])
def test_stages_without_layers_are_refused(num_stages: int) -> None:
    with pytest.raises(SlipstreamError, match=f"{num_stages} stages for 3 layers: .* Use 1 to 3 stages"):
        partition_layers([1, 1, 1], num_stages)
