"""The few stages to measure so that every other stage of a model is a sum of them, and the costs of their actions.

A model's parts are its embedding, the units of its layers (halves where layers can be cut, else whole layers) and its
head with the loss. A stage is a run of parts, and its time that of a fixed part and of its own parts:

    row of a stage = [1, parts of kind 0, parts of kind 1, ..., embeddings, heads]

The rows of the measured stages span those of all stages, so any stage is a combination of them. One of them is long:
the fixed part is a difference of measurements, whose errors would count again for every part of a longer stage, and a
long stage divides them by its parts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, groupby, pairwise, product
from typing import Any, NamedTuple, Protocol, TypeAlias, TypeVar

import numpy as np

from slipstream.array_types import Ints
from slipstream.errors import SlipstreamError
from slipstream.schedule import Op
from slipstream.simulator import TableCost

_EXACT = 1e-6  # rows are small integers
_LONGEST = 6  # parts: three layers where these can be cut
_HALVES = (", attention half", ", feed-forward half")


class StageParts(NamedTuple):
    """A stage given by its parts: it has those from `start` to `stop` - 1, of which 0 is the embedding."""

    start: int
    stop: int

    @classmethod
    def of_units(cls, bounds: Sequence[int]) -> list[StageParts]:
        """Returns the stages with the parts bounds[g] to bounds[g + 1] - 1."""
        return [cls(first, stop) for first, stop in pairwise(bounds)]

    @classmethod
    def of_partition(cls, partition: Sequence[float], num_layers: int, units_per_layer: int) -> list[StageParts]:
        """Returns the stages with so many layers each, perhaps with halves, or with 0 for an end of the model alone."""
        return cls.of_units(unit_bounds(partition, num_layers, units_per_layer))


def unit_bounds(partition: Sequence[float], num_layers: int, units_per_layer: int) -> tuple[int, ...]:
    """Returns the first part of each stage with so many layers, and the number of parts; undoes `partition_of`."""
    inner = (1 + round(layers * units_per_layer) for layers in accumulate(partition[:-1]))
    return (0, *inner, num_layers * units_per_layer + 2)


def partition_of(bounds: Sequence[int], units_per_layer: int) -> tuple[float, ...]:
    """Returns the layers of each stage with the parts bounds[g] to bounds[g + 1] - 1; ends of the model don't count."""
    last = bounds[-1] - 1
    inner = [min(max(bound, 1), last) - 1 for bound in bounds]
    counts = [(b - a) / units_per_layer for a, b in pairwise(inner)]
    return tuple(int(layers) if layers == int(layers) else layers for layers in counts)


Stage: TypeAlias = range | StageParts  # whole layers, of which the first and the last bring the model's ends; or parts


def part_kinds(kinds: Sequence[int], units_per_layer: int, unit_kinds: Sequence[int] = ()) -> tuple[int, ...]:
    """Returns the kind of every part from those of the layers; the embedding's and the head's are the last two.

    Args:
        kinds: of the layers.
        units_per_layer: 2 with halves, else 1.
        unit_kinds: of the units of the first kind of layer, of the second, and so on, as layers of different kinds may
            have a half in common. Default: they have none.
    """
    of_layers = unit_kinds or range(units_per_layer * (max(kinds) + 1))
    units = [of_layers[units_per_layer * kind + unit] for kind in kinds for unit in range(units_per_layer)]
    num_kinds = max(of_layers) + 1
    return (num_kinds, *units, num_kinds + 1)


def unit_names(layers: Sequence[str], units_per_layer: int, unit_kinds: Sequence[int] = ()) -> list[tuple[int, str]]:
    """Returns the kind and the name of every unit of each kind of layer."""
    names = [name + half for name in layers for half in (_HALVES if units_per_layer == 2 else ("",))]
    return list(zip(unit_kinds or range(len(names)), names, strict=True))


def layer_of(name: str) -> str:
    """Returns the name of the layer of which a unit is a half, or the unit's own."""
    return next((name.removesuffix(half) for half in _HALVES if name.endswith(half)), name)


def parts_of(layers: Stage, num_layers: int, units_per_layer: int) -> range:
    """Returns the parts of a stage; of layers, the first bring the embedding, and the last the head."""
    if isinstance(layers, StageParts):
        return range(*layers)
    first = 1 + layers.start * units_per_layer if layers.start else 0
    last = 1 + layers.stop * units_per_layer + (layers.stop == num_layers)
    return range(first, last)


def kinds_by_layer(parts: Sequence[int], own: Sequence[int], units_per_layer: int) -> tuple[tuple[int, ...], ...]:
    """Returns the kinds of a stage's parts, those of one layer together, sorted: stages with equal ones cost the same.

    The halves of two layers aren't those of one, of which less is kept where layers are recomputed one by one.
    """
    layers = groupby(own, lambda part: (part - 1) // units_per_layer)
    return tuple(sorted(tuple(parts[part] for part in layer) for _, layer in layers))


_Table = TypeVar("_Table", bound=TableCost, covariant=True)


class _StageCosts(Protocol[_Table]):
    """The costs of stages: `AnalyticCosts` or `Profile`."""

    @property
    def parts(self) -> Sequence[int]: ...

    @property
    def units_per_layer(self) -> int: ...

    def parts_of(self, layers: Stage) -> range: ...

    def has_backward(self, stage: Stage) -> bool: ...

    def seconds(self, layers: StageParts, op: Op, length: Any, context: Any) -> Any: ...

    def activation_bytes(self, layers: Stage, length: int) -> float: ...

    def kept_bytes(self, layers: StageParts, recompute: str, length: int) -> float: ...

    def message_bytes(self, length: Any) -> Any: ...

    def handling_seconds(self, length: Any) -> Any: ...

    def action_costs(self, times: Mapping[tuple[int, int, Op], float], slices: Sequence[int]) -> _Table: ...


BY_LAYER = frozenset({"full", "stage+full"})  # recompute one layer after the other, within the backward
REPLAYED = frozenset({"selective", "stage", "stage+full"})  # recompute by an R before the backward


def layers_with_backward(costs: _StageCosts[TableCost], stage: Stage) -> list[StageParts]:
    """Returns the layers of a stage that have a backward, of each the parts that are there."""
    parts, last = costs.parts_of(stage), len(costs.parts) - 1
    inner = [part for part in parts if 0 < part < last]
    layers = [[*layer] for _, layer in groupby(inner, lambda part: (part - 1) // costs.units_per_layer)]
    in_parts = [StageParts(layer[0], layer[-1] + 1) for layer in layers]
    return [layer for layer in in_parts if costs.has_backward(layer)]


def all_of(layers: Sequence[StageParts]) -> StageParts:
    """Returns consecutive layers as one stage, which may be empty."""
    return StageParts(layers[0].start, layers[-1].stop) if layers else StageParts(0, 0)


def kept_by_layers(costs: _StageCosts[TableCost], stage: Stage, length: int) -> float:
    """Returns the bytes that a slice's F keeps where its layers are recomputed one by one: the input of each of them,
    and the saved tensors of the model's ends."""
    ends = [StageParts(part, part + 1) for part in (0, len(costs.parts) - 1) if part in costs.parts_of(stage)]
    saved = sum(float(costs.activation_bytes(end, length)) for end in ends)
    return saved + len(layers_with_backward(costs, stage)) * float(costs.message_bytes(length))


def check_partition(partition: Sequence[float], num_layers: int, units_per_layer: int) -> None:
    """Checks how many layers each stage has.

    Raises:
        SlipstreamError: where they don't add up to the model's, or a stage has a part of a layer that can't be cut.
    """
    least = 1 / units_per_layer
    empty = any(count < least for count in partition[1:-1])
    if min(partition, default=-1) < 0 or empty or sum(partition) != num_layers or any(c % least for c in partition):
        halves = "multiples of 0.5" if units_per_layer == 2 else "whole numbers, as its layers can't be cut in half"
        raise SlipstreamError(
            f"partition={list(partition)} has {sum(partition):g} layers; give every stage at least {least:g}, in "
            f"{halves} (the first may have 0, for the embedding alone, and the last 0, for the head alone), and the "
            f"model's {num_layers} in all."
        )


def choose_stages(parts: Sequence[int]) -> tuple[range, ...]:
    """Returns the stages to measure, one part of each kind and a run of several; `parts` has the kind of every part."""
    rank = max(parts) + 2
    chosen: list[range] = []
    for stage in _candidates(len(parts)):
        tried = [stage_row(parts, chosen_stage) for chosen_stage in (*chosen, stage)]
        if np.linalg.matrix_rank(np.array(tried)) == len(tried):
            chosen.append(stage)
        if len(chosen) == rank:
            break
    return tuple(chosen)


def stage_row(parts: Sequence[int], stage: range) -> list[float]:
    """Returns the row of a stage."""
    kinds = [parts[part] for part in stage]
    return [1.0, *(float(kinds.count(kind)) for kind in range(max(parts) + 1))]


def combine(parts: Sequence[int], measured: Sequence[range], row: Sequence[float]) -> list[float]:
    """Returns the weight of each measured stage in `row`.

    Raises:
        ValueError: where they don't span it.
    """
    rows = np.array([stage_row(parts, stage) for stage in measured])
    weights = np.linalg.lstsq(rows.T, np.array(row), rcond=None)[0]
    if np.abs(rows.T @ weights - row).max() > _EXACT:
        raise ValueError(f"the measured stages {[*measured]} don't span {[*row]}")
    return [float(weight) for weight in weights.round(9)]


@lru_cache(maxsize=4096)
def stage_weights(parts: tuple[int, ...], measured: tuple[range, ...], stage: range) -> list[float]:
    """Returns the weight of each measured stage in a stage."""
    return combine(parts, measured, stage_row(parts, stage))


def _candidates(num_parts: int) -> list[range]:
    """Returns stages of one part, then of several, the longest first; those with an end of the model after the others
    of their size."""
    sizes = (1, *range(min(_LONGEST, num_parts), 1, -1))
    stages = [range(a, a + size) for size in sizes for a in range(num_parts - size + 1)]
    return sorted(stages, key=lambda stage: (sizes.index(len(stage)), stage.start == 0 or stage.stop == num_parts))


@dataclass(frozen=True)
class ActionBytes:
    """The bytes of a stage's actions on a slice. Messages, keys and values, and weight gradients are counted apart.

    Args:
        kept: those that F keeps for the backward.
        deferred: those that I leaves for W, output gradients among it, less those of F's that it frees.
        peaks: the most that F needs above those it keeps, and B, I and W above those in use before.
        alone: the most that F holds where it keeps nothing.
    """

    kept: float
    deferred: float
    peaks: Mapping[Op, float]
    alone: float = 0.0

    @classmethod
    def estimated(cls, kept: float, made: float, num_layers: int, passing: float = 0.0) -> ActionBytes:
        """Returns the bytes where only those that F keeps are known, those that a backward makes before it frees any,
        and those that pass in both: W needs all that F kept, and a layer's F holds what it would keep."""
        peaks = {Op.F: passing, Op.B: made + passing, Op.I: made + passing, Op.W: 0.0}
        return cls(kept, 0.0, peaks, kept / num_layers + passing)


OPS = (Op.F, Op.B, Op.I, Op.W)  # the ops that have times of their own; R takes as long as F
# whose exchanges take time within actions: of ranks that share layers, slices and experts
EXCHANGES = ("tensor parallel", "context parallel", "expert parallel")
WITH_MESSAGES = (Op.F, Op.B, Op.I)  # the ops whose inputs and results travel between stages


def messages_of_stages(num_stages: int) -> Ints:
    """Returns how many messages F, and B or I, of each stage takes and sends."""
    ends = np.arange(num_stages)
    num_messages: Ints = 0 + (ends > 0) + (ends < num_stages - 1)
    return num_messages


def pipeline_costs(costs: _StageCosts[_Table], partition: Sequence[float], slices: Sequence[int]) -> _Table:
    """Returns the simulator's costs of a pipeline: times and activations of every stage and slice, and messages.

    Args:
        costs: of any stage.
        partition: layers of each stage, perhaps with halves; 0 for an end of the model alone.
        slices: tokens of each slice.

    Raises:
        SlipstreamError: where the layers don't add up to the model's, a slice is empty, or its time is unknown.
    """
    units_per_layer = costs.units_per_layer
    num_layers = (len(costs.parts) - 2) // units_per_layer
    check_partition(partition, num_layers, units_per_layer)
    if min(slices, default=0) < 1:
        raise SlipstreamError(f"slices={list(slices)}: give at least one, each of 1 token or more.")
    times: dict[tuple[int, int, Op], float] = {}
    activations, kept = dict[tuple[int, int], float](), dict[tuple[int, int], float]()
    stages = StageParts.of_partition(partition, num_layers, units_per_layer)
    contexts = accumulate(slices[:-1], initial=0)
    places = enumerate(zip(slices, contexts, strict=True))
    for (stage, layers), (index, (length, context)) in product(enumerate(stages), places):
        handled = float(costs.handling_seconds(length)) * messages_of_stages(len(stages))[stage]
        for op in (*OPS, Op.R):
            times[stage, index, op] = float(costs.seconds(layers, op, length, context))
            times[stage, index, op] += handled if op in WITH_MESSAGES else 0.0
        activations[stage, index] = float(costs.activation_bytes(layers, length))
        kept[stage, index] = float(costs.kept_bytes(layers, "stage", length))
    return replace(costs.action_costs(times, slices), activations=activations, kept=kept)
