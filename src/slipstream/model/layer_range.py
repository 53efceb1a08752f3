"""What a stage owns: consecutive layers, which may begin and end inside one, or only what runs before or after them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from math import ceil
from typing import NamedTuple, TypeAlias


class LayerHalf(Enum):
    """The two residual branches of a layer: x + attention(x), then h + feed_forward(h)."""

    ATTENTION = "attention"
    FEED_FORWARD = "feed-forward"


class ModelEnd(Enum):
    """What runs outside the layers: on the first and the last stage, which may have no layer at all."""

    EMBEDDING = "embedding"
    HEAD = "head"


class HalfLayer(NamedTuple):
    """A layer without its other half."""

    layer: int
    half: LayerHalf


StagePart: TypeAlias = int | HalfLayer | ModelEnd  # a whole layer goes by its number

ALLOWED_LAYER_COUNTS = (
    "half a layer at least, in multiples of 0.5; or of none, if the first is to embed and no more, or the last to be "
    "the head alone"
)


def are_allowed_layer_counts(counts: Sequence[float]) -> bool:
    """Whether stages may have so many layers, one after the other."""
    return all(count >= 0 and count % 0.5 == 0 for count in counts) and 0 not in counts[1:-1]


@dataclass(frozen=True)
class LayerRange(Collection[StagePart]):
    """Layers [start, stop) in steps of a half: layer 3 is [3, 4), its attention [3, 3.5), its feed-forward [3.5, 4).

    Holds whole layers as their numbers, and at its ends perhaps a HalfLayer:

        list(LayerRange(3.5, 6)) == [HalfLayer(3, Half.FEED_FORWARD), 4, 5]

    Without layers it is an Edge that is a stage of its own: at 0 the embedding, else the head.
    """

    start: float
    stop: float

    @property
    def layers(self) -> range:
        """Those of which it has a half at least."""
        return range(int(self.start), ceil(self.stop))

    @property
    def has_halves(self) -> bool:
        """Whether it begins or ends inside a layer."""
        return any(isinstance(each, HalfLayer) for each in self)

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
