"""The space of a plan: every configuration that divides, with the costs of its stages and its lower bounds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache, cached_property, lru_cache, partial
from itertools import product, starmap
from math import gcd, inf
from typing import NamedTuple

import numpy as np

from slipstream.array_types import Floats, Ints
from slipstream.cost import (
    BY_LAYER,
    EXCHANGES,
    REPLAYED,
    WITH_MESSAGES,
    AnalyticCosts,
    CostSource,
    Degrees,
    Stage,
    StageCosts,
    messages_of_stages,
    parts_of,
    unit_bounds,
)
from slipstream.errors import SlipstreamError
from slipstream.planner.joint import JointPlan
from slipstream.planner.partition import partition_layers
from slipstream.planner.plans import AUTO, Configuration
from slipstream.planner.search.bounds import (
    ConfigurationGroup,
    PlacedPartition,
    ScheduleShape,
    StageSizes,
    StageTimes,
    cached_schedule,
    with_savings,
)
from slipstream.planner.search.plan_options import PlanOptions
from slipstream.planner.slicing import equal_time_slices, slice_tokens
from slipstream.planner.slicing.equal_stage_slicing import between_cuts
from slipstream.schedule import SCHEDULES, Op, ScheduleKind, make_schedule
from slipstream.simulator.action_graph import ActionArrays

USABLE = 0.95  # of a device's memory: fragments, libraries and what isn't counted take the rest
_STAGES_PER_RANK = (1, 2, 3, 4, 5, 6, 8, 10, 12)
_COMPUTE, _EXCHANGED = (Op.F, Op.B, Op.I, Op.W), (Op.F, Op.I)
_MOST_LAYERS = 16  # of a model whose ranks, not only its stages, are balanced; with more that takes a second each


@dataclass(frozen=True)
class FoundPlan:
    """A cut, slices and an order that were found together."""

    cut: PlacedPartition
    plan: JointPlan


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


class PlanSpace:
    """The configurations of one search and their stages' costs; costs that many share are computed once."""

    def __init__(self, source: CostSource, seq_len: int, global_batch: int, options: PlanOptions) -> None:
        self.source, self.seq_len, self.global_batch, self.options = source, seq_len, global_batch, options
        _check_known(source, options)
        self.memory = USABLE * source.memory if options.memory_limit is None else options.memory_limit
        self.costs = cache(source.costs)
        self.choices = SliceChoices(source, seq_len, options, self.costs)
        self.longest = self.choices.longest
        self.alike, self._slowest = cache(self._first_alike), cache(self._find_slowest)
        self._partition, self._times = cache(self._compute_partition), cache(self._compute_times)
        self._row, self._tails, self.sizes = cache(self._compute_row), cache(self._compute_tails), cache(self._sizes)
        self._gradients = cache(self._compute_gradients)
        self._whole = cache(self._whole_seconds)
        self._alike: dict[tuple[int, ...], Stage] = {}
        self.found: dict[Configuration, FoundPlan] = {}  # by the joint search

    # --- what divides ------------------------------------------------------------------------------------------------

    def meshes(self) -> Iterator[Mesh]:
        """Yields all that divide the devices, the layers and the batch.

        Tensor parallelism stays inside of a node, or of a rack that NVLink connects, unless it is asked for.
        """
        num_devices, num_layers, allows = self.source.num_devices, len(self.source.kinds), self.options.allows
        for degrees in self._degrees():
            together = degrees.tensor * degrees.context
            for pipeline in _divisors(num_devices // together) if num_devices % together == 0 else ():
                data = num_devices // together // pipeline
                fits = pipeline <= num_layers and self.global_batch % data == 0
                fits = fits and data * degrees.context % degrees.experts == 0
                if fits and allows("pipeline_parallel", pipeline) and allows("data_parallel", data):
                    sizes = self._microbatch_sizes(self.global_batch // data)
                    meshes = (Mesh(degrees, pipeline, data, size) for size in sizes)
                    yield from (mesh for mesh in meshes if not self._shares_for_nothing(mesh))

    def _shares_for_nothing(self, mesh: Mesh) -> bool:
        """Returns whether ranks share slices of microbatches that they could have parts of instead: with more replicas
        and fewer sequences in each microbatch they would have as many tokens, and exchange less."""
        context, data, size = mesh.context_parallel, mesh.data_parallel, mesh.microbatch_size
        allows = self.options.allows
        return any(
            context // parts in self.source.context_parallel_degrees
            and allows("context_parallel", context // parts)
            and allows("data_parallel", data * parts)
            and size // parts in self._microbatch_sizes(self.global_batch // (data * parts))
            for parts in _divisors(gcd(context, size))[1:]
        )

    def _degrees(self) -> Iterator[Degrees]:
        """Yields the numbers of ranks that can share layers, slices and experts, with what they exchange."""
        source, options = self.source, self.options
        most = source.num_devices if options.tensor_parallel else source.devices_per_domain
        shared = sorted({*source.context_parallel_degrees, *(options.context_parallel or ())})  # any may gather keys
        all_of = source.tensor_parallel_degrees, shared, source.expert_parallel_degrees
        for degrees in starmap(Degrees, product(*all_of)):
            has_tokens = degrees.context == 1 or self.seq_len // degrees.context >= self.choices.least_tokens
            allowed = all(
                options.allows(f"{kind}_parallel", number)
                for kind, number in zip(("tensor", "context", "expert"), degrees[:3], strict=True)
            )
            if allowed and has_tokens and degrees.tensor <= most:
                kinds = source.exchanges(degrees.tensor, degrees.context, options.context_exchange)
                yield from (degrees._replace(exchange=each) for each in kinds)

    def _microbatch_sizes(self, sequences: int) -> list[int]:
        known = self.source.microbatch_sizes
        sizes = [size for size in _divisors(sequences) if known is None or size in known]
        return [size for size in sizes if self.options.allows("microbatch_size", size)]

    def shapes(self, pipeline: int, num_microbatches: int) -> Iterator[tuple[int, list[str]]]:
        """Yields stages per rank and the schedules that allow them; of two equal schedules only the first."""
        num_layers = len(self.source.kinds)
        for stages in self.options.stages_per_rank or _STAGES_PER_RANK:
            if pipeline * stages > num_layers or (pipeline == 1 and stages > 1):
                continue
            named = tuple(name for name in self.options.schedule or () if name != AUTO)
            found = [
                name
                for name in named or (SCHEDULES if pipeline > 1 else ("1f1b",))
                if _allows(SCHEDULES[name], stages) and (named or not _is_dominated(SCHEDULES[name], num_microbatches))
            ]
            if found:
                yield stages, found

    def slicings(self, unsliced: Configuration, may_fit: bool = True) -> list[tuple[int, str]]:
        """Returns (number of slices, slicing) for a configuration; of two equal slicings only the first.

        An exact slicing is one for a pipeline: with one rank nothing is gained by cutting. Of what can't fit it isn't
        sought, unless no other is allowed.
        """
        c, found, counts = unsliced, list[tuple[int, str]](), list[int]()
        if self.options.allows("slicing", "equal-time"):
            counts = self.choices.counts(c.pipeline_parallel, c.context_parallel)
            found = [(count, "equal-time") for count in counts]
        if c.pipeline_parallel > 1 and self.options.allows("slicing", "exact") and (may_fit or not found):
            exact = self._exact(c)
            if (
                exact
                and self.options.allows("num_slices", len(exact))
                and not (
                    len(exact) in counts and exact == self.choices.equal_time(c.degrees, c.microbatch_size, len(exact))
                )
            ):
                found.append((len(exact), "exact"))
        return found

    def shape(self, configuration: Configuration) -> ScheduleShape:
        c, number = configuration, self.num_microbatches(configuration)
        counts = c.pipeline_parallel, number, c.num_slices, c.stages_per_rank
        return ScheduleShape(c.schedule, *counts, self.cut(c).num_frozen, splits=c.recompute not in BY_LAYER)

    def num_microbatches(self, configuration: Configuration) -> int:
        """Returns the microbatches of each pipeline."""
        return self.global_batch // (configuration.data_parallel * configuration.microbatch_size)

    # --- what stages cost --------------------------------------------------------------------------------------------

    def cut(self, configuration: Configuration) -> PlacedPartition:
        """Returns the partition of layers that makes the slowest rank fastest, by the time of whole sequences.

        Where the order was found, it is the cut that was found with it.
        """
        c = configuration
        if c.schedule == AUTO:
            return self.found[c].cut
        placement = _placement(c.schedule, c.pipeline_parallel, c.stages_per_rank)
        return self._partition(c.degrees, c.microbatch_size, placement)

    def _compute_partition(self, degrees: Degrees, size: int, placement: tuple[int, ...]) -> PlacedPartition:
        costs, num_layers = self.costs(degrees, size), len(self.source.kinds)
        weights = [self._whole(degrees, size, self.alike(range(layer, layer + 1))) for layer in range(num_layers)]
        ranks = placement if num_layers <= _MOST_LAYERS else None
        partition = partition_layers(weights, len(placement), placement=ranks)
        return PlacedPartition(costs, placement, unit_bounds(partition, num_layers, self.source.units_per_layer))

    def slices(self, configuration: Configuration) -> tuple[int, ...]:
        """Returns the tokens of each slice."""
        c = configuration
        if c.schedule == AUTO:
            return self.found[c].plan.slices
        exact = self._exact(c) if c.slicing == "exact" else None
        return exact or self.choices.equal_time(c.degrees, c.microbatch_size, c.num_slices)

    def _exact(self, c: Configuration) -> tuple[int, ...] | None:
        """Returns the exact slicing for stages like the slowest one of the configuration's cut."""
        stage = self._slowest(self.cut(c))
        num_passes = self.num_microbatches(c) * c.stages_per_rank
        return self.choices.exact(c.degrees, c.microbatch_size, stage, c.pipeline_parallel, num_passes)

    def actions(self, configuration: Configuration) -> ActionArrays:
        """Returns what runs, with R, OFFLOAD and RELOAD; a named schedule's backwards are split as in a Pipeline."""
        c, replays = configuration, configuration.recompute in REPLAYED
        if c.schedule == AUTO:
            return with_savings(self.found[c].plan.schedule, replays, c.offload)
        return cached_schedule(self.shape(c), replays, c.offload)

    def _find_slowest(self, cut: PlacedPartition) -> Stage:
        length = min(self.seq_len, self.longest)
        return max(dict.fromkeys(map(self.alike, cut.stages)), key=partial(sequence_seconds, cut.costs, length))

    def _whole_seconds(self, degrees: Degrees, size: int, layers: Stage) -> float:
        """Returns the time of a whole sequence, forward and backward, or of the longest slice whose time is known."""
        return sequence_seconds(self.costs(degrees, size), min(self.seq_len, self.longest), layers)

    def times(self, configuration: Configuration) -> StageTimes:
        c = configuration
        return self._times(c.degrees, c.microbatch_size, self.cut(c), self.slices(c))

    def _compute_times(self, degrees: Degrees, size: int, cut: PlacedPartition, slices: tuple[int, ...]) -> StageTimes:
        rows = [self._row(degrees, size, self.alike(layers), slices) for layers in cut.stages]
        ends = len(_COMPUTE), len(_COMPUTE) + len(_EXCHANGED) * len(EXCHANGES)
        compute, exchanged, replay = np.split(np.stack(rows, axis=1), ends)
        handling = self.costs(degrees, size).handling_seconds(np.array(slices))
        messages = np.outer(messages_of_stages(len(cut.stages)), handling)
        return StageTimes(
            compute={op: each + (op in WITH_MESSAGES) * messages for op, each in zip(_COMPUTE, compute, strict=True)},
            replay=dict(zip(self.source.recomputations, replay, strict=True)),
            exchanged=dict(zip(_EXCHANGED, np.split(exchanged, len(_EXCHANGED)), strict=True)),
            slices=slices,
        )

    def _compute_row(self, degrees: Degrees, size: int, layers: Stage, slices: tuple[int, ...]) -> Floats:
        """Returns the times of one stage: F, B, I, W, the exchanges in F and in I, and each recomputation."""
        costs, length = self.costs(degrees, size), np.array(slices)
        context = np.cumsum(length) - length
        rows = [costs.seconds(layers, op, length, context) for op in _COMPUTE]
        rows += [each for op in _EXCHANGED for each in costs.exchange_seconds(layers, op, length)]
        for what in self.source.recomputations:
            replays = what != "none" and costs.has_backward(layers)
            rows.append(costs.replay_seconds(layers, what, length, context) if replays else 0.0)
        return np.stack([np.broadcast_to(np.asarray(row, float), length.shape) for row in rows])

    def _first_alike(self, stage: Stage) -> Stage:
        """Returns the first stage asked for that costs the same."""
        source = self.source
        own = parts_of(stage, len(source.kinds), source.units_per_layer)
        return self._alike.setdefault(tuple(sorted(source.parts[part] for part in own)), stage)

    def tails(self, configuration: Configuration) -> Floats:
        """Returns each rank's seconds that always follow its last action: of reducing the gradients of its first stage,
        of gathering weights, and of the optimizer."""
        return self._tails(self.cut(configuration), configuration.num_copies, configuration.optimizer_shards)

    def gradient_seconds(self, configuration: Configuration) -> Floats:
        """Returns the seconds in which each stage's gradients are reduced over the replicas."""
        c = configuration
        return self._gradients(self.cut(c), c.num_copies, c.optimizer_shards)

    def _compute_gradients(self, cut: PlacedPartition, copies: int, shards: int) -> Floats:
        return cut.per_stage(partial(cut.costs.gradient_seconds, copies=copies, shards=shards))

    def _compute_tails(self, cut: PlacedPartition, copies: int, shards: int) -> Floats:
        firsts = [cut.placement.index(rank) for rank in range(cut.num_ranks)]
        gathered = cut.per_stage(partial(cut.costs.gather_seconds, shards=shards))
        optimizer = cut.per_stage(partial(cut.costs.optimizer_step_seconds, shards=shards))
        gradients = self._gradients(cut, copies, shards)[firsts]
        return np.stack([gradients, cut.per_rank(gathered), cut.per_rank(optimizer)])

    def _sizes(self, cut: PlacedPartition) -> StageSizes:
        costs, length, alike = cut.costs, self.seq_len, [self.alike(stage) for stage in cut.stages]

        def per_stage(value: Callable[[Stage], float]) -> Floats:
            of_each = {stage: value(stage) for stage in dict.fromkeys(alike)}
            return np.array([of_each[stage] for stage in alike])

        kept = {
            what: per_stage(partial(costs.kept_bytes, recompute=what, length=length))
            for what in self.source.recomputations
        }
        kept["none"] = per_stage(partial(costs.activation_bytes, length=length))
        largest = np.zeros(cut.num_ranks)
        np.maximum.at(largest, list(cut.placement), kept["none"])
        context = per_stage(partial(costs.context_bytes, length=length))
        weights = per_stage(partial(costs.weight_bytes, each=self.source.state.weights))
        optimized = cache(lambda shards: per_stage(partial(costs.num_optimized, shards=shards)))
        numbers = weights, per_stage(costs.num_trained), optimized
        return StageSizes(*numbers, context, kept, largest)

    # --- bounds ------------------------------------------------------------------------------------------------------

    def bounded(self) -> Iterator[tuple[float, float, Configuration]]:
        """Yields (least seconds of the step, least bytes of the fullest rank, configuration) of all that divide."""
        for mesh in self.meshes():
            yield from self.of_mesh(mesh)

    def least_seconds(self, mesh: Mesh) -> float:
        """Returns a lower bound of the step of all configurations on a mesh: the work of whole sequences and of the
        optimizer, spread evenly over the pipeline. It is 0 where times were measured, as slices may be faster there."""
        costs, whole = self.costs(mesh.degrees, mesh.microbatch_size), range(len(self.source.kinds))
        if not isinstance(costs, AnalyticCosts):
            return 0.0
        # where keys are gathered, slices only make the last rank's attention less uneven
        excess = costs.uneven_seconds(whole, self.seq_len)
        seconds = {op: float(costs.seconds(whole, op, self.seq_len, 0)) for op in _COMPUTE}
        work = seconds[Op.F] + min(seconds[Op.B], seconds[Op.I] + seconds[Op.W])
        num_microbatches = self.global_batch // (mesh.data_parallel * mesh.microbatch_size)
        optimizer = costs.optimizer_step_seconds(whole, mesh.num_copies)
        return (max(0.0, work - excess) * num_microbatches + optimizer) / mesh.pipeline_parallel

    def of_mesh(self, mesh: Mesh) -> Iterator[tuple[float, float, Configuration]]:
        """Yields (least seconds of the step, least bytes of the fullest rank, configuration) of all on a mesh.

        What is too large has no time, 0. Where everything is, whatever the slices, no exact slicing is sought.
        """
        degrees, pipeline, data, size = mesh
        savings = self._savings(mesh)
        mean = [self._mean_state(mesh, shard) for _, _, shard in savings]
        has_room = min(mean, default=inf) <= self.memory
        for stages_per_rank, names in self.shapes(pipeline, self.global_batch // (data * size)):
            known: dict[tuple[PlacedPartition, int, str, bool], list[tuple[float, float]]] = {}
            for name in names if savings else ():
                first = degrees.tensor, pipeline, data, stages_per_rank, name, size
                others = degrees[1:]
                unsliced = Configuration(*first, 1, *savings[0], "equal-time", *others)
                fits = has_room and self._may_fit(unsliced, savings)
                for count, slicing in self.slicings(unsliced, fits):
                    alike = [Configuration(*first, count, *saving, slicing, *others) for saving in savings]
                    if not has_room:
                        yield from ((0.0, least, each) for least, each in zip(mean, alike, strict=True))
                        continue
                    key = (self.cut(alike[0]), count, slicing, SCHEDULES[name].splits)
                    if key not in known:
                        known[key] = self._bounds(alike)
                    for configuration, bounds in zip(alike, known[key], strict=True):
                        yield *bounds, configuration

    def mean_state(self, mesh: Mesh) -> float:
        """Returns the least weights, gradients and optimizer state that a rank of a mesh may have, if all had as
        much; infinite where no way to save memory is allowed."""
        shards = {each for _, _, each in self._savings(mesh)}
        return min((self._mean_state(mesh, each) for each in shards), default=inf)

    def _mean_state(self, mesh: Mesh, shard: str) -> float:
        """Returns the weights, gradients and optimizer state of a rank, if all had as much."""
        degrees, pipeline, data, size = mesh
        costs, layers = self.costs(degrees, size), range(len(self.source.kinds))
        state = self.source.state.of_shards(shard)
        gradients = state.gradients if self.global_batch > data * size else 0
        held = costs.weight_bytes(layers, state.weights) + gradients * costs.num_trained(layers)
        optimized = costs.num_optimized(layers, mesh.num_copies if shard != "none" else 1)
        return (held + state.optimizer * optimized) / pipeline

    def _may_fit(self, unsliced: Configuration, savings: list[tuple[str, float, str]]) -> bool:
        """Returns False only where each way to save memory is too little, however many slices there are."""
        group = self._group(unsliced, ())
        shapes = (replace(unsliced, recompute=r, offload=o, shard=s) for r, o, s in savings)
        return any(group.least_bytes(each) <= self.memory for each in shapes)

    def _group(self, first: Configuration, slices: tuple[int, ...]) -> ConfigurationGroup:
        cut = self.cut(first)
        of_step = self.num_microbatches(first), SCHEDULES[first.schedule].splits
        return ConfigurationGroup(cut, partial(self.times, first), self.sizes(cut), self.source, *of_step, slices)

    def _bounds(self, alike: list[Configuration]) -> list[tuple[float, float]]:
        """Returns the least seconds and bytes of configurations that differ only in how they save memory."""
        group = self._group(alike[0], self.slices(alike[0]))
        sizes = [group.least_bytes(each) for each in alike]
        return [
            (group.least_seconds(each, self.tails(each).sum(axis=0)) if size <= self.memory else 0.0, size)
            for each, size in zip(alike, sizes, strict=True)
        ]

    def _savings(self, mesh: Mesh) -> list[tuple[str, float, str]]:
        """Returns the ways to save memory as (recompute, offload, shard), those that cost nothing first.

        A run gathers sharded parameters once a step, which takes as long and holds as much as ZeRO-1 does at its
        fullest: so they are tried only where they are asked for, and where training doesn't refuse them.
        """
        recomputations = [w for w in self.source.recomputations if self.options.allows("recompute", w)]
        offloads = self.options.offload or ((0.0, 1.0) if self.source.host else (0.0,))
        shards = ["optimizer", "none"] if mesh.num_copies > 1 else ["none"]
        shards = [each for each in shards if self.options.allows("shard", each)]
        if "parameters" in (self.options.shard or ()) and mesh.num_copies > 1 and mesh.tensor_parallel == 1:
            shards.append("parameters")
        return list(product(recomputations, offloads, shards))


def _allows(kind: ScheduleKind, stages: int) -> bool:
    """Returns whether ranks can have so many stages: of a schedule for any number at least two, as one is 1F1B's."""
    return stages in kind.stages_per_rank and (stages > 1 or len(kind.stages_per_rank) == 1)


def _is_dominated(kind: ScheduleKind, num_microbatches: int) -> bool:
    return kind.dominated_by is not None and num_microbatches <= kind.dominated_up_to


_NEVER_REFUSED = (1, "none", "optimizer")  # a degree, and what may be sharded


def _check_known(source: CostSource, options: PlanOptions) -> None:
    """Refuses choices that the model doesn't allow, or whose times the source doesn't know."""
    for choice, reason in source.refusals.items():
        refused = [value for value in getattr(options, choice) or () if value not in _NEVER_REFUSED]
        if refused:
            raise SlipstreamError(f"{choice}={max(refused)} can't be planned for {source.name}. {reason}")
    unknown = [what for what in options.recompute or () if what not in source.recomputations]
    if unknown:
        raise SlipstreamError(
            f"recompute={unknown[0]!r} can't be predicted for {source.hardware}: its times were not measured. Use "
            f"{' or '.join(source.recomputations)}."
        )
    if source.host is None and any(options.offload or ()):
        raise SlipstreamError(
            f"offload={max(options.offload or ()):g} can't be predicted for {source.hardware}: copies to the host were "
            "not measured. Use 0, or plan on a described cluster."
        )


@lru_cache(maxsize=4096)
def _placement(schedule: str, pipeline: int, stages_per_rank: int) -> tuple[int, ...]:
    return make_schedule(schedule, pipeline, 1, 1, stages_per_rank).placement


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


_COUNTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
_COUNTS_OF_ONE = (1, 2, 4, 8, 16, 32)  # on a single rank, where slices save memory alone
_SHORTEST = 128  # tokens of a slice; the described devices have no times for shorter ones
_MULTIPLE = 64  # tokens; slices of so many suit matrix products
_FEWEST_CUTS, _MOST_CUTS = 64, 256  # places where an exact slicing may cut
_KEPT_TABLES = 128  # of half a megabyte: the same stages are part of many pipelines
_MOST_EXACT = 128  # slices: a schedule with more takes seconds to simulate


class SliceChoices:
    """The slicings of one search, each computed once.

    Args:
        source: the model on its hardware.
        seq_len: tokens per sequence.
        options: the choices that are allowed.
        costs: what stages cost by degrees and sequences of a microbatch.
    """

    def __init__(
        self, source: CostSource, seq_len: int, options: PlanOptions, costs: Callable[[Degrees, int], StageCosts]
    ) -> None:
        self.seq_len, self.options, self._costs, self._num_layers = seq_len, options, costs, len(source.kinds)
        self.shortest, self.longest = source.slice_range(seq_len)
        self.equal_time, self.exact = cache(self._compute_equal_time), cache(self._compute_exact)
        self._attention_share = cache(self._compute_attention_share)
        self._table = lru_cache(_KEPT_TABLES)(self._compute_table)

    def counts(self, pipeline: int, context: int = 1) -> list[int]:
        """Returns the numbers of slices that take equal time, each of whose `context` parts is long enough."""
        most = self.seq_len // (context * self.least_tokens)
        counts = self.options.num_slices or (_COUNTS if pipeline > 1 else _COUNTS_OF_ONE)
        found = [n for n in counts if n <= most and self.seq_len / n <= self.longest]
        if not found and self.options.num_slices is None:
            return [-(-self.seq_len // self.longest)]
        return found

    @property
    def least_tokens(self) -> int:
        """The tokens that a rank has at least of a slice."""
        return max(self.shortest, min(_SHORTEST, max(1, self.seq_len // 8)))

    def _compute_equal_time(self, degrees: Degrees, size: int, count: int) -> tuple[int, ...]:
        """Returns slice lengths that take equal time, in multiples that suit matrix products."""
        granularity = max(1, min(_MULTIPLE, self.seq_len // (4 * count)))
        found = equal_time_slices(self.seq_len, count, self._attention_share(degrees, size), granularity)
        if min(found) < self.shortest or max(found) > self.longest:
            found = equal_time_slices(self.seq_len, count, 0.0)
        return found

    def _compute_attention_share(self, degrees: Degrees, size: int) -> float:
        """Returns A of t(x T) = t(T) ((1-A) x + A x²), from a layer's times of T and T/2 tokens."""
        costs, length = self._costs(degrees, size), min(self.seq_len, self.longest)
        middle = range(self._num_layers // 2, self._num_layers // 2 + 1)
        whole, half = (sequence_seconds(costs, tokens, middle) for tokens in (length, length // 2))
        return min(1.0, max(0.0, 2 * (1 - 2 * half / whole)))

    def _compute_exact(
        self, degrees: Degrees, size: int, stage: Stage, num_ranks: int, num_passes: int
    ) -> tuple[int, ...] | None:
        """Returns the slices with the least latency if all stages are like `stage`; None where none is allowed.

        The pipeline is filled once, by a slice on each rank (TeraPipe, Eq. 5). In all, a rank runs `num_passes` whole
        sequences of microbatches through one stage: as many as its microbatches times its stages.
        """
        # of slices that take equal time the last ones may also be half as long as the mean
        own = degrees.context * self.least_tokens
        least = max(self.shortest, own // 2, self.seq_len // _MOST_EXACT)
        forward, backward = (partial(self._slice_seconds, degrees, size, stage, op) for op in (Op.F, Op.B))
        between = self.granularity
        try:
            found = slice_tokens(
                forward, self.seq_len, num_ranks, between, least, backward=backward, num_microbatches=num_passes
            )
        except SlipstreamError:  # no slices that end at these places are as long as those whose times are known
            return None
        return found.slices

    def _slice_seconds(self, degrees: Degrees, size: int, stage: Stage, op: Op, length: Ints, context: Ints) -> Floats:
        end = -(-(context + length) // self.granularity)
        found: Floats = self._table(degrees, size, stage, op)[end, context // self.granularity]
        return found

    def _compute_table(self, degrees: Degrees, size: int, stage: Stage, op: Op) -> Floats:
        """Returns the seconds of the slice between any two places to cut, [end, start]; infinite where not known."""

        def seconds(lengths: Ints, contexts: Ints) -> Floats:
            found = self._costs(degrees, size).seconds(stage, op, np.minimum(lengths, self.longest), contexts)
            return np.where(lengths > self.longest, np.inf, found)

        return between_cuts(self.seq_len, self.granularity, seconds, np.inf)

    @cached_property
    def granularity(self) -> int:
        """The tokens between two places to cut: multiples that suit matrix products, unless the sequence is short."""
        least = -(-self.seq_len // _MOST_CUTS)
        if least <= _MULTIPLE:
            return max(least, min(_MULTIPLE, self.seq_len // _FEWEST_CUTS))
        return -(-least // _MULTIPLE) * _MULTIPLE


def sequence_seconds(costs: StageCosts, length: int, layers: Stage) -> float:
    """Returns the time of a whole sequence, forward and backward."""
    return sum(float(costs.seconds(layers, op, length, 0)) for op in (Op.F, Op.I, Op.W))
