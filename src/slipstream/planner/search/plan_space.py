"""The space of a plan: every configuration that divides, with the costs of its stages and its lower bounds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache, partial
from math import gcd, inf, prod
from typing import NamedTuple

import numpy as np

from slipstream.array_types import Floats
from slipstream.cost import (
    BY_LAYER,
    REPLAYED,
    SHARED_WORK,
    WAYS,
    Costs,
    CostSource,
    Degrees,
    HostMemorySpec,
    Stage,
    Update,
    all_degrees,
    kinds_by_layer,
    partition_of,
    parts_of,
    unit_bounds,
    with_context,
    with_loss_tokens,
)
from slipstream.errors import SlipstreamError
from slipstream.options import host_share, tokens_on_host
from slipstream.planner.joint import JointPlan
from slipstream.planner.plan import ONE_DEVICE, OPEN, Plan, placement_of
from slipstream.planner.plan_fields import AUTO
from slipstream.planner.plan_report import Prediction
from slipstream.planner.search.bounds import GroupBounds, MemoryBound, PlanGroup, StageSizes
from slipstream.planner.search.evaluate import (
    GROUPS,
    Evaluation,
    GlobalBatch,
    StepTimes,
    head_times,
    host_of_copies,
    reduction_seconds,
    state_on_host,
    tail_seconds,
    update_of,
)
from slipstream.planner.search.placed_partition import PlacedPartition, balanced_layers, sequence_seconds
from slipstream.planner.search.plan_options import PlanOptions
from slipstream.planner.search.savings import SAVINGS, Savings
from slipstream.planner.search.schedule_shape import ScheduleShape, cached_schedule, with_savings
from slipstream.planner.search.slice_choices import SliceChoices
from slipstream.planner.search.stage_times import Slicing, StageTimes, first_others_last, part_times, stage_times
from slipstream.schedule import SCHEDULES, Schedule, ScheduleKind
from slipstream.schedule.action_arrays import ActionArrays

# Degrees, sequences of a microbatch, place of keys and values, and the host as their copies see it.
_CostsKey = tuple[Degrees, int, str | float, HostMemorySpec | None]
USABLE = 0.95  # of a device's memory: fragments, libraries and all that isn't counted take the rest
_LONG = 4000  # slices of stages, in a step that isn't simulated whole
_STAGES_PER_RANK = (1, 2, 3, 4, 5, 6, 8, 10, 12)


class AlikeInCut(NamedTuple):
    """Configurations of a mesh with the same cut.

    Args:
        first: with their common settings.
        names: of their schedules.
        slicings: (number of slices, slicing) of each.
        savings: how they save memory.
    """

    first: Plan
    names: tuple[str, ...]
    slicings: list[tuple[int, str]]
    savings: Savings


class PlanSpace:
    """The configurations of one search and their stages' costs; costs that many share are computed once."""

    def __init__(self, source: CostSource, seq_len: int, global_batch: int, options: PlanOptions) -> None:
        self.source, self.seq_len, self.global_batch, self.options = source, seq_len, global_batch, options
        _check_known(source, options)
        self.memory = USABLE * source.memory if options.memory_limit is None else options.memory_limit
        self.host = source.host
        if self.host is not None and options.host_memory_limit is not None:
            self.host = self.host._replace(capacity=options.host_memory_limit)
        self.loss_tokens: int = next(iter(options.values("loss_tokens", (0,))))
        self.costs, self._costs = cache(self._costs_on_device), cache(self._costs_with)
        self.choices = SliceChoices(source, seq_len, options, self.costs)
        self.longest = self.choices.longest
        self.alike, self._slowest = cache(self._first_alike), cache(self._find_slowest)
        self._partition, self._times = cache(self._compute_partition), cache(self._compute_times)
        self._tails, self.sizes = cache(partial(tail_seconds, host=self.host)), cache(self._sizes)
        self._gradients = cache(partial(reduction_seconds, host=self.host))
        self._whole = cache(self._whole_seconds)
        self._columns, self._work = cache(self._part_columns), cache(self._least_work)
        self._state, self._placed = cache(self._state_bytes), cache(self._place)
        self._alike: dict[tuple[tuple[int, ...], ...], Stage] = {}
        self.found: dict[Plan, JointPlan] = {}  # by the joint search

    @property
    def contexts(self) -> tuple[str | float, ...]:
        """The places of keys and values that are searched one after the other: the more are on the host, the more fits,
        and nothing is faster."""
        places = ("device", "host") if self.host else ("device",)
        return tuple(sorted(self.options.values("context", places), key=host_share))

    def with_context(self, place: str | float) -> PlanSpace:
        """Returns the space with keys and values in one place."""
        options = self.options.changed(context=place)
        return PlanSpace(self.source, self.seq_len, self.global_batch, options)

    # --- what divides ------------------------------------------------------------------------------------------------

    def meshes(self) -> Iterator[Plan]:
        """Yields all that divide the devices, the layers and the batch.

        Tensor parallelism stays inside of a node, or of a rack that NVLink connects, unless it is asked for.
        """
        num_devices, num_layers, allows = self.source.num_devices, len(self.source.kinds), self.options.allows
        for degrees in self._degrees():
            together = degrees.num_shared
            for pipeline in _divisors(num_devices // together) if num_devices % together == 0 else ():
                data = num_devices // together // pipeline
                fits = pipeline <= num_layers and self.global_batch % data == 0
                fits = fits and data * together % degrees.num_ranks == 0
                if fits and allows("pipeline_parallel", pipeline) and allows("data_parallel", data):
                    sizes = self._microbatch_sizes(self.global_batch // data)
                    meshes = (_mesh(degrees, pipeline, data, size, self.loss_tokens) for size in sizes)
                    yield from (mesh for mesh in meshes if not self._shares_for_nothing(mesh))

    def _shares_for_nothing(self, mesh: Plan) -> bool:
        """Returns whether ranks share slices of microbatches that they could have parts of instead: with more replicas
        and fewer sequences in each microbatch they would have as many tokens, and exchange less."""
        data, size, allows = mesh.data_parallel, mesh.microbatch_size, self.options.allows
        return any(
            degree // parts in self.source.degrees[way.degree]
            and allows(way.choice, degree // parts)
            and allows("data_parallel", data * parts)
            and size // parts in self._microbatch_sizes(self.global_batch // (data * parts))
            for way, degree in ((way, getattr(mesh.degrees, way.degree)) for way in SHARED_WORK if way.shares_tokens)
            for parts in _divisors(gcd(degree, size))[1:]
        )

    def _degrees(self) -> Iterator[Degrees]:
        """Yields the numbers of ranks that can share work, with their exchange."""
        source, options = self.source, self.options
        asked = {way.choice: options.allowed.get(way.choice) for way in SHARED_WORK}
        inside = [name for name, way in WAYS.items() if way.stays_inside and not asked[way.named.choice]]
        for degrees in all_degrees(source.degrees, asked):
            # Training refuses it where ranks share the tokens before the head.
            if self.loss_tokens and source.sequence_parallel and degrees.tensor > 1:
                continue
            tokens = degrees.token_ranks
            has_tokens = tokens == 1 or self.seq_len // tokens >= self.choices.least_tokens
            if has_tokens and all(getattr(degrees, name) <= source.devices_per_domain for name in inside):
                kinds = source.exchanges(degrees, options.allowed.get("context_exchange"))
                yield from (degrees._replace(exchange=kind) for kind in kinds)

    def _microbatch_sizes(self, sequences: int) -> list[int]:
        known = self.source.microbatch_sizes
        sizes = [size for size in _divisors(sequences) if known is None or size in known]
        return [size for size in sizes if self.options.allows("microbatch_size", size)]

    def shapes(self, pipeline: int, num_microbatches: int) -> Iterator[tuple[int, list[str]]]:
        """Yields stages per rank and the schedules that allow them; of two equal schedules only the first."""
        num_layers = len(self.source.kinds)
        for stages in self.options.values("stages_per_rank", _STAGES_PER_RANK):
            if pipeline * stages > num_layers or (pipeline == 1 and stages > 1):
                continue
            named = tuple(name for name in self.options.values("schedule") if name != AUTO)
            shapes = [
                name
                for name in named or (SCHEDULES if pipeline > 1 else ("1f1b",))
                if _allows(SCHEDULES[name], stages) and (named or not _is_dominated(SCHEDULES[name], num_microbatches))
            ]
            if shapes:
                yield stages, shapes

    def shape(self, plan: Plan) -> ScheduleShape:
        cut = self.cut(plan)
        return ScheduleShape.of(plan, self.num_microbatches(plan), cut.trains, cut.costs.system)

    def num_microbatches(self, plan: Plan) -> int:
        """Returns the microbatches of each pipeline."""
        return self.global_batch // (plan.data_parallel * plan.microbatch_size)

    # --- what stages cost --------------------------------------------------------------------------------------------

    def cut(self, plan: Plan) -> PlacedPartition:
        """Returns the partition of layers that makes the slowest rank fastest, by the time of whole sequences; the
        plan's own, where it has one."""
        costs_key = self._costs_key(plan)
        if plan.partition is not OPEN:
            return self._placed(costs_key, plan.placement, plan.partition, plan.vocabulary == "spread")
        assert isinstance(plan.schedule, str), "an order is found with its cut"
        placement = placement_of(plan.schedule, plan.pipeline_parallel, plan.stages_per_rank)
        return self._partition(costs_key, placement)

    def costs_of(self, plan: Plan) -> Costs:
        """Returns the costs of the model's parts as the plan has them."""
        return self._costs(*self._costs_key(plan))

    def _costs_key(self, plan: Plan) -> _CostsKey:
        return plan.degrees, plan.microbatch_size, plan.context, host_of_copies(plan, self.host)

    def _costs_on_device(self, degrees: Degrees, size: int) -> Costs:
        return with_loss_tokens(self.source.costs(degrees, size), self.loss_tokens)

    def _costs_with(self, degrees: Degrees, size: int, context: str | float, host: HostMemorySpec | None) -> Costs:
        return with_context(self.costs(degrees, size), context, host, self.seq_len)

    def _place(
        self,
        costs_key: _CostsKey,
        placement: tuple[int, ...],
        partition: tuple[float, ...],
        spreads_head: bool,
    ) -> PlacedPartition:
        bounds = unit_bounds(partition, len(self.source.kinds), self.source.units_per_layer)
        return PlacedPartition(self._costs(*costs_key), placement, bounds, spreads_head)

    def _compute_partition(self, costs_key: _CostsKey, placement: tuple[int, ...]) -> PlacedPartition:
        costs = self._costs(*costs_key)
        degrees, size, *_ = costs_key
        num_layers = len(self.source.kinds)
        weights = [self._whole(degrees, size, self.alike(range(layer, layer + 1))) for layer in range(num_layers)]
        partition = balanced_layers(weights, placement)
        return PlacedPartition(costs, placement, unit_bounds(partition, num_layers, self.source.units_per_layer))

    def slices(self, plan: Plan) -> tuple[int, ...]:
        """Returns the tokens of each slice."""
        if plan.slices is not OPEN:
            return plan.slices
        exact = self._exact(plan) if plan.slicing == "exact" else None
        return exact or self.choices.equal_time(plan.degrees, plan.microbatch_size, plan.num_slices)

    def _exact(self, plan: Plan) -> tuple[int, ...] | None:
        """Returns the exact slicing for stages like the slowest one of the plan's cut."""
        # Bounds have the same slices, wherever keys and values lie.
        stage = self._slowest(self.cut(replace(plan, context="device")))
        num_passes = self.num_microbatches(plan) * plan.stages_per_rank
        return self.choices.exact(plan.degrees, plan.microbatch_size, stage, plan.pipeline_parallel, num_passes)

    def actions(self, plan: Plan, shape: ScheduleShape) -> ActionArrays:
        """Returns the actions, with R, OFFLOAD and RELOAD; a named schedule's backwards are split as in a Pipeline."""
        replays = plan.recompute in REPLAYED
        if isinstance(plan.schedule, Schedule):
            return with_savings(plan.schedule, replays, plan.offload)
        return cached_schedule(shape, replays, plan.offload)

    def _find_slowest(self, cut: PlacedPartition) -> Stage:
        length = self.longest
        return max(dict.fromkeys(map(self.alike, cut.stages)), key=partial(sequence_seconds, cut.costs, length))

    def _whole_seconds(self, degrees: Degrees, size: int, layers: Stage) -> float:
        # Of the longest slice whose time is known, where a whole sequence is longer.
        return sequence_seconds(self.costs(degrees, size), self.longest, layers)

    def times(self, plan: Plan) -> StageTimes:
        return self._times(self.cut(plan), self.slices(plan))

    def _compute_times(self, cut: PlacedPartition, slices: Slicing) -> StageTimes:
        parts = part_times(cut.costs, self.source.recomputations, (slices,))
        return stage_times(cut, parts, self.source.recomputations, slices)

    def _part_columns(self, degrees: Degrees, size: int, slicings: tuple[Slicing, ...]) -> Floats:
        parts = part_times(self.costs(degrees, size), self.source.recomputations, slicings)
        return first_others_last(parts, slicings)

    def _first_alike(self, stage: Stage) -> Stage:
        """Returns the first stage asked for that costs the same."""
        parts, per_layer, num_layers = self.source.parts, self.source.units_per_layer, len(self.source.kinds)
        return self._alike.setdefault(kinds_by_layer(parts, parts_of(stage, num_layers, per_layer), per_layer), stage)

    def update(self, plan: Plan) -> Update:
        """Returns the update that ends the plan's step."""
        return update_of(plan, self.source.state, GlobalBatch(self.seq_len, self.global_batch))

    def tails(self, plan: Plan) -> Floats:
        """Returns each rank's seconds that always follow its last action: of reducing the gradients of its first stage,
        of gathering weights, and of the optimizer."""
        return self._tails(self.cut(plan), self.update(plan))

    def gradient_seconds(self, plan: Plan) -> Floats:
        """Returns the seconds in which each stage's gradients are reduced over the replicas."""
        return self._gradients(self.cut(plan), self.update(plan))

    def _sizes(self, cut: PlacedPartition) -> StageSizes:
        costs, length, per_stage = cut.costs, self.seq_len, cut.per_stage
        kept = {
            what: per_stage(partial(costs.kept_bytes, recompute=what, length=length))
            for what in self.source.recomputations
        }
        kept["none"] = per_stage(partial(costs.activation_bytes, length=length))
        largest = np.zeros(cut.num_ranks)
        np.maximum.at(largest, list(cut.placement), kept["none"])
        context = per_stage(partial(costs.context_bytes, length=length))
        weights = per_stage(partial(costs.weight_bytes, each=self.source.state.weights))
        optimized = cache(lambda update: per_stage(partial(costs.num_optimized, update=update)))
        numbers = weights, per_stage(costs.num_trained), optimized
        return StageSizes(*numbers, context, kept, largest)

    # --- what a step takes -------------------------------------------------------------------------------------------

    def evaluate(self, plan: Plan) -> Evaluation:
        """Returns what the plan's step takes and holds, by all of its actions."""
        return self._evaluated(plan, self.shape(plan))

    def evaluate_in_part(self, plan: Plan) -> Evaluation:
        """Returns it by few groups of a long step, where these take equally long."""
        candidate = self.evaluate_bytes(plan)
        return candidate if not candidate.num_extrapolated or candidate.is_steady else self.evaluate(plan)

    def evaluate_bytes(self, plan: Plan) -> Evaluation:
        """Returns what the plan's step holds, by few groups of a long one, where later ones hold no more."""
        shape = self.shape(plan)
        few = shape.with_groups(GROUPS)
        is_long = prod(shape.counts) > _LONG and shape.num_microbatches > 2 * few.num_microbatches
        if not is_long or isinstance(plan.schedule, Schedule) or SCHEDULES[plan.schedule].holds_all:
            return self.evaluate(plan)
        return self._evaluated(plan, few)

    def _evaluated(self, plan: Plan, shape: ScheduleShape) -> Evaluation:
        return Evaluation(
            plan=plan,
            cut=self.cut(plan),
            slices=self.slices(plan),
            arrays=self.actions(plan, shape),
            find_times=partial(self._step_times, plan),
            update=self.update(plan),
            host=self.host,
            alike=self.alike,
            num_extrapolated=self.num_microbatches(plan) - shape.num_microbatches,
        )

    def _step_times(self, plan: Plan) -> StepTimes:
        return StepTimes(
            stages=self.times(plan),
            reductions=self.gradient_seconds(plan),
            tails=self.tails(plan),
            head=head_times(plan, self.costs_of(plan)),
        )

    def fits(self, evaluation: Evaluation) -> bool:
        """Returns whether all devices and hosts have room."""
        return evaluation.fits(self.memory)

    def may_fit(self, plan: Plan) -> bool:
        """Returns False only if a plan is too large, even without messages and keys' gradients."""
        cut, shape = self.cut(plan), self.shape(plan)
        update = self.update(plan)
        state = update.held
        sizes, slices, by_layer = self.sizes(cut), np.array(self.slices(plan)), plan.recompute in BY_LAYER
        bound = MemoryBound(
            whole=np.outer(sizes.kept["full" if by_layer else "none"], slices / self.seq_len),
            kept=np.outer(sizes.kept[plan.recompute], slices / self.seq_len),
            context=sizes.context * (not by_layer or len(slices) > 1) * self._least_here(plan),
            # Those of one of several stages may be on the host before others are made.
            gradients=state.gradients * sizes.trained * (update.place == "device" or plan.stages_per_rank == 1),
            offloads=bool(plan.offload),
        )
        state_bytes = sizes.weights + state.optimizer * sizes.optimized(update)
        if (bound.peaks(shape) + cut.per_rank(state_bytes)).max() > self.memory:
            return False
        host = self.host
        if host is None:
            return True
        away = bound.away(shape) if plan.offload == 1 else 0.0
        return max(away, float(state_on_host(cut, update).max())) <= host.capacity

    def _least_here(self, plan: Plan) -> float:
        """Returns at least which part of the keys and values that a cut's costs count is on the device: those of a
        sequence, without the slice in which a share ends."""
        share, slices = host_share(plan.context), self.slices(plan)
        if share in (0, 1):
            return 1.0
        return min(1.0, (self.seq_len - tokens_on_host(slices, share)) / ((1 - share) * self.seq_len))

    def predict(self, evaluation: Evaluation) -> Prediction:
        """Returns the step of a plan, its causes, and all ranks' memory at their peaks."""
        plan, step = evaluation.plan, evaluation.seconds
        peak = self.source.peak_seconds(self.global_batch, self.seq_len)
        return Prediction(
            plan=replace(
                plan,
                partition=partition_of(evaluation.cut.bounds, self.source.units_per_layer),
                placement=evaluation.cut.placement,
                slices=evaluation.slices,
                num_microbatches=self.num_microbatches(plan),
            ),
            step_seconds=step,
            tokens_per_second=self.global_batch * self.seq_len / step,
            mfu=None if peak is None else peak / (step * plan.num_devices),
            idle_fraction=evaluation.idle_fraction,
            seconds_by_cause=evaluation.causes,
            memory=evaluation.memory(),
            host_memory=evaluation.host_memory(),
            memory_limit=self.memory,
            joint=self.found.get(plan),
        )

    # --- bounds ------------------------------------------------------------------------------------------------------

    def bounded(self) -> Iterator[tuple[float, float, Plan]]:
        """Yields (least seconds of the step, least bytes of the fullest rank, configuration) of all that divide."""
        for mesh in self.meshes():
            yield from self.of_mesh(mesh)

    def least_seconds(self, mesh: Plan) -> float:
        """Returns a lower bound of the step of all configurations on a mesh: the least work of its sequences and the
        optimizer's, spread evenly over the pipeline. It is 0 where slices may be faster by an unknown amount."""
        work = self._work(mesh.degrees, mesh.microbatch_size)
        if not work:
            return 0.0
        costs, whole = self.costs(mesh.degrees, mesh.microbatch_size), range(len(self.source.kinds))
        num_microbatches = self.global_batch // (mesh.data_parallel * mesh.microbatch_size)
        optimizer = costs.optimizer_step_seconds(whole, Update(self.source.state, mesh.num_copies, "optimizer"))
        return (work * num_microbatches + optimizer) / mesh.pipeline_parallel

    def _least_work(self, degrees: Degrees, size: int) -> float:
        """Returns the least seconds of a microbatch's forward and backward on one rank with all layers."""
        return self.costs(degrees, size).least_seconds(self.seq_len)

    def of_mesh(self, mesh: Plan) -> Iterator[tuple[float, float, Plan]]:
        """Yields (least seconds of the step, least bytes of the fullest rank, configuration) of all on a mesh.

        One that is too large has no time, 0.
        """
        for group in self.groups(mesh):
            yield from group.bounded()
            if exact := self.with_exact_slices(group):
                yield from exact.bounded()

    def groups(self, mesh: Plan) -> Iterator[PlanGroup]:
        """Yields the configurations of a mesh whose slices take equal time, those with the same cut together."""
        for alike in self.alike_in_cut(mesh):
            yield self._group(alike)

    def alike_in_cut(self, mesh: Plan) -> Iterator[AlikeInCut]:
        """Yields the configurations of a mesh whose slices take equal time, by cut, without bounds."""
        degrees, pipeline, data, size = mesh.degrees, mesh.pipeline_parallel, mesh.data_parallel, mesh.microbatch_size
        savings = Savings.tried(self.options, self.source, mesh)
        if not savings.every:
            return
        counts = (
            self.choices.counts(pipeline, degrees.token_ranks) if self.options.allows("slicing", "equal-time") else []
        )
        slicings = [(count, "equal-time") for count in counts]
        for stages_per_rank, names in self.shapes(pipeline, self.global_batch // (data * size)):
            alike: dict[tuple[tuple[int, ...], bool], list[str]] = {}
            for name in names:
                placement = placement_of(name, pipeline, stages_per_rank)
                alike.setdefault((placement, SCHEDULES[name].splits), []).append(name)
            for same in alike.values():
                unsliced = replace(
                    mesh,
                    stages_per_rank=stages_per_rank,
                    schedule=same[0],
                    num_slices=1,
                    slicing="equal-time",
                    vocabulary="whole",
                    **savings.every[0],
                )
                yield AlikeInCut(unsliced, tuple(same), slicings, savings)

    def with_exact_slices(self, group: PlanGroup) -> PlanGroup | None:
        """Returns a group's configurations with slices that are the best for a pipeline of equal stages.

        With one rank nothing is gained by cutting. Of those that can't fit they aren't sought, unless no others are
        allowed.
        """
        if group.least_seconds < inf or not group.slicings:
            exact = self.exactly_sliced(AlikeInCut(group.first, group.names, group.slicings, group.savings))
            return None if exact is None else self._group(exact)
        return None

    def exactly_sliced(self, alike: AlikeInCut) -> AlikeInCut | None:
        """Returns configurations with the best slices for a pipeline of equal stages; None where these aren't allowed,
        or are among the others."""
        first = alike.first
        allows = self.options.allows
        if first.pipeline_parallel == 1 or not allows("slicing", "exact") or not (found := self._exact(first)):
            return None
        is_known = (len(found), "equal-time") in alike.slicings
        is_known = is_known and found == self.choices.equal_time(first.degrees, first.microbatch_size, len(found))
        if not allows("num_slices", len(found)) or is_known:
            return None
        return alike._replace(slicings=[(len(found), "exact")])

    def _group(self, alike: AlikeInCut) -> PlanGroup:
        first, names, slicings, savings = alike
        bounds = self.bounds_of(alike)
        tails = [self.tails(replace(first, **chosen)).sum(axis=0) for chosen in savings.updates]
        sizes = bounds.least_bytes()
        seconds = bounds.least_seconds(np.stack(tails))
        if not bounds.cut.costs.whole_is_least:
            seconds[-1] = self.least_seconds(first)
        seconds = np.where(sizes > self.memory, inf, seconds)
        least = float(seconds[-1].min())
        return PlanGroup(first, names, slicings, savings, seconds[:-1], sizes[:-1], least)

    def bounds_of(self, alike: AlikeInCut) -> GroupBounds:
        """Returns the bounds of configurations with the same cut, with each of the slicings and with any other."""
        first, _, slicings, savings = alike
        degrees, size, cut = first.degrees, first.microbatch_size, self.cut(replace(first, context="device"))
        shapes = [replace(first, num_slices=count, slicing=slicing) for count, slicing in slicings]
        lengths = tuple(map(self.slices, shapes))
        timed = (*lengths, (self.longest,), (self.choices.least_first(degrees),))
        return GroupBounds(
            cut=cut,
            find_times=lambda: stage_times(cut, self._columns(degrees, size, timed), self.source.recomputations, ()),
            sizes=self.sizes(cut),
            source=self.source,
            num_microbatches=self.num_microbatches(first),
            updates=[self.update(replace(first, **chosen)) for chosen in savings.updates],
            splits_all=SCHEDULES[first.schedule_name].splits,
            slicings=(*lengths, ()),
            savings=savings,
        )

    def mean_state(self, mesh: Plan, at_end: bool = False) -> float:
        """Returns the least weights, gradients and optimizer state that a rank of a mesh may have, if all had as
        much; infinite where no way to save memory is allowed.

        Before the end of a step the gradients of an only microbatch may not be there."""
        has_all = at_end or self.global_batch > mesh.data_parallel * mesh.microbatch_size
        savings = Savings.tried(self.options, self.source, mesh)
        updates = {self.update(replace(mesh, **chosen)) for chosen in savings.updates}
        states = (self._state(mesh.degrees, mesh.microbatch_size, update, has_all) for update in updates)
        return min(states, default=inf) / mesh.pipeline_parallel

    def _state_bytes(self, degrees: Degrees, size: int, update: Update, has_gradients: bool) -> float:
        """Returns the weights, gradients and optimizer state of one rank with all layers; without gradients where they
        go to the host as they are made."""
        costs, layers, state = self.costs(degrees, size), range(len(self.source.kinds)), update.held
        held = costs.weight_bytes(layers, state.weights)
        if has_gradients and update.place == "device":
            held += state.gradients * costs.num_trained(layers)
        return held + state.optimizer * costs.num_optimized(layers, update)


def _allows(kind: ScheduleKind, stages: int) -> bool:
    """Returns whether ranks can have so many stages: of a schedule for any number at least two, as one is 1F1B's."""
    return stages in kind.stages_per_rank and (stages > 1 or len(kind.stages_per_rank) == 1)


def _is_dominated(kind: ScheduleKind, num_microbatches: int) -> bool:
    return kind.dominated_by is not None and num_microbatches <= kind.dominated_up_to


def _check_known(source: CostSource, options: PlanOptions) -> None:
    """Refuses choices that the model doesn't allow, or whose times the source doesn't know."""
    for choice, reason in source.refusals.items():
        fastest = [saving.fastest for saving in SAVINGS if saving.choice == choice]
        harmless = ONE_DEVICE.choice(choice), *fastest
        refused = [value for value in options.values(choice) if value not in harmless]
        if refused:
            raise SlipstreamError(f"{choice}={max(refused)} can't be planned for {source.name}. {reason}")
    if "host" in options.values("optimizer") and "parameters" in options.values("shard"):
        Plan(optimizer="host", shard="parameters").check()
    if len(tiles := options.values("loss_tokens")) > 1:
        raise SlipstreamError(f"loss_tokens={','.join(map(str, tiles))}: it isn't searched. Give one number.")
    unknown = [what for what in options.values("recompute") if what not in source.recomputations]
    if unknown:
        raise SlipstreamError(
            f"recompute={unknown[0]!r} can't be predicted for {source.hardware}: its times were not measured. Use "
            f"{' or '.join(source.recomputations)}."
        )
    for saving in SAVINGS if source.host is None else ():
        if copied := [value for value in options.values(saving.choice) if saving.copies(value)]:
            raise SlipstreamError(
                f"{saving.setting(max(copied))} can't be predicted for {source.hardware}: copies to the host were not "
                f"measured. Use {saving.number(saving.fastest)}, or plan on a described cluster."
            )


def _mesh(degrees: Degrees, pipeline: int, data: int, size: int, loss_tokens: int) -> Plan:
    """Returns a plan of which the mesh alone is decided, and what is the same on all of them."""
    return Plan(
        **degrees.choices,
        pipeline_parallel=pipeline,
        data_parallel=data,
        microbatch_size=size,
        loss_tokens=loss_tokens,
    )


@cache
def _divisors(number: int) -> tuple[int, ...]:
    return tuple(n for n in range(1, number + 1) if number % n == 0)
