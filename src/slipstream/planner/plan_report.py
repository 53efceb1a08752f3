"""The report of a search: the best plans with their predictions, and the alternatives to the best one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from slipstream.planner.joint import JointPlan
from slipstream.planner.plan import Plan
from slipstream.schedule import Schedule
from slipstream.simulator import MemoryKind
from slipstream.timeline import Timeline


@dataclass(frozen=True, slots=True)
class Prediction:
    """The simulator's prediction for a plan.

    `seconds_by_cause` adds up to `step_seconds`, on the rank that ends last.
    """

    plan: Plan
    step_seconds: float
    tokens_per_second: float  # over all devices
    mfu: float | None  # model FLOPs utilization: 3 forwards' products over the devices' peak, None if unknown
    idle_fraction: float  # of the ranks' time between the first action and the last
    seconds_by_cause: Mapping[str, float]
    memory: tuple[Mapping[MemoryKind, float], ...]  # per rank, bytes by kind at the moment of its peak
    memory_limit: float  # bytes of a device
    host_memory: tuple[Mapping[MemoryKind, float], ...] = ()  # the same of its host
    joint: JointPlan | None = None  # the joint search's report, where it found the order

    @property
    def peak_memory(self) -> float:
        """The bytes of the fullest rank."""
        return max(sum(kinds.values()) for kinds in self.memory)

    @property
    def peak_host_memory(self) -> float:
        """The most bytes that a rank has on its host."""
        return max((sum(kinds.values()) for kinds in self.host_memory), default=0.0)

    @property
    def fullest_rank(self) -> int:
        """The rank that holds the most bytes."""
        totals = [sum(kinds.values()) for kinds in self.memory]
        return totals.index(max(totals))


@dataclass(frozen=True, slots=True)
class Alternative:
    """The best simulated plan with another value of one choice, and why it is slower."""

    choice: str  # one of the plan's `CHOICES`, such as "tensor_parallel"
    prediction: Prediction

    def why(self, winner: Prediction) -> list[tuple[str, float]]:
        """Returns the causes and their extra seconds over the winner (negative: fewer), the largest first."""
        mine, best = self.prediction.seconds_by_cause, winner.seconds_by_cause
        extra = {cause: mine.get(cause, 0.0) - best.get(cause, 0.0) for cause in {*mine, *best}}
        return sorted(((c, s) for c, s in extra.items() if s), key=lambda item: -abs(item[1]))


@dataclass(frozen=True)
class PlanReport:
    """The best plans for a model on a cluster: the simplest of those that take about as long as the shortest, then the
    others, the shorter the earlier."""

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
    # The largest share by which one that was not simulated could be faster than the shortest.
    gap: float
    seconds: float  # of the search
    notes: tuple[str, ...] = ()  # the assumptions behind the numbers
    sequence_parallel: bool = False  # whether tensor-parallel ranks share tokens, too
    fused: bool = False  # whether norms and activations are fused kernels
    refusals: Mapping[str, str] = field(default_factory=dict)  # why ranks can't share slices, or experts; by choice
    trained: tuple[str, ...] = ()  # the trained part of the model, where that isn't all
    # Returns the seconds of the best one's step with fused kernels, where it has none and they can be counted.
    fused_seconds: Callable[[], float] | None = None
    # A sentence about how much longer than the shortest the first is, and what makes it simpler; "" where it is that.
    simpler: str = ""

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

    @cached_property
    def fused_gain(self) -> float:
        """By which share the best one's step would be shorter with fused kernels; 0 where that isn't known. It takes
        the seconds of another count of the model's operations."""
        return 0.0 if self.fused_seconds is None else 1 - self.fused_seconds() / self.best.step_seconds

    @property
    def best(self) -> Prediction:
        """The first plan: the fastest, or a simpler one that takes at most 1% longer."""
        return self.predictions[0]
