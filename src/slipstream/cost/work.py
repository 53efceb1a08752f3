"""Work: an operation on slices, by the parts of a model among which it is counted, and the stages that they make.

A model's parts are its embedding, the units of its layers (halves where layers can be cut, else whole layers) and its
head with the loss. Equal parts have the same kind, and a stage is a run of parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, groupby, pairwise
from typing import NamedTuple, TypeAlias

import numpy as np

from slipstream.array_types import Ints
from slipstream.errors import SlipstreamError
from slipstream.schedule import Op

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


class Work(NamedTuple):
    """An operation on slices, as many as the arrays are long, whatever the part of the model.

    F, B, I, W, or R: an F that runs again.
    """

    op: Op
    lengths: Ints  # tokens of each slice, of every sequence of the microbatch
    contexts: Ints  # tokens before each slice

    @classmethod
    def of_slices(cls, op: Op, slices: Sequence[int]) -> Work:
        """Returns the work on slices that follow each other."""
        lengths = np.array(slices, np.int64)
        return cls(op, lengths, np.cumsum(lengths) - lengths)


BY_LAYER = frozenset({"full", "stage+full"})  # recomputation of one layer after the other, within the backward
REPLAYED = frozenset({"selective", "stage", "stage+full"})  # recomputation by an R before the backward


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


OPS = (Op.F, Op.B, Op.I, Op.W)  # the ops that have times of their own; R takes as long as F
WITH_MESSAGES = (Op.F, Op.B, Op.I)  # the ops whose inputs and results travel between stages


def messages_of_stages(num_stages: int) -> Ints:
    """Returns how many messages F, and B or I, of each stage takes and sends."""
    ends = np.arange(num_stages)
    num_messages: Ints = 0 + (ends > 0) + (ends < num_stages - 1)
    return num_messages
