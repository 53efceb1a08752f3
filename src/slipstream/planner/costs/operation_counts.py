"""The operations and bytes of a model's parts, counted per token: the input of analytic costs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from slipstream.planner.costs.time_fit import AttentionWindow
from slipstream.schedule import Op


@dataclass(frozen=True)
class Amount:
    """A quantity that grows with the tokens of a slice: `constant` + `per_token` · tokens."""

    constant: float = 0.0
    per_token: float = 0.0

    def at(self, num_tokens: float) -> float:
        """Returns the quantity for so many tokens."""
        return self.constant + self.per_token * num_tokens


_NONE = Amount()


@dataclass(frozen=True)
class StateBytes:
    """Bytes per parameter that training keeps. bfloat16 trains with a float32 master weight and two moments."""

    weights: float
    gradients: float
    optimizer: float

    @classmethod
    def of(cls, dtype: str) -> StateBytes:
        return cls(4, 4, 8) if dtype == "float32" else cls(2, 4, 12)


@dataclass(frozen=True)
class OpCount:
    """The counts of one op (F, I or W) of a part, without attention's scores, which depend on the context.

    Bytes are those of the tensors that each kernel reads and writes. `wide_bytes` are of kernels other than matrix
    products on tensors as wide as the hidden state, which tensor parallelism repeats on every rank.
    """

    flops: Amount = _NONE  # of matrix products
    matmul_bytes: Amount = _NONE
    wide_bytes: Amount = _NONE
    other_bytes: Amount = _NONE
    num_matmuls: int = 0
    num_kernels: int = 0  # matrix products included


@dataclass(frozen=True)
class AttentionCall:
    """One attention call of a layer: its heads, the widths of its keys and values, and its mask."""

    num_heads: int
    num_key_value_heads: int
    key_width: int
    value_width: int
    window: AttentionWindow


@dataclass(frozen=True)
class PartCount:
    """A layer of one kind, the embedding, or the norm and head with the loss."""

    name: str
    num_parameters: int
    ops: Mapping[Op, OpCount]  # F, I, W
    attentions: tuple[AttentionCall, ...]
    activation_bytes: float  # per token: what F keeps for the backward, its input included
    context_bytes: float  # per token: keys and values
    product_bytes: float = 0.0  # per token: outputs of products and attention, what selective recomputation keeps


@dataclass(frozen=True)
class ModelCount:
    """The counts of a model's parts in one dtype; `kinds[layer]` is the number of the layer's kind."""

    kinds: tuple[int, ...]
    layers: tuple[PartCount, ...]  # one of each kind
    embedding: PartCount
    head: PartCount
    hidden_size: int
    dtype: str
    dtype_bytes: int
    tied: bool = False  # the head's weight is the embedding's

    @property
    def whole(self) -> range:
        """The layers of the model."""
        return range(len(self.kinds))

    def counted(self, layers: range) -> tuple[tuple[int, PartCount], ...]:
        """Returns the parts of the stage with these layers as (how many, part), equal layers together."""
        kinds = Counter(self.kinds[layer] for layer in layers)
        inner = tuple((number, self.layers[kind]) for kind, number in sorted(kinds.items()))
        first = ((1, self.embedding),) if layers.start == 0 else ()
        last = ((1, self.head),) if layers.stop == len(self.kinds) else ()
        return first + inner + last

    @property
    def num_parameters(self) -> int:
        """The parameters of the whole model, a tied weight counted once, as `model.num_parameters()` does."""
        total = sum(number * part.num_parameters for number, part in self.counted(self.whole))
        return total - (self.head_weight if self.tied else 0)

    @property
    def head_weight(self) -> int:
        """The elements of the head's matrix: two FLOPs each in a token's forward."""
        return round(self.head.ops[Op.F].flops.per_token / 2)
