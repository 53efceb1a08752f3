"""The cut that makes up for a slow rank is the best of all cuts, in the same order of actions."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations, pairwise

import numpy as np
import pytest

from slipstream.array_types import Floats, Ints
from slipstream.planner.joint import SlicedUnits
from slipstream.planner.moved_cuts import SlowedStep
from slipstream.schedule import Op, make_schedule

SHARES = {Op.F: 1.0, Op.B: 2.0, Op.I: 1.2, Op.W: 0.8}
SLICES = (48, 32, 48)


@dataclass(frozen=True)
class PlainCosts:
    """Layers that cost their tokens, and a head of three quarters of one."""

    num_layers: int = 12
    units_per_layer: int = 1
    num_frozen_units: int = 0
    latency: float = 0.5
    bandwidth: float | None = None

    def seconds(self, op: Op, lengths: Ints, contexts: Ints) -> tuple[Floats, Floats]:
        layers = np.full(self.num_layers * self.units_per_layer, 1 / self.units_per_layer)
        return SHARES[op] * np.outer([0.01, *layers, 0.75], lengths), np.full(len(lengths), 2.0)

    def activation_bytes(self, lengths: Ints) -> tuple[Floats, Floats]:
        return np.zeros((self.num_layers * self.units_per_layer + 2, len(lengths))), np.zeros(len(lengths))

    kept_bytes = activation_bytes

    def state_bytes(self) -> Floats:
        return np.zeros(self.num_layers * self.units_per_layer + 2)

    def message_bytes(self, lengths: Ints) -> Floats:
        return np.zeros(len(lengths))

    handling_seconds = message_bytes


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
