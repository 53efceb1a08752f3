"""schedule, slices and partition "auto" together: a plan from measured costs, made before the stages are."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from transformers import PretrainedConfig

from slipstream.errors import SlipstreamError
from slipstream.messages import HEADER_BYTES
from slipstream.model.adapters import ALL_WEIGHTS, TrainedWeights
from slipstream.options import Parallelism
from slipstream.parallel import Ranks
from slipstream.pipeline.batch import token_bytes
from slipstream.pipeline.pipeline_options import PipelineOptions
from slipstream.pipeline.tuning.partly_trained import trains_a_part
from slipstream.pipeline.tuning.row_plan import granularity_for
from slipstream.planner.costs import Profile, StageParts, StateBytes, head_part_memory, memory_table
from slipstream.planner.joint import (
    JointPlan,
    JointProblem,
    ProfileUnits,
    UnitCosts,
    UnitsWithoutHead,
    Vocabulary,
    find_vocabulary_plan,
)
from slipstream.planner.steps import StageRates, fit_rates
from slipstream.profiler import ProfileSettings, count_model, find_costs, why_layers_stay_whole
from slipstream.profiler.cost_cache import CostCache
from slipstream.schedule import Schedule, add_recompute
from slipstream.simulator import memory_of

_BUDGET = 60.0  # seconds of measuring, at most
_EVERY = 5.0  # seconds between lines about progress
_REPEATS = 6  # of a point, at most
_UNSEEN = 0.01  # of what is counted: what parts that were measured alone hold only together


@dataclass(frozen=True)
class StartRequest:
    """What a plan before the first step is for.

    Args:
        seq_len: tokens of a sequence.
        microbatch_size: rows of a microbatch.
        num_microbatches: microbatches of a step.
        num_ranks: ranks of the pipeline.
        dtype: in which the model computes, as in `ProfileSettings`.
        memory_limit: bytes of each rank. None: no limit.
        vocabulary: whether the head is to be whole or spread over the ranks. "auto": whichever is faster.
        parallel: how ranks that share layers share them.
        tied: whether the head's weight embeds too.
        longest: tokens of the longest sequence for which costs are wanted. None: `seq_len`.
        trained: what of the model is trained.
    """

    seq_len: int
    microbatch_size: int
    num_microbatches: int
    num_ranks: int
    dtype: str
    memory_limit: float | None = None
    vocabulary: Vocabulary = "whole"
    parallel: Parallelism = Parallelism()
    tied: bool = False
    longest: int | None = None
    trained: TrainedWeights = ALL_WEIGHTS

    @property
    def granularity(self) -> int:
        """The number of tokens at whose multiples slices begin."""
        return granularity_for(self.longest or self.seq_len)

    @property
    def profile(self) -> ProfileSettings:
        """What is measured for the plan."""
        seq_len, step = self.longest or self.seq_len, self.granularity
        return ProfileSettings(
            seq_len=seq_len,
            microbatch_size=self.microbatch_size,
            dtype=self.dtype,
            longest_slice=max(step, seq_len // 2 // step * step),
            granularity=step,
            repeats=_REPEATS,
            budget=_BUDGET,
            few_points=True,
            sequence_parallel=self.parallel.sequence_parallel,
            tensor_plan=self.parallel.tensor_plan,
        )


def plan_start(
    config: PretrainedConfig,
    request: StartRequest,
    ranks: Ranks,
    device: torch.device,
    say: Callable[[str], None] = lambda text: None,
) -> tuple[JointPlan, StageRates]:
    """Returns the plan with the shortest simulated step, from costs that are measured here once and kept, and what its
    stages cost. Collective.

    The leader searches, and all ranks follow. `say` gets a line, on the leader, about each measuring that has to be
    repeated, every few seconds about what has been done, and about why layers aren't cut in half where they can't be.

    Raises:
        SlipstreamError: where nothing fits the memory limit, or the model can't be measured.
    """
    told = _Told(say)
    profile = find_costs(config, request.profile, device, ranks, say, told.measured)
    units = _units(profile, config, request, ranks, say)
    if units.units_per_layer == 1 and ranks.leads:
        say(f"layers are planned whole: {why_layers_stay_whole(config)}")
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

    def found() -> tuple[JointPlan, StageRates]:
        plan = replace(find_vocabulary_plan(problem, request.vocabulary, told.searched), costs=units)
        costs: UnitCosts = UnitsWithoutHead(units) if plan.head == "spread" else units
        lengths = units.longest_slice, request.profile.seq_len, request.granularity
        return plan, fit_rates(costs, plan.partition, *lengths, recompute=plan.recompute)

    chosen: tuple[JointPlan, StageRates] = ranks.decided(found)
    return chosen


def measure_rates(
    config: PretrainedConfig,
    request: StartRequest,
    partition: Sequence[float],
    ranks: Ranks,
    device: torch.device,
    say: Callable[[str], None] = lambda text: None,
    recompute: bool = False,
) -> StageRates | None:
    """Returns what stages with so many layers cost, from costs that are kept, or measured here beside them. Collective.

    None, after saying why, where costs can't be measured, and where there may be no memory beside the stages: on a GPU
    and with a memory limit.
    """
    settings = request.profile
    told = _Told(say)
    may_measure = device.type == "cpu" and request.memory_limit is None
    try:
        profile: Profile | None
        if may_measure:
            with torch.random.fork_rng(devices=()):
                profile = find_costs(config, settings, device, ranks, say, told.measured)
        else:
            cache = CostCache(config, settings, device, ranks.world.size, ranks.tensor.size)
            profile = ranks.decided(lambda: cache.find(say))
        if profile is None:
            return None
        units = _units(profile, config, request, ranks, say)
    except SlipstreamError as error:
        say(f"the first steps are timed, as costs can't be measured: {error}")
        return None
    lengths = units.longest_slice, settings.seq_len, request.granularity
    rates: StageRates = ranks.decided(lambda: fit_rates(units, partition, *lengths, recompute=recompute))
    return rates


def _units(
    profile: Profile, config: PretrainedConfig, request: StartRequest, ranks: Ranks, say: Callable[[str], None]
) -> ProfileUnits:
    """Returns what the units of the model cost, as it is trained. Collective."""
    measured = ProfileUnits(profile, StateBytes.of("float32" if request.dtype == "bf16" else request.dtype))
    units: ProfileUnits = ranks.decided(lambda: _of_what_is_trained(measured, config, request, say))
    return units


def _of_what_is_trained(
    units: ProfileUnits, config: PretrainedConfig, request: StartRequest, say: Callable[[str], None]
) -> ProfileUnits:
    """Returns the costs of the units for what is trained, as far as the model's operations can be counted."""
    if request.trained.are_all:
        return units
    try:
        whole, part = (count_model(config, request.seq_len, trained=each) for each in (ALL_WEIGHTS, request.trained))
    except SlipstreamError as error:
        say(f"it is planned as if all weights were trained: {error}")
        return units
    below = max(0, part.num_frozen_parts - 1) / part.units_per_layer
    say(
        f"it is planned for {part.num_trained:,} trained parameters of {part.num_parameters:,}: {below:g} layers below "
        "them have forwards alone, and measured times are scaled to what is computed"
    )
    return trains_a_part(units, whole, part)


def _most_bytes(
    units: ProfileUnits,
    request: StartRequest,
    partition: Sequence[float],
    slices: tuple[int, ...],
    schedule: Schedule,
    recompute: bool,
) -> list[float]:
    """Returns the most bytes that each rank holds, as they are counted before a step runs."""
    profile = units.profile
    if recompute:
        schedule = add_recompute(schedule)
    stages = StageParts.of_partition(partition, units.num_layers, units.units_per_layer)
    account = head_part_memory if schedule.spreads_vocabulary else memory_table
    table = account(profile, stages, schedule, slices, "full" if recompute else "none", units.state)
    batch = token_bytes(request.num_microbatches * request.microbatch_size * request.seq_len)
    ranks = memory_of(schedule, replace(table, header_bytes=HEADER_BYTES))
    return [(1 + _UNSEEN) * rank.peak + batch for rank in ranks]


class _Told:
    """Says how far measuring and searching are, every few seconds."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say, self._last = say, time.perf_counter()

    def measured(self, share: float) -> None:
        self._tell(f"measuring what the model's parts cost: {share * _BUDGET:.0f} s, of {_BUDGET:.0f} s at most")

    def searched(self, share: float) -> None:
        self._tell(f"searching for the best plan: {share:.0%} of the effort, at most")

    def _tell(self, text: str) -> None:
        if (now := time.perf_counter()) - self._last >= _EVERY:
            self._say(text)
            self._last = now


def is_free(options: PipelineOptions, *slices: object) -> bool:
    """Returns whether everything that a start plan decides is left to it, and it knows what it has to.

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
    memory = options.memory.model_copy(update={"recompute": "full"}) if plan.recompute else options.memory
    return replace(
        options,
        schedule=plan.schedule,
        slices=list(plan.slices) if sum(plan.slices) > 1 else 1,
        partition=list(plan.partition),
        memory=memory,
    )
