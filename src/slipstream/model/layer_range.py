"""Describes which consecutive layers a stage owns, which may begin or end inside a layer, or an end of the model."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from enum import Enum
from math import ceil
from typing import NamedTuple, TypeAlias


class LayerHalf(Enum):
    """The two residual branches of a layer: x + attention(x), then h + feed_forward(h)."""

    ATTENTION = "attention"
    FEED_FORWARD = "feed-forward"


class ModelEnd(Enum):
    """The parts that run outside the layers: the embedding on the first stage and the head on the last."""

    EMBEDDING = "embedding"
    HEAD = "head"


class HalfLayer(NamedTuple):
    """One half of a layer."""

    layer: int
    half: LayerHalf


StagePart: TypeAlias = int | HalfLayer | ModelEnd  # number of a whole layer, or a half, or an end


@dataclass(frozen=True)
class LayerRange(Collection[StagePart]):
    """The layers [start, stop) in steps of half a layer: layer 3 is [3, 4), its attention [3, 3.5).

    Iterating gives whole layers as numbers and, at the ends, perhaps a HalfLayer:

        list(LayerRange(3.5, 6)) == [HalfLayer(3, LayerHalf.FEED_FORWARD), 4, 5]

    A range without layers is a ModelEnd that is a stage of its own: the embedding at 0, else the head.
    """

    start: float
    stop: float

    @property
    def layers(self) -> range:
        """The numbers of the layers of which the range has at least a half."""
        return range(int(self.start), ceil(self.stop))

    def __iter__(self) -> Iterator[StagePart]:
        if self.start == self.stop:
            yield ModelEnd.HEAD if self.start else ModelEnd.EMBEDDING
        for layer in self.layers:
            if layer < self.start:
                yield HalfLayer(layer, LayerHalf.FEED_FORWARD)
            elif layer + 1 > self.stop:
                yield HalfLayer(layer, LayerHalf.ATTENTION)
            else:
                yield layer

    def __contains__(self, each: object) -> bool:
        return each in tuple(self)

    def __len__(self) -> int:
        return sum(1 for _ in self)
