"""One microbatch of a sequence of layers or a token slice of it, and what runs of it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from torch import Tensor

from slipstream.attention import ContextStore
from slipstream.model.hooks import keyed_seed
from slipstream.model.tensor_spec import Tensors

LayerValue = Tensor | Tensors  # what a layer takes and returns


@dataclass(frozen=True)
class BatchSlice:
    """Rows of a batch: what the first layer is given. Of its token slices, if it has any, the first one runs the layers
    before CutTokens."""

    value: LayerValue
    microbatch: int = 0
    index: int = 0  # of its token slices
    seed: int = 0  # of this step
    tokens: range | None = None  # of the slice; None: it is in one piece, and CutTokens does nothing
    num_tokens: int = 1  # of all slices

    @property
    def tensors(self) -> Tensors:
        return as_tuple(self.value)

    @property
    def length(self) -> int:
        return self.num_tokens


@dataclass
class LayerContext:
    """A stage's forward of one microbatch or token slice."""

    piece: BatchSlice
    tokens: range | None = None  # which of them the layers work on; None: all, as they come
    store: ContextStore | None = None  # of the keys and values of the slices
    layer: int = -1  # whose forward runs, counted over the whole sequence
    calls: Counter[int] = field(default_factory=Counter)  # of attention, by layer

    def seed(self, layer: int) -> int:
        """Random state is keyed by step, layer, microbatch and slice, so every split and schedule draws the same
        (rule 10)."""
        return keyed_seed(self.piece.seed, layer, self.piece.microbatch, self.piece.index)

    def next_call(self) -> tuple[int, int]:
        """The store's key: a layer may attend several times in one forward."""
        self.calls[self.layer] += 1
        return self.layer, self.calls[self.layer]


def as_tuple(value: LayerValue) -> Tensors:
    return value if isinstance(value, tuple) else (value,)


def as_value(tensors: Tensors, is_tuple: bool) -> LayerValue:
    return tensors if is_tuple else tensors[0]
