"""The rows and tokens of a batch on which layers of an nn.Sequential work, and what they may read while they run."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from torch import Tensor

from slipstream.attention import ContextStore
from slipstream.keyed_draws import keyed_seed
from slipstream.model.tensor_spec import Tensors

LayerValue = Tensor | Tensors  # a layer's input or output


@dataclass(frozen=True)
class BatchSlice:
    """One microbatch of a batch, or one token slice of it: the first layer's input.

    Of the token slices, only the first runs the layers before CutTokens.
    """

    value: LayerValue
    microbatch: int = 0
    index: int = 0  # the number of the token slice
    seed: int = 0  # the step's seed
    tokens: range | None = None  # the slice's; None: the microbatch isn't sliced
    length: int = 1  # tokens of all slices together

    @property
    def tensors(self) -> Tensors:
        return as_tuple(self.value)


@dataclass
class LayerContext:
    """A stage's forward of one microbatch or token slice while it runs."""

    piece: BatchSlice
    store: ContextStore  # keys and values of the microbatch's slices
    tokens: range | None = None  # those that the layers work on; None: all of the input
    layer: int = -1  # the layer that runs, counted over the whole sequence
    calls: Counter[int] = field(default_factory=Counter)  # calls of attention, by layer

    def seed(self) -> int:
        """Returns a seed keyed by step, layer, microbatch and slice, so every split and schedule draws the same (rule
        10)."""
        return keyed_seed(self.piece.seed, self.layer, self.piece.microbatch, self.piece.index)

    def next_call(self) -> tuple[int, int]:
        """Returns the store's key: a layer may attend several times in one forward."""
        self.calls[self.layer] += 1
        return self.layer, self.calls[self.layer]


def as_tuple(value: LayerValue) -> Tensors:
    return value if isinstance(value, tuple) else (value,)


def as_value(tensors: Tensors, is_tuple: bool) -> LayerValue:
    return tensors if is_tuple else tensors[0]
