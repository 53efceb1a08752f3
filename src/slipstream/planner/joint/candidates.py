"""The candidates of the joint search, cut and slices together, and how they change."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from math import inf
from typing import Any, TypeVar

from slipstream.planner.costs import partition_of, unit_bounds
from slipstream.planner.joint.joint_problem import JointProblem
from slipstream.planner.joint.unit_costs import SlicedUnits
from slipstream.schedule import Schedule
from slipstream.simulator import TableCost, simulate

_MOST_SIMULATIONS = 200
Choice = TypeVar("Choice")
Value = TypeVar("Value", bound=Any)


@dataclass(frozen=True)
class Candidate:
    """A cut, given by the first unit of each stage and the number of units, and slices."""

    bounds: tuple[int, ...]
    slices: tuple[int, ...]

    def cuts(self) -> Iterator[Candidate]:
        """Yields the candidate with one to three neighbouring cuts moved by one or two units."""
        yield from (replace(self, bounds=bounds) for bounds in _moved(self.bounds, (-1, 1, -2, 2), most=3))

    def slicings(self, problem: JointProblem) -> Iterator[Candidate]:
        """Yields the candidate with tokens moved between slices, a slice halved, or two joined."""
        slices, step = self.slices, problem.granularity
        count = len(slices)
        for portion in (4 * step, step):
            for giver in range(count):
                for taker in {giver - 1, giver + 1, 0, count - 1} - {giver}:
                    if 0 <= taker < count and slices[giver] > portion:
                        changed = list(slices)
                        changed[giver] -= portion
                        changed[taker] += portion
                        yield replace(self, slices=tuple(changed))
        for i, tokens in enumerate(slices):
            half = tokens // 2 // step * step
            if half and count + 1 in problem.slice_counts:
                yield replace(self, slices=(*slices[:i], half, tokens - half, *slices[i + 1 :]))
        for i in range(count - 1):
            yield replace(self, slices=(*slices[:i], slices[i] + slices[i + 1], *slices[i + 2 :]))


def steepest_descent(
    start: Choice, value: Callable[[Choice], Value], changes: Callable[[Choice], Iterable[Choice]], most: float = inf
) -> tuple[Choice, Value]:
    """Returns what is reached by taking the best change again and again while the value falls, and its value.

    It ends once `most` changes were tried.
    """
    best, least = start, value(start)
    while most > 0:
        found = {changed: value(changed) for changed in changes(best)}
        most -= len(found)
        changed = min(found, key=found.__getitem__, default=best)
        if changed == best or found[changed] >= least:
            break
        best, least = changed, found[changed]
    return best, least


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
        best, seconds = steepest_descent(start, self._simulated, lambda each: _moved(each, (-1, 1)), _MOST_SIMULATIONS)
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


def _moved(bounds: tuple[int, ...], steps: Sequence[int], most: float = inf) -> Iterator[tuple[int, ...]]:
    """Yields the bounds with one of them, or at most so many neighbours together, moved; no stage becomes empty."""
    inner = range(1, len(bounds) - 1)
    for first in inner:
        for last in range(first, int(min(first + most, len(bounds) - 1))):
            for step in steps:
                moved = tuple(bound + step * (first <= at <= last) for at, bound in enumerate(bounds))
                if all(a < b for a, b in pairwise(moved)):
                    yield moved
