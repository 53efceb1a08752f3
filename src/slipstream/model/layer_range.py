"""Consecutive layers of a model, which may begin and end inside a layer: between its attention and its feed-forward."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from enum import Enum
from math import ceil
from typing import NamedTuple


class Half(Enum):
    """The two residual branches of a layer: x + attention(x), then h + feed_forward(h)."""

    ATTENTION = "attention"
    FEED_FORWARD = "feed-forward"


class HalfLayer(NamedTuple):
    """A layer without its other half."""

    layer: int
    half: Half


@dataclass(frozen=True)
class LayerRange(Collection[int | HalfLayer]):
    """Layers [start, stop) in steps of a half: layer 3 is [3, 4), its attention [3, 3.5), its feed-forward [3.5, 4).

    Holds whole layers as their numbers, and at its ends perhaps a HalfLayer:

        list(LayerRange(3.5, 6)) == [HalfLayer(3, Half.FEED_FORWARD), 4, 5]
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

    def __iter__(self) -> Iterator[int | HalfLayer]:
        for layer in self.layers:
            if layer < self.start:
                yield HalfLayer(layer, Half.FEED_FORWARD)
            elif layer + 1 > self.stop:
                yield HalfLayer(layer, Half.ATTENTION)
            else:
                yield layer

    def __contains__(self, each: object) -> bool:
        return each in tuple(self)

    def __len__(self) -> int:
        return len(self.layers)
