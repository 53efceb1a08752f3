"""The operations and bytes of a model's parts, counted per token: the input of counted costs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import gcd
from typing import Any

from slipstream.cost.fit import AttentionWindow
from slipstream.cost.work import Stage, part_kinds, parts_of
from slipstream.number_format import NF4
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
# The amounts of an OpCount.
_AMOUNTS = (
    *("flops", "unaligned_flops", "matmul_bytes", "hidden_depth", "other_depth"),
    *("wide_bytes", "other_bytes"),
)
# The sizes of a PartCount.
_SIZES = (
    *("num_parameters", "num_untrained", "num_quantised", "num_in_experts", "num_trained_in_experts"),
    "num_trained_tensors",
    *("activation_bytes", "wide_activation_bytes", "product_bytes", "state_bytes"),
)


@dataclass(frozen=True)
class OpCount:
    """The counts of one op (F, I or W) of a part, without attention's scores, which depend on the context.

    Bytes are those of the tensors that each kernel reads and writes. `wide_bytes` are of kernels other than matrix
    products on tensors as wide as the hidden state, which tensor parallelism repeats on every rank. A product's depth
    is the number of terms that each element of its result adds up.
    """

    flops: Amount = _NONE  # FLOPs of matrix products
    unaligned_flops: Amount = _NONE  # of these, in 16 bits with rows of other sizes than multiples of 16 bytes
    matmul_bytes: Amount = _NONE
    hidden_depth: Amount = _NONE  # the sum over products whose depth is the width of the hidden state
    other_depth: Amount = _NONE  # the sum over all others
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
    has_gradient: bool = True  # whether its queries, keys and values are differentiated

    def key_heads_of_rank(self, num_ranks: int) -> int:
        """Returns how many heads of keys and values one of `num_ranks` has that share the query heads: one for each run
        of queries that read the same one, so that several ranks have it where there are fewer heads than ranks."""
        queries = self.num_heads // num_ranks
        return max(1, queries // gcd(queries, self.num_heads // self.num_key_value_heads))

    def flops(self, num_scores: float) -> float:
        """Returns the FLOPs of so many scores in a forward: of the products with keys and with values."""
        return 2 * num_scores * (self.key_width + self.value_width)

    def step_flops(self, num_scores: float) -> float:
        """Returns the FLOPs of so many scores in a step, with twice as many backward where there is a gradient."""
        return (3 if self.has_gradient else 1) * self.flops(num_scores)


@dataclass(frozen=True)
class PartCount:
    """A layer of one kind or one of its halves, the embedding, or the norm and head with the loss.

    A part below the lowest one with a trained parameter has no backward: its I and W count nothing, and nothing is
    kept for them. A frozen one above has I alone.
    """

    name: str
    num_parameters: int
    ops: Mapping[Op, OpCount]  # F, I, W
    attentions: tuple[AttentionCall, ...]
    activation_bytes: float  # per token: kept by F for the backward, its input included
    product_bytes: float = 0.0  # per token: outputs of products and attention, kept by selective recomputation
    state_bytes: float = 0.0  # per slice and row: states left to the next slice besides keys and values
    is_half: bool = False  # whether it is the attention half or the feed-forward half of a layer
    num_untrained: int = 0  # parameters that aren't trained
    num_quantised: int = 0  # untrained ones that are kept in 4 bits
    dequantised_bytes: float = 0.0  # the largest weight made of quantised ones for a product
    has_backward: bool = True  # whether it, or a part below, has a trained one
    wide_activation_bytes: float = 0.0  # per token: the activations as wide as the hidden state
    num_in_experts: int = 0  # parameters of experts, each of which may be on another rank
    num_trained_in_experts: int = 0
    num_trained_tensors: int = 0
    num_experts: int = 0
    experts_per_token: int = 0  # the experts that each token chooses

    @property
    def num_trained(self) -> int:
        """The number of its parameters that are trained."""
        return self.num_parameters - self.num_untrained

    def saved_bytes(self, each: float) -> float:
        """Returns how many bytes 4 bits take less than parameters that take `each`."""
        return (each - NF4.weight_bytes) * self.num_quantised

    @property
    def step_products(self) -> Amount:
        """The FLOPs of a step's matrix products: of F, and of I and W where they run.

        Each of these takes as much as F, so that all three take three times F. Of a part with frozen parameters, I and
        W are as they were counted.
        """
        forward = self.ops[Op.F].flops
        if not self.num_untrained:
            return Amount(3 * forward.constant, 3 * forward.per_token)
        flops = [self.ops[op].flops for op in (Op.F, Op.I, Op.W)]
        return Amount(sum(one.constant for one in flops), sum(one.per_token for one in flops))

    @property
    def has_context_gradient(self) -> bool:
        """Whether keys and values have gradients."""
        return any(call.has_gradient for call in self.attentions)

    def mixed(self, other: PartCount, third: PartCount, mix: Callable[[float, float, float], float]) -> PartCount:
        """Returns the part whose every number is `mix` of this part's, the other's and the third's."""

        def amount(*amounts: Amount) -> Amount:
            constants, per_token = zip(*((a.constant, a.per_token) for a in amounts), strict=True)
            return Amount(max(0.0, mix(*constants)), max(0.0, mix(*per_token)))

        def counts(*ops: OpCount) -> OpCount:
            values: dict[str, Any] = {name: amount(*(getattr(op, name) for op in ops)) for name in _AMOUNTS}
            for name in ("num_matmuls", "num_kernels"):
                values[name] = round(mix(*(getattr(op, name) for op in ops)))
            return OpCount(**values)

        parts = (self, other, third)
        numbers: dict[str, Any] = {name: mix(*(getattr(part, name) for part in parts)) for name in _SIZES}
        ops = {op: counts(*(part.ops[op] for part in parts)) for op in self.ops}
        counts_of = {name: round(numbers[name]) for name in _SIZES if name.startswith("num_")}
        return replace(self, **numbers | counts_of, ops=ops)


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
    # The two halves of each kind of layer; empty where layers can't be cut.
    halves: tuple[tuple[PartCount, PartCount], ...] = ()

    @property
    def whole(self) -> range:
        """The layers of the model."""
        return range(len(self.kinds))

    @property
    def units_per_layer(self) -> int:
        """2 where the halves of layers are known, else 1."""
        return 2 if self.halves else 1

    @cached_property
    def parts(self) -> tuple[int, ...]:
        """The kind of every part of the model: embedding, units of layers, head."""
        return part_kinds(self.kinds, self.units_per_layer)

    @cached_property
    def of_kind(self) -> tuple[PartCount, ...]:
        """A part of each kind."""
        units = [unit for halves in self.halves for unit in halves] if self.halves else self.layers
        return (*units, self.embedding, self.head)

    @property
    def num_experts(self) -> int:
        """The number of experts that all layers with experts can spread, 0 without experts."""
        return gcd(*(part.num_experts for part in self.layers))

    @cached_property
    def fewest_heads(self) -> int:
        """The fewest attention heads of a layer, 1 without attention."""
        return min((call.num_heads for part in self.layers for call in part.attentions), default=1)

    @cached_property
    def head_shares(self) -> tuple[int, ...]:
        """The numbers of ranks that can have equally many attention heads of every layer."""
        calls = [call for part in self.layers for call in part.attentions]
        return tuple(n for n in range(1, self.fewest_heads + 1) if all(call.num_heads % n == 0 for call in calls))

    def parts_of(self, stage: Stage) -> range:
        """Returns the numbers of a stage's parts: 0 is the embedding, the last the head."""
        return parts_of(stage, len(self.kinds), self.units_per_layer)

    def has_head(self, stage: Stage) -> bool:
        """Returns whether the head is among a stage's parts."""
        return self.parts_of(stage).stop == len(self.parts)

    def counted(self, stage: Stage) -> tuple[tuple[int, PartCount], ...]:
        """Returns the parts of a stage as (how many, part), equal ones together; of layers their halves, if known."""
        kinds = Counter(self.parts[part] for part in self.parts_of(stage))
        return tuple((count, self.of_kind[kind]) for kind, count in sorted(kinds.items()))

    @cached_property
    def num_frozen_parts(self) -> int:
        """The number of first parts without a backward."""
        return next(index for index, kind in enumerate(self.parts) if self.of_kind[kind].has_backward)

    @property
    def layers_without_backward(self) -> float:
        """The number of first layers without a backward; one whose first half alone has none counts as 0.5."""
        return max(0, self.num_frozen_parts - 1) / self.units_per_layer

    @property
    def num_trained(self) -> int:
        """The parameters of the whole model that are trained, a tied weight counted once."""
        total = sum(count * part.num_trained for count, part in self.counted(self.whole))
        is_tied = self.tied and self.embedding.num_trained > 0
        return total - (self.head_weight if is_tied else 0)

    @property
    def num_parameters(self) -> int:
        """The parameters of the whole model, a tied weight counted once, as `model.num_parameters()` does."""
        total = sum(count * part.num_parameters for count, part in self.counted(self.whole))
        return total - (self.head_weight if self.tied else 0)

    @property
    def head_weight(self) -> int:
        """The elements of the head's matrix: two FLOPs each in a token's forward."""
        return round(self.head.ops[Op.F].flops.per_token / 2)
