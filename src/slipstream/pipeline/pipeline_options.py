"""Everything that a Pipeline is given except its model."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from numbers import Integral
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from slipstream.errors import SlipstreamError
from slipstream.options import Layers, Memory, Parallelism, Precision, Runtime, check_optimizer_place, check_records
from slipstream.schedule import AUTOMATIC, Schedule, SlicedMicrobatch, fewest_stages, given_microbatches

ROUTER_LOSSES = ("none", "per_layer")
VOCABULARIES = ("auto", "whole", "spread")  # places of the head's rows
LossFunction = Callable[[Any, Tensor], tuple[Tensor, Tensor]]  # (outputs, targets) -> (sum, count)
PAIR = (
    "Give a function of (outputs, targets) that returns (sum, count), such as cross_entropy(..., reduction='sum') and "
    "(targets != -100).sum(), or with weights of classes the sum of the targets' weights."
)


@dataclass(frozen=True)
class SequenceLoss:
    """A loss of whole sequences, a function of how probable the model finds each: for preferences and rewards.

    Every row of a batch is a sequence, or every tensor of a list. `group_size` of them, next to each other, have one
    loss together, such as a chosen and a rejected answer (DPO, Rafailov et al. 2023, equation 7). The loss of a step is
    the mean over the groups of all replicas.
    """

    function: Callable[..., Tensor]
    """Takes (n,) float64: of each of n sequences, the sum of the log-probabilities of the targets that aren't -100;
    where a step is given `sequence_values`, also those of these sequences, (n, ...). Returns (n / group_size,), the
    losses. It is called for every microbatch, on the last stage's rank."""
    group_size: int = 1
    """How many sequences have one loss together. They share a microbatch."""
    prompts: bool = False
    """Whether each sequence has two sums, (n, 2): of the targets in its prompt, and of those after it. The first column
    of `sequence_values` (n, ...) then says how many targets the prompt has."""

    @property
    def num_sums(self) -> int:
        """How many sums a sequence has."""
        return 2 if self.prompts else 1

    @property
    def needs_values(self) -> bool:
        """Whether the function can't be called without `sequence_values`."""
        # Some callables have no signature to inspect.
        with suppress(TypeError, ValueError):
            required = [p for p in inspect.signature(self.function).parameters.values() if p.default is p.empty]
            return sum(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in required) > 1
        return False

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise SlipstreamError(f"SequenceLoss({self.function!r}): give a function of log-probabilities (n,).")
        if not isinstance(self.group_size, int) or self.group_size < 1:
            raise SlipstreamError(f"SequenceLoss(group_size={self.group_size!r}): give a number of sequences, from 1.")


@dataclass(frozen=True)
class ExpectedBatch:
    """The batches for which a plan is made before the first step, where seq_len alone doesn't say it.

    Args:
        seq_len: tokens of a sequence; of sequences of different lengths those of a typical one.
        microbatch_size: rows of a microbatch.
        num_microbatches: microbatches of a step. None: as the Pipeline has.
        longest: tokens of the longest sequence, where lengths differ. None: they don't.
        dtype: in which the model computes, such as "bf16" under autocast. None: the parameters'.
        say: gets a line about each measurement, and about the plan.
        device_memory: bytes of each rank within which it is planned where it can be. None: not known.
        effort: of the search, as a share of a run's.
    """

    seq_len: int
    microbatch_size: int = 1
    num_microbatches: int | None = None
    longest: int | None = None
    dtype: str | None = None
    say: Callable[[str], None] | None = None
    device_memory: float | None = None
    effort: float = 1.0


@dataclass(frozen=True)
class PipelineOptions:
    """The arguments of the Pipeline, which explains them."""

    schedule: str | Schedule | None = None
    num_microbatches: int = 1
    slices: int | Sequence[int] | str | None = None
    stages_per_rank: int | None = None
    partition: str | Sequence[float] = "auto"
    seq_len: int | ExpectedBatch | None = None
    loss_fn: LossFunction | SequenceLoss | None = None
    memory: Memory = Memory()
    parallel: Parallelism = Parallelism()
    precision: Precision = Precision()
    runtime: Runtime = Runtime()
    layers: Layers = Layers()
    mesh: DeviceMesh | None = None
    num_ranks: int | None = None
    device: torch.device | str | None = None
    microbatches: Any = None
    vocabulary: str = "auto"
    router_loss: str = "none"
    # A StageRates. The type is left out, as the executor doesn't import the planner.
    rates: Any = None

    def __post_init__(self) -> None:
        check_records(vars(self))
        check_optimizer_place(self.memory, self.parallel)
        _check_order(self.schedule, self.num_microbatches, self.slices)
        _check_place(self.device, self.mesh)
        _check_loss(self.loss_fn)
        if self.vocabulary not in VOCABULARIES:
            raise SlipstreamError(f"vocabulary={self.vocabulary!r}: give one of {', '.join(VOCABULARIES)}.")
        if self.router_loss not in ROUTER_LOSSES:
            raise SlipstreamError(f"router_loss={self.router_loss!r}: give one of {', '.join(ROUTER_LOSSES)}.")
        if self.microbatches is not None:
            self._check_microbatches()

    def reduces_gradients(self, are_shared: bool) -> bool:
        """Returns whether something is done with a stage's gradients after its last backward: they are summed, where
        ranks share them, or copied to the host."""
        return are_shared or self.memory.optimizer == "host"

    @property
    def is_measured(self) -> bool:
        """Whether what is open is found by measured costs, as "auto" asks for."""
        return self.schedule in AUTOMATIC or (isinstance(self.slices, str) and self.slices == "auto")

    def measured(self) -> PipelineOptions:
        """Returns the options of a causal LM, of which "auto" makes all "auto" that is open beside it."""
        if not self.is_measured:
            return self
        schedule = "auto" if self.schedule is None else self.schedule
        stages = fewest_stages(schedule) if self.stages_per_rank is None else self.stages_per_rank
        slices = "auto" if self.slices is None and not isinstance(schedule, Schedule) else self.slices
        return replace(self, schedule=schedule, slices=slices, stages_per_rank=stages)

    @property
    def expected(self) -> ExpectedBatch | None:
        """The batches for which a plan is made, where that is known."""
        return ExpectedBatch(self.seq_len) if isinstance(self.seq_len, int) else self.seq_len

    @property
    def row_length(self) -> int | None:
        """The tokens of every sequence. None: they differ, or aren't known."""
        return None if self.expected is None or self.expected.longest is not None else self.expected.seq_len

    def _check_microbatches(self) -> None:
        others = {"num_microbatches": (self.num_microbatches, 1), "slices": (self.slices, None)}
        others["memory.num_flushes"] = self.memory.num_flushes, 1
        for name, (value, default) in others.items():
            if value != default:
                raise SlipstreamError(f"microbatches=... with {name}={value!r}: give one of the two.")
        if self.schedule in AUTOMATIC:
            raise SlipstreamError(
                f"microbatches=... with schedule={self.schedule!r}, which is planned for microbatches that are alike. "
                "Give a schedule by its name, or one found by slipstream.find_order."
            )
        given_microbatches(self.microbatches)

    @property
    def given_microbatches(self) -> tuple[SlicedMicrobatch, ...]:
        """The rows and slices of each microbatch, where they are given."""
        return () if self.microbatches is None else given_microbatches(self.microbatches)


def _check_order(schedule: Any, num_microbatches: Any, slices: Any) -> None:
    """Raises SlipstreamError for an order, or numbers that it needs, of a wrong type."""
    if schedule is not None and not isinstance(schedule, (str, Schedule)):
        raise SlipstreamError(f"schedule={schedule!r}: give a name, such as '1f1b', or a slipstream.Schedule.")
    if isinstance(num_microbatches, bool) or not isinstance(num_microbatches, Integral) or num_microbatches < 1:
        raise SlipstreamError(f"num_microbatches={num_microbatches!r}: give a whole number from 1.")
    lengths = [slices] if isinstance(slices, Integral) else slices
    is_list = isinstance(lengths, Sequence) and not isinstance(lengths, str)
    if slices not in (None, "auto") and not (
        is_list and all(isinstance(length, Integral) and int(length) >= 1 for length in lengths)
    ):
        raise SlipstreamError(
            f"slices={slices!r}: give a count from 1, such as 8, or the token lengths, such as [512, 512], or 'auto'."
        )


def _check_loss(loss_fn: Any) -> None:
    """Raises SlipstreamError for objects that can't be loss functions, and for losses that are one number."""
    if loss_fn is None or isinstance(loss_fn, SequenceLoss):
        return
    called = loss_fn.func if isinstance(loss_fn, partial) else loss_fn
    name = getattr(called, "__name__", type(called).__name__)
    is_torchs = getattr(called, "__module__", None) in ("torch.nn.functional", "torch.nn.modules.loss")
    if is_torchs or not callable(loss_fn):
        what = f"torch's {name} returns one number" if is_torchs else f"{name} can't be called"
        raise SlipstreamError(f"loss_fn={loss_fn!r}: {what}. {PAIR}")


def _check_place(device: Any, mesh: Any) -> None:
    """Raises SlipstreamError for a device that isn't there, and for objects that are no mesh."""
    if mesh is not None and not hasattr(mesh, "mesh_dim_names"):
        raise SlipstreamError(f"mesh={mesh!r}: give one made by slipstream.make_mesh(pp=..., dp=...).")
    if device is None:
        return
    try:
        place = torch.device(device)
    except (RuntimeError, TypeError):
        raise SlipstreamError(f"device={device!r} isn't one of torch's; give 'cpu', 'cuda' or 'cuda:0'.") from None
    count = torch.cuda.device_count()
    if place.type == "cuda" and (place.index or 0) >= count:
        there = f"cuda:0 to cuda:{count - 1}" if count else "none"
        raise SlipstreamError(f"device={device!r} isn't there: this machine's GPUs are {there}; give one or 'cpu'.")
