"""Looks for a cut that makes up for a rank which computes more slowly than it was planned for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise

from slipstream.planner.costs import partition_of
from slipstream.planner.joint import SlicedUnits
from slipstream.schedule import Schedule
from slipstream.simulator import TableCost, simulate

_MOST_SIMULATIONS = 200


@dataclass(frozen=True)
class SlowedStep:
    """A step in which some ranks take longer than `units` says.

    Args:
        units: the costs, on the step's slices.
        schedule: the order of the compute actions.
        slowness: how many times as long each slow rank of the pipeline computes.
    """

    units: SlicedUnits
    schedule: Schedule
    slowness: Mapping[int, float]

    def seconds(self, partition: Sequence[float]) -> float:
        """Returns the simulated seconds of the step with so many layers in each stage, in the same order."""
        return self._simulated(self._bounds(partition))

    def best_cut(self, partition: Sequence[float]) -> tuple[tuple[float, ...], float]:
        """Returns the best cut that is reached from this one by moving layers, and its seconds.

        The best move of a unit over one boundary, or over several neighbouring ones, is taken again and again, as long
        as the step becomes shorter.
        """
        best = self._bounds(partition)
        seconds, left = self._simulated(best), _MOST_SIMULATIONS
        while left > 0:
            moved = {bounds: self._simulated(bounds) for bounds in _moves(best)}
            left -= len(moved)
            found = min(moved, key=lambda bounds: moved[bounds], default=best)
            if found == best or moved[found] >= seconds:
                break
            best, seconds = found, moved[found]
        return partition_of(best, self._per_layer), seconds

    @cached_property
    def _per_layer(self) -> int:
        return self.units.costs.units_per_layer

    def _bounds(self, partition: Sequence[float]) -> tuple[int, ...]:
        inner = [1 + round(layers * self._per_layer) for layers in accumulate(partition[:-1])]
        return (0, *inner, self.units.costs.num_layers * self._per_layer + 2)

    def _simulated(self, bounds: Sequence[int]) -> float:
        return simulate(self.schedule, self._slowed(self.units.table(bounds))).makespan

    def _slowed(self, table: TableCost) -> TableCost:
        factors = [self.slowness.get(rank, 1.0) for rank in self.schedule.placement]
        return replace(table, times={key: seconds * factors[key[0]] for key, seconds in table.times.items()})


def _moves(bounds: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Yields the bounds with one boundary, or neighbouring ones together, moved by a unit; no stage becomes empty."""
    inner = range(1, len(bounds) - 1)
    for first in inner:
        for last in range(first, len(bounds) - 1):
            for step in (-1, 1):
                moved = tuple(bound + step * (first <= at <= last) for at, bound in enumerate(bounds))
                if all(a < b for a, b in pairwise(moved)):
                    yield moved
