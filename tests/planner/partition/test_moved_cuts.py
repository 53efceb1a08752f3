"""The cut that makes up for a slow rank is the best of all cuts, in the same order of actions."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest

from slipstream.planner.joint import SlicedUnits
from slipstream.planner.joint.problem import SlowedStep
from slipstream.schedule import make_schedule
from support.plain_costs import PlainCosts

SLICES = (48, 32, 48)


@pytest.mark.parametrize("units_per_layer", [1, 2])
@pytest.mark.parametrize(("num_ranks", "slowness"), [(2, {1: 1.6}), (3, {0: 2.0}), (3, {1: 1.4}), (3, {})])
def test_the_best_of_all_cuts(num_ranks: int, slowness: dict[int, float], units_per_layer: int) -> None:
    costs = PlainCosts(units_per_layer=units_per_layer)
    step = SlowedStep(SlicedUnits(costs, SLICES), make_schedule("1f1b", num_ranks, 2, len(SLICES)), slowness)
    even = (12 / num_ranks,) * num_ranks
    cut, seconds = step.best_cut(even)
    ends = combinations([n / units_per_layer for n in range(1, 12 * units_per_layer)], num_ranks - 1)
    every = [tuple(b - a for a, b in pairwise((0, *inner, 12))) for inner in ends]
    assert seconds == pytest.approx(min(map(step.seconds, every)))
    assert step.seconds(cut) == seconds
    assert seconds <= step.seconds(even)
    for rank in slowness:
        assert cut[rank] < even[rank]
        assert seconds < step.seconds(even)


def test_a_slow_rank_takes_so_many_times_as_long() -> None:
    """Of a step that one rank computes next to nothing of, the time is that of the other."""
    units, schedule = SlicedUnits(PlainCosts(latency=0.0), SLICES), make_schedule("gpipe", 2, 1, len(SLICES))
    fast, slow = (SlowedStep(units, schedule, {0: 1e-6, 1: each}).seconds((6, 6)) for each in (1.0, 3.0))
    assert slow == pytest.approx(3 * fast, rel=1e-3)
