"""A cut: the parts of each stage, and the rank that holds it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np

from slipstream.array_types import Flags, Floats
from slipstream.cost import Costs, Stage, StageParts, kinds_by_layer
from slipstream.planner.partition import partition_layers
from slipstream.schedule import Op

_MOST_LAYERS = 16  # of a model whose ranks, not only its stages, are balanced; with more that takes a second each


def balanced_layers(weights: Sequence[float], placement: tuple[int, ...]) -> list[int]:
    """Returns the layers of each stage for which the slowest rank is fastest, given each layer's seconds; with many
    layers those for which the slowest stage is."""
    return partition_layers(weights, len(placement), placement=placement if len(weights) <= _MOST_LAYERS else None)


def balanced_partition(costs: Costs, length: int, placement: tuple[int, ...]) -> tuple[float, ...]:
    """Returns the layers of each stage that balance the time of a sequence of `length` tokens."""
    layers = (range(layer, layer + 1) for layer in range(costs.num_layers))
    return tuple(balanced_layers([sequence_seconds(costs, length, layer) for layer in layers], placement))


def sequence_seconds(costs: Costs, length: int, layers: Stage) -> float:
    """Returns the time of a whole sequence, forward and backward."""
    return sum(float(costs.seconds(layers, op, length, 0)) for op in (Op.F, Op.I, Op.W))


@dataclass(frozen=True, eq=False)
class PlacedPartition:
    """The parts of each stage, the rank that holds it, and the stages' costs."""

    costs: Costs
    placement: tuple[int, ...]
    bounds: tuple[int, ...]  # the first part of each stage, and the number of parts
    spreads_head: bool = False

    @cached_property
    def stages(self) -> list[StageParts]:
        """The parts of each stage, without a head that is spread."""
        parts = StageParts.of_units(self.bounds)
        return [*parts[:-1], parts[-1]._replace(stop=parts[-1].stop - 1)] if self.spreads_head else parts

    @cached_property
    def part_counts(self) -> Floats:
        """The fixed part of each stage, 1, and its number of parts of each kind, (stage, 1 + kinds)."""
        counts = np.zeros((len(self.stages), 2 + max(self.costs.parts)))
        counts[:, 0] = 1
        stages = np.repeat(np.arange(len(self.stages)), np.diff(self.bounds))
        np.add.at(counts, (stages, 1 + np.array(self.costs.parts)), 1)
        counts[-1, 1 + self.costs.parts[-1]] -= self.spreads_head
        return counts

    @cached_property
    def num_ranks(self) -> int:
        return max(self.placement) + 1

    @cached_property
    def trains(self) -> Flags:
        """Marks the stages that have backwards."""
        return np.array([self.costs.has_backward(stage) for stage in self.stages])

    @cached_property
    def sends_back(self) -> Flags:
        """Marks the stages that send their input gradient to another rank."""
        return np.array([False, *(a != b for a, b in pairwise(self.placement))])

    @cached_property
    def _alike(self) -> tuple[list[StageParts], list[int]]:
        """A stage of each kind, and the place among them of every stage's."""
        costs, places = self.costs, dict[tuple[tuple[int, ...], ...], int]()
        kinds = [kinds_by_layer(costs.parts, range(*stage), costs.units_per_layer) for stage in self.stages]
        of_stages = [places.setdefault(kind, len(places)) for kind in kinds]
        return [self.stages[of_stages.index(place)] for place in range(len(places))], of_stages

    def per_stage(self, value: Callable[[StageParts], float]) -> Floats:
        """Returns the value of each stage; of a spread head a rank's last one has a share."""
        different, places = self._alike
        values: Floats = np.array([value(stage) for stage in different], float)[places]
        if self.spreads_head:
            head = StageParts(self.bounds[-1] - 1, self.bounds[-1])
            lasts = [len(values) - 1 - self.placement[::-1].index(rank) for rank in range(self.num_ranks)]
            values[lasts] += value(head) / self.num_ranks
        return values

    @cached_property
    def _of_rank(self) -> Floats:
        return np.eye(self.num_ranks)[list(self.placement)]

    def per_rank(self, values: Floats) -> Floats:
        """Returns the sums over the stages of each rank, (..., rank) of (..., stage)."""
        return values @ self._of_rank
