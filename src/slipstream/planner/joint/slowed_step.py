"""The best cut where some ranks take longer than their costs say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

from slipstream.cost import partition_of, unit_bounds
from slipstream.planner.joint.candidate import one_move, steepest_descent
from slipstream.planner.joint.sliced_units import SlicedUnits
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
        start = self._bounds(partition)
        best, seconds = steepest_descent(
            start, partial(map, self._simulated), lambda cut: one_move(cut), _MOST_SIMULATIONS
        )
        return partition_of(best, self._per_layer), seconds

    @cached_property
    def _per_layer(self) -> int:
        return self.units.costs.units_per_layer

    def _bounds(self, partition: Sequence[float]) -> tuple[int, ...]:
        return unit_bounds(partition, self.units.costs.num_layers, self._per_layer)

    def _simulated(self, bounds: Sequence[int]) -> float:
        return simulate(self.schedule, self._slowed(self.units.table(bounds))).makespan

    def _slowed(self, table: TableCost) -> TableCost:
        factors = [self.slowness.get(rank, 1.0) for rank in self.schedule.placement]
        return replace(table, times={key: seconds * factors[key[0]] for key, seconds in table.times.items()})
