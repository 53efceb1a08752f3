"""A plan: configurations, their predictions, and the alternatives to the best one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import NamedTuple

from slipstream.cost import Degrees
from slipstream.planner.joint import JointPlan
from slipstream.schedule import Schedule
from slipstream.simulator import MemoryKind
from slipstream.timeline import Timeline

AUTO = "auto"  # the schedule and slicing of the joint search's plans


@dataclass(frozen=True, slots=True)
class Configuration:
    """One way to train: every choice of the search, before layers and tokens are partitioned.

    `tensor_parallel` · `context_parallel` · `pipeline_parallel` · `data_parallel` is the number of devices, and
    `expert_parallel` divides the ranks with the same weights. Every pipeline takes global_batch / data_parallel
    sequences per step, `microbatch_size` at a time.
    """

    tensor_parallel: int
    pipeline_parallel: int
    data_parallel: int
    stages_per_rank: int  # of the rank with the most
    schedule: str  # a name of slipstream.schedule.SCHEDULES, or "auto": found together with the cut and the slices
    microbatch_size: int  # sequences
    num_slices: int
    recompute: str  # "none", "selective", "full", "stage" or "stage+full"
    offload: float  # the share of slices whose activations are offloaded to host memory
    shard: str  # over the ranks with the same weights: "none", the "optimizer"'s state, or the "parameters" too
    slicing: str = "equal-time"  # or "exact": TeraPipe's optimum for equal stages; or "auto"
    context_parallel: int = 1
    expert_parallel: int = 1
    context_exchange: str = "heads"  # the exchange around attention of ranks that share slices: heads or "keys"
    vocabulary: str = "whole"  # the head's rows, on the last stage's rank; or "spread" over the ranks of the pipeline

    @property
    def degrees(self) -> Degrees:
        """By how many ranks a stage's work is shared."""
        return Degrees(self.tensor_parallel, self.context_parallel, self.expert_parallel, self.context_exchange)

    @property
    def num_copies(self) -> int:
        """The number of ranks that have the same weights, but for experts, and see other tokens."""
        return self.data_parallel * self.context_parallel

    @property
    def num_devices(self) -> int:
        return self.tensor_parallel * self.pipeline_parallel * self.num_copies

    @property
    def optimizer_shards(self) -> int:
        """The number of ranks over which the optimizer's state is sharded."""
        return self.num_copies if self.shard != "none" else 1

    def differences(self, other: Configuration) -> list[str]:
        """Returns the names of the fields in which the two differ."""
        names = [field.name for field in fields(self)]
        return [name for name in names if getattr(self, name) != getattr(other, name)]


class Mesh(NamedTuple):
    """The degrees of a configuration, and the sequences of its microbatches."""

    degrees: Degrees
    pipeline_parallel: int
    data_parallel: int
    microbatch_size: int

    @classmethod
    def of(cls, configuration: Configuration) -> Mesh:
        """Returns the mesh of a configuration."""
        c = configuration
        return cls(c.degrees, c.pipeline_parallel, c.data_parallel, c.microbatch_size)

    @property
    def tensor_parallel(self) -> int:
        return self.degrees.tensor

    @property
    def context_parallel(self) -> int:
        return self.degrees.context

    @property
    def expert_parallel(self) -> int:
        return self.degrees.experts

    @property
    def context_exchange(self) -> str:
        return self.degrees.exchange

    @property
    def num_copies(self) -> int:
        """The number of ranks with the same weights."""
        return self.data_parallel * self.context_parallel


@dataclass(frozen=True, slots=True)
class Prediction:
    """The simulator's prediction for a configuration with its partition and slices.

    `seconds_by_cause` adds up to `step_seconds`, on the rank that ends last.
    """

    configuration: Configuration
    partition: tuple[float, ...]  # layers of each stage, perhaps with halves; 0 for an end of the model alone
    placement: tuple[int, ...]  # the rank of each stage
    slices: tuple[int, ...]  # tokens of each slice
    num_microbatches: int
    step_seconds: float
    tokens_per_second: float  # over all devices
    mfu: float | None  # model FLOPs utilization: 3 forwards' products over the devices' peak, None if unknown
    idle_fraction: float  # of the ranks' time between the first action and the last
    seconds_by_cause: Mapping[str, float]
    memory: tuple[Mapping[MemoryKind, float], ...]  # per rank, bytes by kind at the moment of its peak
    memory_limit: float  # bytes of a device
    joint: JointPlan | None = None  # the joint search's plan, where the schedule is "auto"

    @property
    def peak_memory(self) -> float:
        """The bytes of the fullest rank."""
        return max(sum(kinds.values()) for kinds in self.memory)

    @property
    def fullest_rank(self) -> int:
        """The rank that holds the most bytes."""
        totals = [sum(kinds.values()) for kinds in self.memory]
        return totals.index(max(totals))


@dataclass(frozen=True, slots=True)
class Alternative:
    """The best simulated configuration with another value of one choice, and why it is slower."""

    choice: str  # a field of Configuration, such as "tensor_parallel"
    prediction: Prediction

    def why(self, winner: Prediction) -> list[tuple[str, float]]:
        """Returns the causes and their extra seconds over the winner (negative: fewer), the largest first."""
        mine, best = self.prediction.seconds_by_cause, winner.seconds_by_cause
        extra = {cause: mine.get(cause, 0.0) - best.get(cause, 0.0) for cause in {*mine, *best}}
        return sorted(((c, s) for c, s in extra.items() if s), key=lambda item: -abs(item[1]))


@dataclass(frozen=True)
class Plan:
    """The best configurations for a model on a cluster, best first."""

    model: str
    cluster: str
    num_devices: int
    dtype: str
    seq_len: int
    global_batch: int
    predictions: tuple[Prediction, ...]
    alternatives: tuple[Alternative, ...]  # to the best one, for each choice that has other values
    simulated: Callable[[], tuple[Schedule, Timeline]]  # the best one: only where asked for, as that may be long
    num_meshes: int  # all that divide; bounds were computed for each
    num_bounded_meshes: int  # those whose configurations were bounded, or can't fit
    num_configurations: int  # on these
    num_too_large: int  # how many of them don't fit the memory
    num_simulated: int
    gap: float  # by which share one that was not simulated could be faster than the best, at most
    seconds: float  # of the search
    notes: tuple[str, ...] = ()  # the assumptions behind the numbers
    sequence_parallel: bool = False  # whether tensor-parallel ranks share tokens, too
    fused: bool = False  # whether norms and activations are fused kernels
    refusals: Mapping[str, str] = field(default_factory=dict)  # why ranks can't share slices, or experts; by choice
    trained: tuple[str, ...] = ()  # the trained part of the model, where that isn't all

    @cached_property
    def _simulation(self) -> tuple[Schedule, Timeline]:
        return self.simulated()

    @property
    def schedule(self) -> Schedule:
        """The best one's, compute actions only."""
        return self._simulation[0]

    @property
    def timeline(self) -> Timeline:
        """The best one's, with its memory over time."""
        return self._simulation[1]

    @property
    def best(self) -> Prediction:
        """The fastest configuration."""
        return self.predictions[0]
