"""Who shares the work of a stage: what one of its ranks computes, reads, keeps and sends.

It is applied first, to what is counted of a model and before any speed is known: counted costs are a device's speeds
times the amounts of one rank. Measured times are those of one rank already, and take its sizes alone from here.

A class for each way in which ranks share work, in `WAYS`, says what it costs, what it refuses and what it converts. By
`Divided` every other amount follows.

Of t tensor-parallel ranks each has 1/t of every product and of every tensor that isn't as wide as the hidden state; two
all-reduces a layer forward and two backward add up what is (Megatron's g and f, PTD-P section 2.3). Of g
context-parallel ranks each has n/g tokens of everything but attention, and in attention Hq/(t g) heads of all n: two
all-to-alls a layer, forward and backward, take queries, keys and values there, and the outputs back. Or keys and values
of all n are gathered, and their gradients reduced and scattered; the last rank's n/g queries see most. Of e
expert-parallel ranks each has 1/e of the experts; two all-to-alls take a row for every expert that a token chose there,
and the results back. Tokens are taken to choose all experts alike, so that a rank computes as many rows as it sends.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, reduce
from itertools import product
from typing import Any, ClassVar, NamedTuple

from slipstream.cost.operation_counts import AttentionCall, ModelCount, OpCount, PartCount
from slipstream.options import SHARED_WORK, UNSHARED, Degrees, SharedWork, numbers_exchanged
from slipstream.schedule import Op

# FlashAttention computes with heads as wide as the next multiple.
_HEAD_WIDTHS = 32
# The fewest bytes of a number that ranks add up.
_SUM_BYTES = 4


class Divided(NamedTuple):
    """Among how many ranks each quantity of a stage's work is divided; what isn't divided, each of them has whole."""

    tokens: int = 1  # a slice's tokens outside of attention
    queries: int = 1  # a slice's tokens in attention
    heads: int = 1  # attention heads
    width: int = 1  # products, their weights, and tensors that aren't as wide as the hidden state
    wide: int = 1  # tensors as wide as the hidden state, where they aren't gathered
    # A layer's experts. Those that are spread aren't cut as other weights are.
    experts: int = 1

    def beside(self, other: Divided) -> Divided:
        """Returns what ranks have that share work in both ways."""
        return Divided(*(own * more for own, more in zip(self, other, strict=True)))

    def held(self, number: float, in_experts: float) -> float:
        """Returns how many of a stage's parameters, of which some are in experts, each rank holds."""
        spread = self.experts if self.experts > 1 else self.width
        return (number - in_experts) / self.width + in_experts / spread

    def copies(self, number: int) -> tuple[Copies, Copies]:
        """Returns the ranks that have the same weights, `number` of them, and those that have the same experts."""
        return Copies(number, self.width), Copies(max(1, number // self.experts), self.width * self.experts)

    @property
    def message_parts(self) -> int:
        """The ranks that have the same tensor as wide as the hidden state: each sends a part of it to the next stage,
        where they gather it."""
        return self.width // self.wide


class Copies(NamedTuple):
    """Ranks that have the same weights."""

    num_ranks: int
    stride: int  # devices from one of them to the next


class Exchange(NamedTuple):
    """What ranks send each other at once, so many `times`."""

    num_bytes: Any  # each rank's part
    num_ranks: int
    stride: int  # devices from one of them to the next
    is_sum: bool = False  # an all-reduce; else an all-to-all
    times: int = 1


class Products(NamedTuple):
    """The matrix products of one rank."""

    flops: Any
    unaligned_flops: Any
    depth: Any  # terms that elements of their results add up, one product after the other
    num_bytes: Any  # read and written


class Way(ABC):
    """A way in which ranks share work: what it costs, what it refuses, and what it converts."""

    degree: ClassVar[str]  # a field of `Degrees`
    rule: ClassVar[str]  # what a degree must fulfil, with the names of numbers that are filled in
    # Whether its ranks are in one node, or on one fast link, unless more are asked for.
    stays_inside: ClassVar[bool] = False
    is_of_experts: ClassVar[bool] = False  # whether models without experts have nothing to share so
    takes_any: ClassVar[bool] = False  # whether other degrees than the possible ones are tried where they are asked for

    @property
    def named(self) -> SharedWork:
        """Its names where it is chosen."""
        return next(each for each in SHARED_WORK if each.degree == self.degree)

    def refusal(self, model: ModelCount) -> str:
        """Returns why a model's work can't be shared so, as far as its counts tell; "" where it can."""
        return ""

    @abstractmethod
    def possible(self, model: ModelCount) -> tuple[int, ...]:
        """Returns the numbers of ranks that can share a model's work."""

    @abstractmethod
    def divide(self, degrees: Degrees, shares_tokens: bool) -> Divided:
        """Returns what is divided. `shares_tokens`: with sequence parallelism."""

    def exchanges(self, own: Sharing, part: PartCount, op: Op, length: Any) -> Sequence[Exchange]:
        """Returns what a part sends to the ranks with which it shares work in F, I, W or R of a slice."""
        return ()

    def more_activations(self, own: Sharing, part: PartCount) -> float:
        """Returns the bytes of a token that F keeps because of its exchanges."""
        return 0.0


class _Tensor(Way):
    """Ranks that share every layer."""

    degree = "tensor"
    rule = "must divide the {devices} and every layer's heads"
    stays_inside = True

    def possible(self, model: ModelCount) -> tuple[int, ...]:
        keys = {call.num_key_value_heads for part in model.layers for call in part.attentions}
        return tuple(t for t in model.head_shares if all(k % t == 0 or t % k == 0 for k in keys))

    def divide(self, degrees: Degrees, shares_tokens: bool) -> Divided:
        return Divided(heads=degrees.tensor, width=degrees.tensor, wide=degrees.tensor if shares_tokens else 1)

    def exchanges(self, own: Sharing, part: PartCount, op: Op, length: Any) -> Sequence[Exchange]:
        """Returns the all-reduces of a layer's two outputs or two gradients. Where ranks share tokens they are
        reduce-scatters and all-gathers, as many bytes in all."""
        in_layer = own.num_regions(part)
        times = 0
        if op in (Op.F, Op.R):
            times = in_layer or int(part is own.model.embedding)
        elif op is Op.I and part.has_backward:
            times = in_layer or int(part is own.model.head)
        return [Exchange(own.hidden_bytes(length), own.degrees.tensor, 1, is_sum=True, times=times)]


class _Context(Way):
    """Ranks that share every slice."""

    degree = "context"
    rule = "must divide the {devices} and leave each rank enough tokens of {seq_len}"
    # Any number of ranks can gather keys.
    takes_any = True

    def refusal(self, model: ModelCount) -> str:
        carries = any(part.state_bytes for part in model.layers)
        return "The model's layers carry states from slice to slice." if carries else ""

    def possible(self, model: ModelCount) -> tuple[int, ...]:
        doublings = {2**n for n in range(model.fewest_heads.bit_length())}
        return tuple(sorted({*model.head_shares, *doublings}))

    def divide(self, degrees: Degrees, shares_tokens: bool) -> Divided:
        if degrees.exchange == "keys":
            return Divided(tokens=degrees.context, queries=degrees.context)
        return Divided(tokens=degrees.context, heads=degrees.context)

    def exchanges(self, own: Sharing, part: PartCount, op: Op, length: Any) -> Sequence[Exchange]:
        """Returns a layer's exchanges around attention: all-to-alls of queries, keys and values together, of which
        several ranks get the same heads where there are fewer, and of outputs; or one to gather keys and values, or
        sums of their gradients, which a replay finds in the context."""
        ranks = own.degrees.context
        itemsize = own.model.dtype_bytes
        if ranks == 1 or not _passes_tokens(part, op):
            return ()
        found = []
        for call in part.attentions:
            queries, keys = call.num_heads / own.degrees.tensor, ranks * own.key_heads(call)
            both = keys * (call.key_width + call.value_width)
            sent = [(queries * call.key_width + both) * itemsize, queries * call.value_width * itemsize]
            if own.gathers_keys:
                sent = [] if op is Op.R else [both * (itemsize if op is Op.F else max(_SUM_BYTES, itemsize))]
            found += [Exchange(own.tokens(length) * size, ranks, own.degrees.tensor) for size in sent]
        return found

    def more_activations(self, own: Sharing, part: PartCount) -> float:
        """Returns the bytes of attention's outputs, which are kept before and after their exchange."""
        if own.degrees.context == 1 or own.gathers_keys or not part.has_backward:
            return 0.0
        outputs = sum(call.num_heads * call.value_width for call in part.attentions)
        return outputs * own.model.dtype_bytes / own.divided.width


class _Experts(Way):
    """Ranks over which experts are spread."""

    degree = "experts"
    rule = "must divide every layer's experts, and data_parallel times context_parallel"
    is_of_experts = True

    def refusal(self, model: ModelCount) -> str:
        return "" if model.num_experts else "The model has no experts that can be spread."

    def possible(self, model: ModelCount) -> tuple[int, ...]:
        return tuple(e for e in range(1, model.num_experts + 1) if model.num_experts % e == 0)

    def divide(self, degrees: Degrees, shares_tokens: bool) -> Divided:
        return Divided(experts=degrees.experts)

    def exchanges(self, own: Sharing, part: PartCount, op: Op, length: Any) -> Sequence[Exchange]:
        """Returns a layer's all-to-alls between ranks with other experts: of how many rows there are, then there and
        back of a row for each expert that a token chose. Tensor-parallel ranks send a part each."""
        if not part.experts_per_token or not _passes_tokens(part, op):
            return ()
        ranks = own.degrees.experts, own.divided.width
        rows = own.tokens(length) * part.experts_per_token / own.divided.width
        sent = rows * own.model.hidden_size * own.model.dtype_bytes
        return Exchange(0.0, *ranks), Exchange(sent, *ranks, times=2)


def _passes_tokens(part: PartCount, op: Op) -> bool:
    """Returns whether an op computes a value for each token, or its gradient."""
    return op in (Op.F, Op.R) or (op is Op.I and part.has_backward)


WAYS: Mapping[str, Way] = {way.degree: way for way in (_Tensor(), _Context(), _Experts())}
"""The ways to share work, by the fields of `Degrees` and in their order."""

EXCHANGES = tuple(way.named.choice.replace("_", " ") for way in WAYS.values())
"""What takes time within actions, as reports call it: the exchanges of each way."""


@lru_cache
def divided_by(degrees: Degrees, shares_tokens: bool = False) -> Divided:
    """Returns among how many ranks each quantity is divided. `shares_tokens`: with sequence parallelism."""
    return reduce(Divided.beside, (way.divide(degrees, shares_tokens) for way in WAYS.values()))


@dataclass(frozen=True)
class Sharing:
    """The work of one of the ranks that share a counted model's stages, on microbatches of one size.

    Args:
        degrees: by how many ranks a stage's work is shared. Those that share every layer are next to each other, and
            their number divides the attention heads; without expert parallelism they share each expert, too.
        microbatch_size: sequences of a microbatch.
        sequence_parallel: whether tensor-parallel ranks share the tokens of tensors that all would else compute and
            keep: norms, residuals (Korthikanti et al. 2022).
        keeps_gathered: whether the gathered inputs of matrix products are kept whole, in place of gathering them again.
    """

    model: ModelCount
    degrees: Degrees
    microbatch_size: int = 1
    sequence_parallel: bool = False
    keeps_gathered: bool = True

    @cached_property
    def divided(self) -> Divided:
        """Among how many ranks each quantity is divided."""
        return divided_by(self.degrees, self.sequence_parallel)

    @property
    def gathers_keys(self) -> bool:
        """Whether each rank has a part of a slice's queries, and the last one those that see most."""
        return self.divided.queries > 1

    @property
    def even(self) -> Degrees:
        """The degrees with which every rank has equally many scores."""
        return self.degrees._replace(exchange="heads")

    # --- what is computed --------------------------------------------------------------------------------------------

    def tokens(self, length: Any) -> Any:
        """Returns the tokens of a slice, of all sequences of the microbatch, outside of attention."""
        return self.microbatch_size * length / self.divided.tokens

    def queries(self, length: Any) -> Any:
        """Returns the queries of a slice in attention."""
        return -(-length // self.divided.queries) if self.gathers_keys else length

    def key_heads(self, call: AttentionCall) -> int:
        """Returns the heads of keys and values in attention."""
        return call.key_heads_of_rank(self.divided.heads)

    def weights_share(self, part: PartCount) -> float:
        """Returns the share of a part's parameters."""
        return self.num_parameters(part) / max(1, part.num_parameters)

    def flops(self, count: OpCount, tokens: Any) -> Any:
        """Returns the operations of an op's matrix products."""
        return count.flops.at(tokens) / self.divided.width

    def products(self, part: PartCount, count: OpCount, tokens: Any) -> Products:
        """Returns an op's matrix products, of each of which one side is as wide as the hidden state, on every rank.

        Of products over shared dimensions each rank adds up its part, but all the tokens for the gradient of a weight.
        """
        width = self.divided.width
        read = count.matmul_bytes
        whole = min(count.num_matmuls * self.model.hidden_size * self.model.dtype_bytes, read.per_token)
        shared = (read.per_token - whole) * tokens / width + read.constant * self.weights_share(part)
        depth = count.hidden_depth.at(tokens) + count.other_depth.per_token * tokens
        depth = depth + count.other_depth.constant / width
        unaligned = count.unaligned_flops.at(tokens) / width
        return Products(self.flops(count, tokens), unaligned, depth, whole * tokens + shared)

    def kernel_bytes(self, part: PartCount, count: OpCount, tokens: Any) -> Any:
        """Returns the bytes that an op's kernels other than products and attention read and write. Those that don't
        grow with the tokens are of weights."""
        weights = self.weights_share(part)
        wide = count.wide_bytes.per_token * tokens / self.divided.wide + count.wide_bytes.constant * weights
        return wide + (count.other_bytes.per_token * tokens / self.divided.width + count.other_bytes.constant * weights)

    def score_operations(self, call: AttentionCall, op: Op, length: Any, context: Any) -> Any:
        """Returns the operations of an attention call's scores in F or I, on the rank with the last queries."""
        heads = call.num_heads / self.divided.heads
        queries = self.queries(length)
        num_scores = call.window.scores(context + length) - call.window.scores(context + length - queries)
        scores = heads * (self.microbatch_size * num_scores)
        keys, values = (-(-width // _HEAD_WIDTHS) * _HEAD_WIDTHS for width in (call.key_width, call.value_width))
        width = keys + values if op is Op.F else 3 * keys + 2 * values  # backward: S, dP, dV, dQ, dK
        return 2 * scores * width

    # --- what is sent ------------------------------------------------------------------------------------------------

    def hidden_bytes(self, length: Any) -> Any:
        """Returns the bytes of a slice's hidden state."""
        return self.tokens(length) * self.model.hidden_size * self.model.dtype_bytes

    def message_bytes(self, length: Any) -> Any:
        """Returns the message of a slice to the next stage, b T h elements, as large as its gradient back; one rank's
        part of it, where ranks share the tokens."""
        return self.hidden_bytes(length) / self.divided.wide

    # --- what is kept ------------------------------------------------------------------------------------------------

    @staticmethod
    def num_regions(part: PartCount) -> int:
        """Returns how many regions a part has that begin and end with whole tensors: two in a layer."""
        return 1 if part.is_half else 2 if part.attentions else 0

    def num_parameters(self, part: PartCount) -> float:
        """Returns how many of a part's parameters there are."""
        return self.divided.held(part.num_parameters, part.num_in_experts)

    def num_trained(self, part: PartCount) -> float:
        """Returns how many of a part's parameters are trained."""
        in_experts = part.num_trained_in_experts if self.divided.experts > 1 else 0
        return (part.num_trained - in_experts) / self.divided.width + self.num_trained_in_experts(part)

    def num_trained_in_experts(self, part: PartCount) -> float:
        """Returns how many of a part's trained parameters are in experts that are spread."""
        return part.num_trained_in_experts / self.divided.experts if self.divided.experts > 1 else 0.0

    def activation_bytes(self, part: PartCount) -> float:
        """Returns the bytes of a token that F keeps.

        Every tensor-parallel rank has the whole of tensors as wide as the hidden state, and a part of all others. Where
        ranks share tokens it has a part of those too, but for the gathered inputs of matrix products.
        """
        wide = min(part.wide_activation_bytes, part.activation_bytes)
        kept = self.wide_activation_bytes(part, wide) + (part.activation_bytes - wide) / self.divided.width
        return kept + sum(way.more_activations(self, part) for way in WAYS.values())

    def wide_activation_bytes(self, part: PartCount, wide: float) -> float:
        """Returns the bytes of a token's tensors that are as wide as the hidden state."""
        if not self.keeps_gathered:
            return wide / self.divided.wide
        num_gathered = self.num_regions(part) or int(part is self.model.head)
        gathered = min(wide, num_gathered * self.model.hidden_size * self.model.dtype_bytes)
        return gathered + (wide - gathered) / self.divided.wide

    def keys_bytes(self, part: PartCount) -> float:
        """Returns the bytes of a token's keys and values, of one sequence."""
        return sum(map(self.call_keys_bytes, part.attentions))

    def call_keys_bytes(self, call: AttentionCall) -> int:
        """Returns the bytes of a token's keys and values in one attention call, of one sequence."""
        return self.key_heads(call) * (call.key_width + call.value_width) * self.model.dtype_bytes


# --- what is possible ------------------------------------------------------------------------------------------------


def refused_ways(model: ModelCount) -> dict[str, str]:
    """Returns why ranks can't share work in some ways, by their choice in a plan, as far as the model's counts tell."""
    return {way.named.choice: reason for way in WAYS.values() if (reason := way.refusal(model))}


def possible_degrees(model: ModelCount, refused: Collection[str]) -> dict[str, tuple[int, ...]]:
    """Returns the numbers of ranks that can share a model's work, by the fields of `Degrees`; 1 of ways that are
    `refused`, by their choice."""
    return {name: (1,) if way.named.choice in refused else way.possible(model) for name, way in WAYS.items()}


def all_degrees(
    possible: Mapping[str, tuple[int, ...]], asked: Mapping[str, Sequence[int] | None]
) -> Iterator[Degrees]:
    """Yields all combinations of possible degrees, of those that are asked for where some are.

    Args:
        possible: by the fields of `Degrees`.
        asked: of these, by the choice in a plan. None: any.
    """
    every = []
    for name, way in WAYS.items():
        chosen = asked[way.named.choice]
        found = possible[name]
        if chosen is not None:
            found = tuple(sorted({*found, *chosen})) if way.takes_any else found
            found = tuple(degree for degree in found if degree in chosen)
        every.append(found)
    for degrees in product(*every):
        chosen_degrees: dict[str, Any] = dict(zip(WAYS, degrees, strict=True))
        yield UNSHARED._replace(**chosen_degrees)


def counted_exchanges(model: ModelCount, degrees: Degrees, asked: Collection[str] | None = None) -> tuple[str, ...]:
    """Returns the exchanges of ranks that share slices, of those `asked` for: heads where all ranks can have as many,
    and keys. By default these only where they are fewer bytes, or heads don't divide."""
    if degrees.context == 1:
        return ("heads",)
    heads = keys = 0.0
    for count, part in model.counted(model.whole):
        for call in part.attentions:
            sizes = call.num_heads // degrees.tensor, call.key_heads_of_rank(degrees.tensor)
            widening = max(_SUM_BYTES, model.dtype_bytes) / model.dtype_bytes
            moved = numbers_exchanged(*sizes, degrees.context, widening)
            heads += count * moved[0]
            keys += count * moved[1]
    divides = degrees.tensor * degrees.context in model.head_shares
    wanted = asked or ("heads", *["keys"] * (keys < heads or not divides))
    return tuple(kind for kind in wanted if kind == "keys" or divides)


def with_exchange(model: ModelCount, degrees: Degrees, is_whole: bool) -> Degrees:
    """Returns degrees in which "auto" is the exchange of a run without a plan, of sequences of one slice or several."""
    if degrees.exchange != "auto":
        return degrees
    kinds = counted_exchanges(model, degrees)
    return degrees._replace(exchange=kinds[0 if is_whole else -1])
