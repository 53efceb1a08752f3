"""A pipeline's options by topic, records that check themselves: arguments of `Pipeline`, and sections of the YAML."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from math import lcm, prod
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, NamedTuple, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    ValidationInfo,
    field_validator,
)
from pydantic_core import PydanticCustomError

from slipstream.errors import SlipstreamError
from slipstream.number_format import FORMATS
from slipstream.option_errors import as_whole_number, describe_problems, refuses_bool

if TYPE_CHECKING:
    from pydantic._internal._model_construction import ModelMetaclass
else:
    ModelMetaclass = type(BaseModel)


def _dtype_name(value: Any) -> Any:
    name = str(value).removeprefix("torch.")
    if value is not None and name not in FORMATS:
        raise ValueError(f"give a floating-point dtype, {', '.join(FORMATS)}, or torch.float32 and such")
    return None if value is None else name


DType = Annotated[Any, BeforeValidator(_dtype_name)]  # a torch.dtype or its name, kept as its name


class _RecordType(ModelMetaclass):
    """Turns pydantic's errors into ours where a record is constructed by itself, not as a part of another."""

    def __call__(cls, *args: Any, **values: Any) -> Any:  # noqa: N805
        try:
            return super().__call__(*args, **values)
        except ValidationError as error:
            raise SlipstreamError("\n".join(describe_problems(error, cls))) from None


class Record(BaseModel, metaclass=_RecordType):
    """Options on one topic. An unknown name, or a value that isn't allowed, raises SlipstreamError."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
    section: ClassVar[str] = ""  # its name as an argument and as a section of a configuration

    @field_validator("*", mode="before")
    @classmethod
    def _read_numbers(cls, value: Any, info: ValidationInfo) -> Any:
        if isinstance(value, bool) and refuses_bool(cls.model_fields[str(info.field_name)]):
            raise PydanticCustomError("bool", "true and false aren't numbers")
        return as_whole_number(value, cls.model_fields[str(info.field_name)])

    def refuse(self, names: Sequence[str], reason: str) -> None:
        """Raises SlipstreamError where one of these options isn't as it is by default."""
        for name in names:
            value = getattr(self, name)
            if value != type(self).model_fields[name].default:
                raise SlipstreamError(f"{self.section}.{name}={value!r}: {reason} Leave it out.")


class Memory(Record):
    """The memory that a rank may use, and recomputation and offloading, by which it uses less."""

    section: ClassVar[str] = "memory"
    recompute: Literal["none", "selective", "full", "stage", "stage+full", "segments"] | PositiveInt = "none"
    """Which of a slice's activations are dropped after its forward and computed again for its backward. `full`: all but
    what enters each layer, one layer at a time during the backward; keys and values too if a microbatch is one slice.
    A number: the same for so many of each stage's first layers (half a layer counts as one). `stage`: all but what
    enters the stage and its keys and values, before the backward (GPipe, section 2.3), unless that follows the forward
    directly. `stage+full`: both. `selective`: all but the outputs of matrix products and attention, before the
    backward. For an nn.Sequential also `segments`: the best number of pieces of a stage, one at a time during the
    backward."""
    check_recompute: bool = True
    """Whether recomputed outputs of layers are compared with the first ones, by sums of their bits: a layer that draws
    random numbers of its own, or changes what it reads, would give wrong gradients. Turn it off if kernels add in
    another order every time."""
    offload: float = Field(default=0.0, ge=0, le=1)
    """The share of each rank's slices, those that wait longest, whose activations are in host memory between forward
    and backward: pinned memory with a GPU, else a file. Keys and values stay. With `recompute: full` and microbatches
    of one slice of a causal LM, also the share of each stage's layers, the first, whose inputs are there."""
    context: Literal["device", "host", "auto"] | Annotated[float, Field(ge=0, le=1)] = "device"
    """Where the keys and values of a microbatch's slices lie, with their gradients: on the `device`, or on the `host`,
    pinned memory with a GPU, else files. A slice then attends to those of one earlier slice after the other, and the
    next one's are on their way meanwhile. A number: the share of each sequence's tokens, the first in whole slices,
    whose keys and values are on the host. `auto`: on the device where all fits `limit`, or else the device's memory, by
    the account of plans; where not, on the host."""
    context_gradients: Literal["wide", "model"] = "wide"
    """In what type the gradients of keys and values are summed over the slices that attend to them, wherever they lie:
    `wide` is float32, or float64 where these are; `model` that of the keys and values themselves. In 16 bits it takes
    half the bytes, and each slice's share is rounded as it is added."""
    loss_tokens: PositiveInt | None = None
    """How many tokens of a slice have logits at a time: head and loss run on some after the others, and again in the
    backward, so that logits, their float32 copy and their gradient take the memory of these. Of causal LMs whose head
    isn't spread. None: all tokens of the slice."""
    optimizer: Literal["device", "host"] = "device"
    """Where the optimizer runs, with its state: on the `device`, or on the `host`. There `parameters` yields copies of
    the trained weights in host memory, whose `.grad` lies beside them, for any optimizer that runs on a CPU. Gradients
    are copied out as soon as they are reduced, and weights come back before the next step. Not with
    `parallel.shard: parameters`."""
    limit: PositiveFloat | None = None
    """Bytes that each rank may hold, such as 12e9: parameters, gradients, AdamW's state, messages, activations, keys
    and values. They are measured before the first step on a batch of a new shape; a schedule that holds more is
    refused, and the schedule "auto" looks for one that doesn't."""
    host_limit: PositiveFloat | None = None
    """Bytes that each rank may have in its host's memory, such as 200e9, of what `context`, `offload` and `optimizer`
    put there: pinned memory with a GPU, else files and memory. A run or a step that has more is refused before it
    begins, and plans keep to it."""
    num_flushes: PositiveInt = 1
    """How many times the pipeline is filled and drained in a step, so that no more than num_microbatches / num_flushes
    microbatches hold activations at the same time (gradient accumulation)."""

    @property
    def uses_host(self) -> bool:
        """Whether something lies in the host's memory while a step runs, or between steps."""
        return self.offload > 0 or self.context == "auto" or host_share(self.context) > 0 or self.optimizer == "host"

    @property
    def is_limited(self) -> bool:
        """Whether a step may hold too much, on a rank or on its host."""
        return self.limit is not None or (self.host_limit is not None and self.uses_host)


def host_share(context: str | float) -> float:
    """Returns the share of keys and values that `memory.context` puts on the host."""
    return float(context == "host") if isinstance(context, str) else float(context)


def tokens_on_host(slices: Sequence[int], share: float) -> int:
    """Returns the number of a sequence's first tokens whose keys and values are on the host: those of the fewest whole
    slices that have a share of all tokens.

    Args:
        slices: tokens of each.
        share: from 0 to 1.
    """
    least = round(share * sum(slices))
    return next(end for end in accumulate(slices, initial=0) if end >= least)


class Parallelism(Record):
    """The ways in which ranks outside the pipeline's axis share weights, tokens and the optimizer's state."""

    section: ClassVar[str] = "parallel"
    sequence_parallel: bool = False
    """With tensor parallelism, whether its ranks also share the tokens of a slice where they would otherwise compute
    the same: norms, residuals, dropout."""
    tensor_plan: Mapping[str, str] | None = None
    """With tensor parallelism, how linear layers are cut where the model doesn't say it itself, such as
    {"model.layers.*.mlp.up_proj": "colwise"}."""
    context_exchange: Literal["auto", "heads", "keys"] = "auto"
    """What ranks that share slices exchange around attention: `heads` for tokens, after which each keeps the keys and
    values of some heads; or the `keys` and values of a slice, of which each keeps all, for any number of ranks. `auto`:
    what a plan from measured costs finds faster; without a plan what moves fewer bytes in a layer, heads where a
    sequence is one slice, and keys where heads don't divide."""
    shard: Literal["none", "optimizer", "parameters"] = "none"
    """With data parallelism, what each replica keeps only its part of. `optimizer`: the optimizer's state, as it
    updates only its part of every parameter (ZeRO-1). `parameters`: between steps the parameters too (ZeRO-3, by
    FSDP2); they are gathered when a step begins, and released when a stage's gradients are reduced. Not with tensor
    parallelism or tied weights."""

    def exchanging(self, kind: str) -> Self:
        """Returns the same with the exchange of ranks that share slices."""
        return self.model_copy(update={"context_exchange": kind})

    def shared_by(self, degrees: Degrees) -> Degrees:
        """Returns degrees with the exchange of ranks that share slices."""
        return degrees._replace(exchange=self.context_exchange)


class SharedWork(NamedTuple):
    """A way in which ranks share the work of a pipeline's stage, as it is named where it is chosen."""

    axis: str  # as `make_mesh` and the command line call it
    degree: str  # a field of `Degrees`, and of a configuration's section `parallel`
    choice: str  # a field of a plan
    meaning: str
    has_axis: bool = True  # of the mesh; else its ranks are some of those with the same weights
    splits_weights: bool = False  # whether no rank has the whole of a stage's parameters
    shares_tokens: bool = False  # whether each rank has some of a slice's tokens


# In the order of ranks
SHARED_WORK = (
    SharedWork("cp", "context", "context_parallel", "ranks that share every slice", shares_tokens=True),
    SharedWork("tp", "tensor", "tensor_parallel", "ranks that share every layer", splits_weights=True),
    SharedWork("ep", "experts", "expert_parallel", "ranks over which experts are spread", False, splits_weights=True),
)


class Degrees(NamedTuple):
    """By how many ranks a stage's work is shared."""

    tensor: int = 1  # that share every layer
    context: int = 1  # that share every slice, each with some of its tokens
    experts: int = 1  # over which the experts of a layer are spread; they are some of those with the same weights
    exchange: str = "heads"  # what ranks that share slices exchange around attention: "heads" for tokens, or "keys"

    @property
    def num_ranks(self) -> int:
        """The least number of ranks that run a stage's actions together."""
        same_weights = self._ranks_of(way for way in SHARED_WORK if way.has_axis and not way.splits_weights)
        others = (getattr(self, way.degree) for way in SHARED_WORK if not way.has_axis)
        return self.num_shared // same_weights * lcm(same_weights, *others)

    def _ranks_of(self, ways: Iterable[SharedWork]) -> int:
        return prod(int(getattr(self, way.degree)) for way in ways)

    @property
    def num_shared(self) -> int:
        """The ranks that are on the mesh's axes of shared work, next to each other."""
        return self._ranks_of(way for way in SHARED_WORK if way.has_axis)

    @property
    def token_ranks(self) -> int:
        """The ranks that have different tokens of a slice."""
        return self._ranks_of(way for way in SHARED_WORK if way.shares_tokens)

    @property
    def comparable(self) -> Self:
        """The same without an exchange where nothing is exchanged, by which degrees compare."""
        return self if self.token_ranks > 1 else self._replace(exchange=UNSHARED.exchange)

    @property
    def mesh(self) -> dict[str, int]:
        """The sizes of a mesh's axes but pp, as `make_mesh` takes them, with as few replicas as there may be."""
        sizes = {way.axis: getattr(self, way.degree) for way in SHARED_WORK}
        return {"dp": self.num_ranks // self.num_shared} | sizes

    @property
    def choices(self) -> dict[str, Any]:
        """The fields of a plan."""
        return {way.choice: getattr(self, way.degree) for way in SHARED_WORK} | {"context_exchange": self.exchange}

    @property
    def settings(self) -> dict[str, Any]:
        """The settings in a configuration's section `parallel`, without degrees of 1 but for `tensor`."""
        sizes = {name: size for name, size in self._asdict().items() if size != 1 or name == "tensor"}
        exchange = {"context_exchange": sizes.pop("exchange")}
        return sizes | (exchange if self.token_ranks > 1 else {})


UNSHARED = Degrees()


def numbers_exchanged(num_queries: int, num_keys: int, num_ranks: int, widening: float = 1.0) -> tuple[float, float]:
    """Returns how many numbers a rank receives around the attention of a layer with so many heads, forward and
    backward, for each token and number of a head and but for a factor, if the ranks exchange heads for tokens, and if
    they gather keys, whose gradients are `widening` times as wide.

    Of g ranks it is (2 Hq + 2 lcm(Hkv, g)) / g in each direction, or 2 Hkv forward and as many sums backward: ranks
    whose queries read no whole number of heads of keys get some of these several times.
    """
    heads = 2 * (2 * num_queries + 2 * lcm(num_keys, num_ranks)) / num_ranks
    return heads, 2 * num_keys * (1 + widening)


class Precision(Record):
    """The dtypes of parameters, each given as a torch.dtype or by its name; a float32 model stays float32 without."""

    section: ClassVar[str] = "precision"
    dtype: DType = None
    """The dtype of the parameters that compute. Default: as they are."""
    master_dtype: DType = None
    """The dtype of what the optimizer updates, such as float32 with dtype bfloat16: `parameters` yields wider copies,
    in whose dtype gradients are summed. Default: the parameters themselves."""


class Runtime(Record):
    """Kernels, checks, time limits and connections around the computation."""

    section: ClassVar[str] = "runtime"
    fused: bool = False
    """Whether norms, activations and rotary embeddings are compiled, to one kernel or two each; needs a compiler on
    every machine."""
    cuda_graphs: bool = False
    """Whether a step that repeats is recorded as CUDA graphs, one for each slice's forward and backward on a stage.
    They cost the host microseconds where the model's Python code costs milliseconds, for slices so short that the GPU
    waits for its host. Where a model or a step can't be recorded it runs without, and a warning says why. A
    rank keeps the memory of its activations and gradients from step to step."""
    self_check: bool = True
    """Whether a toy of the same architecture, sliced, is compared with the same toy unsliced before training (a
    second); with tensor parallelism also cut over its ranks and whole. Without it, models whose layers carry state
    from token to token are refused all the same."""
    stall_limit: PositiveFloat | Literal["off"] | None = None
    """Seconds that a rank may wait for others, or be stopped, before all ranks end and say which one is at fault.
    Default: the larger of 60 and five times the longest wait so far, and 600 before the second step as long as a rank
    computes. off: no process watches the ranks."""
    transport: Literal["auto", "nccl", "gloo"] = "auto"
    """What connects ranks: `nccl`, between GPUs, and slowly between ranks that share one; `gloo`, by way of pinned host
    memory where ranks compute on GPUs; `auto`, NCCL where each rank of a machine has a GPU, else gloo."""


class Layers(Record):
    """Facts about the layers of an nn.Sequential: their costs and an example of their inputs."""

    section: ClassVar[str] = "layers"
    costs: list[Annotated[float, Field(allow_inf_nan=True)]] | None = None
    """Cost of each layer, in any unit, for partition="auto"; nested layers count one by one."""
    example: Any = None
    """Example inputs of a microbatch, from which costs are counted if they aren't given; required with slices, whose
    self-check runs on it."""
    batch_norm_over_replicas: bool = False
    """Whether batch norms average their running statistics over all replicas."""


ALLOWED_LAYER_COUNTS = (
    "at least half a layer, in multiples of 0.5 (the first may have 0, for the embedding alone, and the last 0, for "
    "the head alone)"
)


def are_allowed_layer_counts(counts: Sequence[float]) -> bool:
    """Returns whether consecutive stages may have these numbers of layers."""
    return all(count >= 0 and count % 0.5 == 0 for count in counts) and 0 not in counts[1:-1]


# The records, by the names of the arguments and sections.
RECORDS = {record.section: record for record in (Memory, Parallelism, Precision, Runtime, Layers)}


def check_optimizer_place(memory: Memory, parallel: Parallelism) -> None:
    """Raises SlipstreamError where the optimizer can't be on the host."""
    if memory.optimizer == "host" and parallel.shard == "parameters":
        raise SlipstreamError(
            "memory.optimizer='host' with parallel.shard='parameters', whose shards are updated on the device. "
            "Use parallel.shard='optimizer', or memory.optimizer='device'."
        )


def check_records(arguments: Mapping[str, Any]) -> None:
    """Raises SlipstreamError where an argument that is a record has another type, such as a dict."""
    for name, record in RECORDS.items():
        if name in arguments and not isinstance(arguments[name], record):
            raise SlipstreamError(
                f"{name}={arguments[name]!r}: give a slipstream.{record.__name__}, such as "
                f"{name}=slipstream.{record.__name__}({next(iter(record.model_fields))}=...)."
            )
