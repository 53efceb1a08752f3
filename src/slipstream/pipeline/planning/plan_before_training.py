"""schedule, slices and partition "auto" together: a plan from measured costs, made before the stages are."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from math import inf

import torch
from transformers import PretrainedConfig

from slipstream.comm import HEADER_BYTES
from slipstream.cost import (
    ANY_HOST,
    Costs,
    HeldBeside,
    MeasuredCosts,
    MeasuredLink,
    PartlyTrained,
    Profile,
    StateBytes,
    Update,
    WithoutHead,
    profile_behind,
    with_context,
    with_context_gradients,
    with_loss_tokens,
)
from slipstream.errors import SlipstreamError
from slipstream.model import ALL_WEIGHTS, TrainedWeights, find_anatomy, why_layers_stay_whole
from slipstream.options import Parallelism
from slipstream.parallel import Ranks, possible_exchanges
from slipstream.pipeline.cut_batch import token_bytes
from slipstream.pipeline.pipeline_options import ExpectedBatch, PipelineOptions
from slipstream.planner import PLAIN, Plan
from slipstream.planner.cuts import Cuts
from slipstream.planner.find_plan import find_plan
from slipstream.planner.joint import (
    JointPlan,
    JointProblem,
    OutOfMemoryError,
)
from slipstream.planner.ragged import StageRates, fit_rates
from slipstream.planner.room import first_within
from slipstream.planner.search import Evaluation, GlobalBatch, balanced_partition, evaluate
from slipstream.profile import ProfileSettings, count_model, find_costs
from slipstream.profile.cost_cache import CostCache
from slipstream.units import seconds_text

_BUDGET = 60.0  # seconds of measuring, at most
_REPEATS = 6  # runs of a point, at most
_LESS = (0.9, 0.75, 0.5)  # shares of a plan's memory, where it has too much on a host
# Peaks get this share of the counted bytes on top, for bytes that only a whole step has and single parts don't.
_UNSEEN = 0.01


def held_beside(num_tokens: int) -> HeldBeside:
    """Returns what a rank holds beside what costs say, given the tokens of a pipeline's step."""
    return HeldBeside(HEADER_BYTES, token_bytes(num_tokens), _UNSEEN)


@dataclass(frozen=True, kw_only=True)
class StartRequest(ExpectedBatch):
    """The request for a plan before the first step: the batches that it is for, whose `dtype` is as in
    `ProfileSettings`, and what it must keep to.

    Args:
        num_ranks: ranks of the pipeline.
        replicas: pipelines that share the batch.
        memory_limit: bytes of each rank. None: no limit.
        host_limit: bytes of each rank's host. None: no limit.
        vocabulary: where the head's rows are, as in a `Plan`; OPEN: wherever is faster.
        parallel: how ranks share the work of a stage.
        context: where keys and values lie, on the "device" or the "host", or the share that is on the host.
        context_gradients: in what their gradients are summed, "wide" numbers or those of the "model".
        optimizer: where the optimizer runs, likewise.
        offload: the share of slices whose activations are on the host.
        loss_tokens: the tokens of a slice whose logits exist at a time, 0 for all.
        tied: whether the head's weight embeds too.
        trained: what of the model is trained.
    """

    num_microbatches: int
    dtype: str
    num_ranks: int
    replicas: int = 1
    memory_limit: float | None = None
    host_limit: float | None = None
    vocabulary: str = "whole"
    parallel: Parallelism = Parallelism()
    context: str | float = "device"
    context_gradients: str = "wide"
    optimizer: str = "device"
    offload: float = 0.0
    loss_tokens: int = 0
    tied: bool = False
    trained: TrainedWeights = ALL_WEIGHTS

    @property
    def state(self) -> StateBytes:
        """The bytes per parameter."""
        return StateBytes.of(self.dtype)

    def closed(self, plan: Plan, costs: Costs) -> Plan:
        """Returns a plan of order, cut, slices and recomputation with the mesh that it was made for."""
        mesh = replace(
            PLAIN,
            **costs.degrees.choices,
            data_parallel=self.replicas,
            microbatch_size=costs.microbatch_size,
            shard=self.parallel.shard,
            context=self.context,
            optimizer=self.optimizer,
            offload=self.offload,
            loss_tokens=self.loss_tokens,
        )
        return mesh.closed(
            schedule=plan.schedule, slices=plan.slices, partition=plan.partition, recompute=plan.recompute
        )

    def usual_peaks(self, costs: Costs, plan: Plan) -> list[float]:
        """Returns the most bytes of each rank, of a plan of order, slices and recomputation, with stages of equal
        work."""
        partition = balanced_partition(costs, self.seq_len, plan.closed().placement)
        return self.evaluate(costs, plan.closed(partition=partition)).peaks()

    def evaluate(self, costs: Costs, plan: Plan) -> Evaluation:
        """Returns a step of a plan of order, cut, slices and recomputation on the mesh, with all that ranks hold."""
        rows = self.num_microbatches * self.microbatch_size
        batch = GlobalBatch(self.seq_len, self.replicas * rows)
        beside = held_beside(rows * self.seq_len)
        here = with_context_gradients(costs, self.context_gradients)
        host = ANY_HOST if self.host_limit is None else ANY_HOST._replace(capacity=self.host_limit)
        return evaluate(self.closed(plan, costs), here, batch, self.state, host, beside)

    def _peaks(self, costs: Costs, plan: Plan) -> list[float]:
        return self.evaluate(costs, plan).peaks_within_hosts()

    def problem(self, costs: Costs, longest: int) -> JointProblem:
        """Returns the search's problem, with costs of slices of up to `longest` tokens: shorter ones than were asked
        for, where time ran out."""
        tiled = with_loss_tokens(costs, self.loss_tokens)
        problem = JointProblem(
            costs=with_context(
                with_context_gradients(tiled, self.context_gradients), self.context, ANY_HOST, self.seq_len
            ),
            update=Update(self.state, self.replicas * costs.degrees.token_ranks, self.parallel.shard, self.optimizer),
            seq_len=self.seq_len,
            num_ranks=self.num_ranks,
            num_microbatches=self.num_microbatches,
            cuts=self.cuts(longest),
            memory_limit=self.memory_limit,
            account=partial(self._peaks, costs),
            tied=self.tied,
            given=Plan(vocabulary=self.vocabulary),
            may_spread=True,
        )
        return replace(problem, effort=self.effort * problem.effort)

    def fit_rates(self, costs: Costs, longest: int, partition: Sequence[float], recompute: str) -> StageRates:
        """Returns the rates of stages with so many layers, from costs of slices of up to `longest` tokens."""
        return fit_rates(costs, partition, self.cuts(longest), self.profile.seq_len, recompute=recompute)

    def cuts(self, longest: int | None = None) -> Cuts:
        """Returns where sequences may be cut, into slices of up to `longest` tokens."""
        return replace(Cuts.of_rows(self.longest or self.seq_len), longest_slice=longest)

    @property
    def profile(self) -> ProfileSettings:
        """The settings of the measurement for the plan."""
        seq_len = self.longest or self.seq_len
        step = self.cuts().granularity
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
    plans = list[tuple[JointPlan, StageRates]]()
    refusal = None
    for kind in kinds:
        # Messages between stages take as long however a slice is shared.
        link = profile_behind(plans[0][0].costs).link if plans else None
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
    costs = _costs(profile, config, request, ranks, say)
    if costs.units_per_layer == 1 and ranks.leads:
        say(f"layers are planned whole: {why_layers_stay_whole(config, find_anatomy(config))}")
    problem = request.problem(costs, profile.longest_slice)

    def within(limit: float) -> JointPlan | None:
        with suppress(OutOfMemoryError):
            return find_plan(replace(problem, memory_limit=min(limit, problem.memory_limit or inf)), told.searched)
        return None

    def found() -> tuple[JointPlan, StageRates]:
        plan = find_plan(problem, told.searched)
        room = inf if request.device_memory is None else request.device_memory
        step = request.evaluate(costs, plan.plan)
        if not step.fits(room):
            # A host has less where fewer microbatches are on their way, which hold less on devices too.
            less = (share * max(step.peaks()) for share in _LESS) if request.host_limit is not None else ()
            tries = [limit for limit in (room, *less) if limit < inf]
            plan = first_within(tries, within, lambda found: request.evaluate(costs, found.plan).fits(room)) or plan
        plan = replace(plan, plan=request.closed(plan.plan, costs), costs=costs)
        of_stages = WithoutHead(costs) if plan.head == "spread" else costs
        return plan, request.fit_rates(of_stages, profile.longest_slice, plan.partition, plan.recompute)

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
        costs = _costs(profile, config, request, ranks, say)
    except SlipstreamError as error:
        say(f"the first steps are timed, as costs can't be measured: {error}")
        return None
    longest = profile.longest_slice
    rates: StageRates = ranks.run_on_leader(lambda: request.fit_rates(costs, longest, partition, recompute))
    return rates


def _costs(
    profile: Profile, config: PretrainedConfig, request: StartRequest, ranks: Ranks, say: Callable[[str], None]
) -> Costs:
    """Returns the costs of the model's parts, as it is trained. Collective."""
    costs: Costs = ranks.run_on_leader(lambda: of_what_is_trained(MeasuredCosts(profile), config, request, say))
    return costs


def of_what_is_trained(
    costs: Costs, config: PretrainedConfig, request: StartRequest, say: Callable[[str], None]
) -> Costs:
    """Returns the costs with the trained weights, as far as the model's operations can be counted."""
    if request.trained.are_all:
        return costs
    try:
        whole, part = (count_model(config, request.seq_len, trained=kind) for kind in (ALL_WEIGHTS, request.trained))
    except SlipstreamError as error:
        say(f"it is planned as if all weights were trained: {error}")
        return costs
    say(
        f"it is planned for {part.num_trained:,} trained parameters of {part.num_parameters:,}: "
        f"{part.layers_without_backward:g} layers below them run forward only, and measured times are "
        "scaled to what is computed"
    )
    return PartlyTrained(costs, whole, part)


class _Told:
    """Reports how far measuring and searching are, at most one line per `every` seconds."""

    def __init__(self, say: Callable[[str], None], every: float) -> None:
        self._say = say
        self._every = every
        self._last = time.perf_counter()

    def measured(self, share: float) -> None:
        self._tell(f"measuring what the model's parts cost: {share * _BUDGET:.0f} s, of {_BUDGET:.0f} s at most")

    def searched(self, task: str, done: int, total: int) -> None:
        self._tell(f"searching for the best plan: {done / total:.0%} of the effort, at most")

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
    if not slices:
        options = options.measured()
    plain = (memory.recompute, memory.offload, memory.num_flushes) == ("none", 0, 1)
    plain = plain and options.stages_per_rank in (None, 1)
    auto = (options.schedule, options.partition) == ("auto", "auto") and options.slices in (slices or ("auto",))
    knows = options.layers.example is not None and options.layers.costs is None if slices else bool(options.seq_len)
    return auto and plain and knows
