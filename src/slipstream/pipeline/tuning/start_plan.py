"""schedule, slices and partition "auto" together: a plan from measured costs, made before the stages are.

The costs of training a part of a model, from measured costs of training all of it and counts of both.

A run measures a model once, with all weights trained, and keeps that. Where some are frozen, or an adapter is trained
beside them, a unit's F, I and W take as much of the measured time as their counted products are of those with all
weights trained: nothing of I and W below the lowest trained part, no W of a frozen one, a little more of F where there
is an adapter.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from functools import cached_property, partial
from math import inf

import numpy as np
import torch
from transformers import PretrainedConfig

from slipstream.array_types import Floats, Ints
from slipstream.comm import HEADER_BYTES
from slipstream.cost import (
    REPLAYED,
    ActionBytes,
    MeasuredLink,
    ModelCount,
    PartCount,
    Profile,
    Stage,
    StageParts,
    StateBytes,
    head_part_memory,
    memory_table,
)
from slipstream.errors import SlipstreamError
from slipstream.model import find_anatomy, why_layers_stay_whole
from slipstream.model.adapters import ALL_WEIGHTS, TrainedWeights
from slipstream.options import Parallelism
from slipstream.parallel import Ranks, possible_exchanges
from slipstream.pipeline.cut_batch import token_bytes
from slipstream.pipeline.pipeline_options import ExpectedBatch, PipelineOptions
from slipstream.pipeline.tuning.row_plan import granularity_for
from slipstream.planner.joint import (
    JointPlan,
    JointProblem,
    OutOfMemoryError,
    ProfileUnits,
    UnitCosts,
    UnitsWithoutHead,
    Vocabulary,
    find_vocabulary_plan,
)
from slipstream.planner.ragged import StageRates, fit_rates
from slipstream.profile import ProfileSettings, count_model, find_costs
from slipstream.profile.cost_cache import CostCache
from slipstream.schedule import Op, Schedule, add_recompute
from slipstream.simulator import memory_of
from slipstream.units import seconds_text

_BUDGET = 60.0  # seconds of measuring, at most
_REPEATS = 6  # of a point, at most
_UNSEEN = 0.01  # of the counted bytes: those that parts measured alone hold only together


@dataclass(frozen=True, kw_only=True)
class StartRequest(ExpectedBatch):
    """The request for a plan before the first step: the batches that it is for, whose `dtype` is as in
    `ProfileSettings`, and what it must keep to.

    Args:
        num_ranks: ranks of the pipeline.
        memory_limit: bytes of each rank. None: no limit.
        vocabulary: whether the head is to be whole or spread over the ranks. "auto": whichever is faster.
        parallel: how ranks share the work of a stage.
        tied: whether the head's weight embeds too.
        trained: what of the model is trained.
    """

    num_microbatches: int
    dtype: str
    num_ranks: int
    memory_limit: float | None = None
    vocabulary: Vocabulary = "whole"
    parallel: Parallelism = Parallelism()
    tied: bool = False
    trained: TrainedWeights = ALL_WEIGHTS

    @property
    def granularity(self) -> int:
        """The number of tokens at whose multiples slices begin."""
        return granularity_for(self.longest or self.seq_len)

    @property
    def profile(self) -> ProfileSettings:
        """The settings of the measurement for the plan."""
        seq_len, step = self.longest or self.seq_len, self.granularity
        # Fewer whole sequences than ranks leave some of these idle, so that half of one is the longest slice to know.
        are_cut = self.num_microbatches < self.num_ranks
        return ProfileSettings(
            seq_len=seq_len,
            microbatch_size=self.microbatch_size,
            dtype=self.dtype,
            longest_slice=max(step, seq_len // 2 // step * step) if are_cut else seq_len,
            granularity=step,
            repeats=_REPEATS,
            budget=_BUDGET,
            few_points=True,
            parallel=self.parallel,
        )


def plan_start(
    config: PretrainedConfig,
    request: StartRequest,
    ranks: Ranks,
    device: torch.device,
    say: Callable[[str], None] = lambda text: None,
    every: float = 5.0,
) -> tuple[JointPlan, StageRates]:
    """Returns the plan with the shortest simulated step, from costs that are measured here once and kept, and what its
    stages cost. Collective.

    The leader searches, and all ranks follow. `say` gets a line, on the leader, about each measuring that has to be
    repeated, `every` so many seconds about the progress, and about why layers aren't cut in half where they can't be.
    Where ranks share slices, and their exchange is "auto", it is the one with the shortest step: heads for tokens or
    keys, of which each is measured.

    Raises:
        SlipstreamError: where nothing fits the memory limit, or the model can't be measured.
    """
    kinds = possible_exchanges(config, ranks.degrees, request.parallel)
    plans, refusal = list[tuple[JointPlan, StageRates]](), None
    for kind in kinds:
        # Messages between stages take as long however a slice is shared.
        link = plans[0][0].costs.profile.link if plans and isinstance(plans[0][0].costs, ProfileUnits) else None
        try:
            asked = replace(request, parallel=request.parallel.exchanging(kind))
            plans.append(_plan(config, asked, ranks, device, say, every, link))
        except OutOfMemoryError as error:
            refusal = error
    if len(plans) > 1 and ranks.leads:
        named = zip(kinds, plans, strict=True)
        texts = (f"{kind} {seconds_text(plan.seconds)}" for kind, (plan, _) in named)
        say(f"ranks that share slices: {', '.join(texts)}")
    if refusal is not None and not plans:
        raise refusal
    return min(plans, key=lambda pair: pair[0].seconds)


def _plan(
    config: PretrainedConfig,
    request: StartRequest,
    ranks: Ranks,
    device: torch.device,
    say: Callable[[str], None],
    every: float,
    link: MeasuredLink | None,
) -> tuple[JointPlan, StageRates]:
    """Returns the plan with the ranks' exchange as given. Collective."""
    told = _Told(say, every)
    profile = find_costs(config, request.profile, device, ranks, say, told.measured, link)
    units = _units(profile, config, request, ranks, say)
    if units.units_per_layer == 1 and ranks.leads:
        say(f"layers are planned whole: {why_layers_stay_whole(config, find_anatomy(config))}")
    problem = JointProblem(
        costs=units,
        seq_len=request.seq_len,
        num_ranks=request.num_ranks,
        num_microbatches=request.num_microbatches,
        granularity=request.granularity,
        longest_slice=units.longest_slice,  # shorter than was asked for where time ran out
        memory_limit=request.memory_limit,
        account=partial(_most_bytes, units, request),
        tied=request.tied,
    )
    problem = replace(problem, effort=request.effort * problem.effort)

    def found() -> tuple[JointPlan, StageRates]:
        plan = replace(find_vocabulary_plan(problem, request.vocabulary, told.searched), costs=units)
        if request.device_memory is not None and held_bytes(plan, request) > request.device_memory:
            limited = replace(problem, memory_limit=min(request.device_memory, problem.memory_limit or inf))
            with suppress(OutOfMemoryError):
                plan = replace(find_vocabulary_plan(limited, request.vocabulary, told.searched), costs=units)
        costs: UnitCosts = UnitsWithoutHead(units) if plan.head == "spread" else units
        lengths = units.longest_slice, request.profile.seq_len, request.granularity
        return plan, fit_rates(costs, plan.partition, *lengths, recompute=plan.recompute)

    chosen: tuple[JointPlan, StageRates] = ranks.run_on_leader(found)
    return chosen


def measure_rates(
    config: PretrainedConfig,
    request: StartRequest,
    partition: Sequence[float],
    ranks: Ranks,
    device: torch.device,
    say: Callable[[str], None] = lambda text: None,
    recompute: str = "none",
) -> StageRates | None:
    """Returns the rates of stages with so many layers, from costs that are kept, or measured here beside them.
    Collective.

    None, after saying why, where costs can't be measured, and where there may be no memory beside the stages: on a GPU
    and with a memory limit.
    """
    settings = request.profile
    told = _Told(say, every=5.0)
    may_measure = device.type == "cpu" and request.memory_limit is None
    try:
        profile: Profile | None
        if may_measure:
            with torch.random.fork_rng(devices=()):
                profile = find_costs(config, settings, device, ranks, say, told.measured)
        else:
            cache = CostCache.of(config, settings, device, ranks)
            profile = ranks.run_on_leader(lambda: cache.find(say))
        if profile is None:
            return None
        units = _units(profile, config, request, ranks, say)
    except SlipstreamError as error:
        say(f"the first steps are timed, as costs can't be measured: {error}")
        return None
    lengths = units.longest_slice, settings.seq_len, request.granularity
    rates: StageRates = ranks.run_on_leader(lambda: fit_rates(units, partition, *lengths, recompute=recompute))
    return rates


def _units(
    profile: Profile, config: PretrainedConfig, request: StartRequest, ranks: Ranks, say: Callable[[str], None]
) -> ProfileUnits:
    """Returns the costs of the model's units, as it is trained. Collective."""
    measured = ProfileUnits(profile, StateBytes.of("float32" if request.dtype == "bf16" else request.dtype))
    units: ProfileUnits = ranks.run_on_leader(lambda: _of_what_is_trained(measured, config, request, say))
    return units


def _of_what_is_trained(
    units: ProfileUnits, config: PretrainedConfig, request: StartRequest, say: Callable[[str], None]
) -> ProfileUnits:
    """Returns the costs of the units with the trained weights, as far as the model's operations can be counted."""
    if request.trained.are_all:
        return units
    try:
        whole, part = (count_model(config, request.seq_len, trained=kind) for kind in (ALL_WEIGHTS, request.trained))
    except SlipstreamError as error:
        say(f"it is planned as if all weights were trained: {error}")
        return units
    below = max(0, part.num_frozen_parts - 1) / part.units_per_layer
    say(
        f"it is planned for {part.num_trained:,} trained parameters of {part.num_parameters:,}: {below:g} layers below "
        "them run forward only, and measured times are scaled to what is computed"
    )
    return trains_a_part(units, whole, part)


def held_bytes(plan: JointPlan, request: StartRequest) -> float:
    """Returns the most bytes that a rank holds with a plan that was made here."""
    assert isinstance(plan.costs, ProfileUnits)
    return max(_most_bytes(plan.costs, request, plan.partition, plan.slices, plan.schedule, plan.recompute))


def seconds_after(plan: JointPlan, copies: int, shards: int) -> float:
    """Returns the seconds from a rank's last backward to the end of the step, for the rank that takes longest: the sum
    of gradients over ranks with the same weights, and the optimizer, over `shards` of which its state is spread."""
    assert isinstance(plan.costs, ProfileUnits)
    profile, seconds = plan.costs.profile, [0.0] * plan.schedule.num_ranks
    stages = StageParts.of_partition(plan.partition, plan.costs.num_layers, plan.costs.units_per_layer)
    for stage, rank in zip(stages, plan.schedule.placement, strict=True):
        seconds[rank] += profile.gradient_seconds(stage, copies) + profile.optimizer_step_seconds(stage, shards)
    return max(seconds)


def _most_bytes(
    units: ProfileUnits,
    request: StartRequest,
    partition: Sequence[float],
    slices: tuple[int, ...],
    schedule: Schedule,
    recompute: str,
) -> list[float]:
    """Returns the most bytes that each rank holds, as they are counted before a step runs."""
    profile = units.profile
    if recompute in REPLAYED:
        schedule = add_recompute(schedule)
    stages = StageParts.of_partition(partition, units.num_layers, units.units_per_layer)
    account = head_part_memory if schedule.spreads_vocabulary else memory_table
    table = account(profile, stages, schedule, slices, recompute, units.state)
    batch = token_bytes(request.num_microbatches * request.microbatch_size * request.seq_len)
    ranks = memory_of(schedule, replace(table, header_bytes=HEADER_BYTES))
    return [(1 + _UNSEEN) * rank.peak + batch for rank in ranks]


class _Told:
    """Says how far measuring and searching are, with `every` so many seconds between two lines."""

    def __init__(self, say: Callable[[str], None], every: float) -> None:
        self._say, self._every, self._last = say, every, time.perf_counter()

    def measured(self, share: float) -> None:
        self._tell(f"measuring what the model's parts cost: {share * _BUDGET:.0f} s, of {_BUDGET:.0f} s at most")

    def searched(self, share: float) -> None:
        self._tell(f"searching for the best plan: {share:.0%} of the effort, at most")

    def _tell(self, text: str) -> None:
        if (now := time.perf_counter()) - self._last >= self._every:
            self._say(text)
            self._last = now


def is_free(options: PipelineOptions, *slices: object) -> bool:
    """Returns whether all of a start plan's choices are left to it, and all that it needs is known.

    `slices` are the settings of slices of a sequence of layers that leave it, which has an example to measure; a causal
    LM needs seq_len.
    """
    memory = options.memory
    plain = (memory.recompute, memory.offload, memory.num_flushes) == ("none", 0, 1) and options.stages_per_rank == 1
    auto = (options.schedule, options.partition) == ("auto", "auto") and options.slices in (slices or ("auto",))
    knows = options.layers.example is not None and options.layers.costs is None if slices else bool(options.seq_len)
    return auto and plain and knows


def with_plan(options: PipelineOptions, plan: JointPlan) -> PipelineOptions:
    """Returns the options in which the plan's choices are given."""
    memory = options.memory.model_copy(update={"recompute": plan.recompute})
    if isinstance(plan.costs, ProfileUnits):
        options = replace(options, parallel=options.parallel.exchanging(plan.costs.profile.degrees.exchange))
    return replace(
        options,
        schedule=plan.schedule,
        slices=list(plan.slices) if sum(plan.slices) > 1 else 1,
        partition=list(plan.partition),
        memory=memory,
    )


_Counted = tuple[float, float]  # in all, and in experts


def _parameters(part: PartCount) -> _Counted:
    return part.num_parameters, part.num_in_experts


@dataclass(frozen=True, kw_only=True)
class PartlyTrained(Profile):
    """A profile whose bytes are those of training a part of the model.

    The smaller memory of a frozen layer isn't known, so that above the lowest trained part activations count as
    measured.

    Args:
        whole: the counted model with all weights trained.
        part: the same with the trained weights.
    """

    whole: ModelCount
    part: ModelCount

    @classmethod
    def of(cls, profile: Profile, whole: ModelCount, part: ModelCount) -> PartlyTrained:
        """Returns the profile for the trained weights of `part`."""
        values = {field.name: getattr(profile, field.name) for field in fields(Profile)}
        return cls(**values, whole=whole, part=part)

    def has_backward(self, stage: Stage) -> bool:
        return self.parts_of(stage).stop > self.part.num_frozen_parts

    def num_parameters(self, layers: Stage) -> int:
        whole, part = (self._held(layers, _parameters, count) for count in (self.whole, self.part))
        return super().num_parameters(layers) + round(part - whole)

    def weight_bytes(self, layers: Stage, each: float) -> float:
        return super().weight_bytes(layers, each) - self._held(layers, lambda part: (part.saved_bytes(each), 0))

    def num_trained(self, layers: Stage) -> int:
        frozen = self._held(layers, lambda part: (part.num_frozen, part.num_in_experts - part.num_trained_in_experts))
        return max(0, self.num_parameters(layers) - round(frozen))

    def _trained_in_experts(self, layers: Stage) -> int:
        trained = self._held(layers, lambda part: (part.num_trained_in_experts, part.num_trained_in_experts))
        return round(trained) if self.degrees.experts > 1 else 0

    def activation_bytes(self, layers: Stage, length: int) -> float:
        return super().activation_bytes(self._with_backward(layers), length) if self.has_backward(layers) else 0.0

    def kept_bytes(self, layers: Stage, recompute: str, length: int) -> float:
        return super().kept_bytes(layers, recompute, length) if self.has_backward(layers) else 0.0

    def action_bytes(self, layers: Stage, length: int) -> ActionBytes:
        if self.has_backward(layers):
            return super().action_bytes(self._with_backward(layers), length)
        during = super().action_bytes(layers, length).alone
        return ActionBytes(0.0, 0.0, dict.fromkeys((Op.F, Op.B, Op.I, Op.W), 0.0) | {Op.F: during}, during)

    def context_gradient_bytes(self, layers: Stage, length: int) -> float:
        return super().context_gradient_bytes(self._with_backward(layers), length) if self.has_backward(layers) else 0.0

    def _held(self, layers: Stage, value: Callable[[PartCount], _Counted], count: ModelCount | None = None) -> float:
        """Returns a rank's share of the parts' sum, in all and in experts."""
        counted = (count or self.part).counted(self._parts(layers))
        return sum(times * self.degrees.held(*value(part)) for times, part in counted)

    def _parts(self, layers: Stage) -> StageParts:
        parts = self.parts_of(layers)
        return StageParts(parts.start, parts.stop)

    def _with_backward(self, layers: Stage) -> StageParts:
        """Returns the parts of a stage from the lowest trained one on."""
        parts = self.parts_of(layers)
        return StageParts(max(parts.start, self.part.num_frozen_parts), parts.stop)


@dataclass(frozen=True)
class PartlyTrainedUnits(ProfileUnits):
    """The costs of a model's units (see `UnitCosts`) where a part of the model is trained."""

    profile: PartlyTrained

    @property
    def num_frozen_units(self) -> int:
        return self.profile.part.num_frozen_parts

    def seconds(self, op: Op, lengths: Ints, contexts: Ints) -> tuple[Floats, Floats]:
        units, fixed = super().seconds(op, lengths, contexts)
        if op is not Op.B:
            return units * self._shares[op][:, None], fixed
        inputs, weights = (super(PartlyTrainedUnits, self).seconds(half, lengths, contexts)[0] for half in (Op.I, Op.W))
        computed = inputs * self._shares[Op.I][:, None] + weights * self._shares[Op.W][:, None]
        both = inputs + weights
        return units * np.divide(computed, both, out=np.zeros_like(both), where=both > 0), fixed

    def activation_bytes(self, lengths: Ints) -> tuple[Floats, Floats]:
        units, fixed = super().activation_bytes(lengths)
        return self._above(units), fixed

    def kept_bytes(self, lengths: Ints) -> tuple[Floats, Floats]:
        units, fixed = super().kept_bytes(lengths)
        return self._above(units), fixed

    def state_bytes(self) -> Floats:
        parts = [StageParts(part, part + 1) for part in range(len(self.profile.parts))]
        weights = np.array([self.profile.weight_bytes(part, self.state.weights) for part in parts], float)
        trained = np.array([self.profile.num_trained(part) for part in parts], float)
        state_bytes: Floats = weights + (self.state.gradients + self.state.optimizer) * trained
        return state_bytes

    def _above(self, units: Floats) -> Floats:
        # Nothing for units without a backward.
        return units * (np.arange(len(units)) >= self.num_frozen_units)[:, None]

    @cached_property
    def _shares(self) -> dict[Op, Floats]:
        """The part of a unit's measured F, I and W that remains."""
        counts = self.profile.whole, self.profile.part
        pairs = list(zip(*([count.of_kind[kind] for kind in count.parts] for count in counts), strict=True))
        return {op: np.array([_share(op, *pair) for pair in pairs]) for op in (Op.F, Op.I, Op.W)}


def _share(op: Op, whole: PartCount, part: PartCount) -> float:
    """Returns the products of an op in relation to those with all weights trained; of a part without products whether
    the op runs."""
    runs = {Op.F: True, Op.I: part.has_backward, Op.W: part.num_trained > 0}[op]
    before, now = (count.ops[op].flops.per_token for count in (whole, part))
    return float(runs) if not before else now / before * runs


def trains_a_part(units: ProfileUnits, whole: ModelCount, part: ModelCount) -> ProfileUnits:
    """Returns the units' costs with the trained weights of `part`."""
    return PartlyTrainedUnits(PartlyTrained.of(units.profile, whole, part), units.state)
