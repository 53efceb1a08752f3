"""The space of a plan: every configuration that divides, with the costs of its stages and its lower bounds."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache, lru_cache, partial
from itertools import product

import numpy as np

from slipstream.array_types import Floats
from slipstream.errors import SlipstreamError
from slipstream.planner.costs import CostSource, StageCosts
from slipstream.planner.partition import partition_layers
from slipstream.planner.plans import Configuration
from slipstream.planner.search.plan_options import PlanOptions
from slipstream.planner.search.schedule_cache import ScheduleShape
from slipstream.planner.search.step_bounds import (
    ConfigurationGroup,
    PlacedPartition,
    StageSizes,
    StageTimes,
)
from slipstream.planner.slicing import equal_time_slices
from slipstream.schedule import GENERATORS, STAGES_PER_RANK, Op, make_schedule

_STAGES_PER_RANK = (1, 2, 3, 4, 5, 6, 8, 10, 12)
_SLICES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
_COMPUTE, _REDUCE = (Op.F, Op.B, Op.I, Op.W), (Op.F, Op.I)
_SHORTEST = 128  # tokens of a slice; the described devices have no times for shorter ones
_MOST_TENSOR_PARALLEL_NODES = 2
_MOST_LAYERS = 16  # of a model whose ranks, not only its stages, are balanced; with more that takes a second each
_SPLIT = ("zb-h1", "zb-h2", "zb-v", "v-half", "v-min")  # all their backwards are I and W
_SCHEDULES = tuple(name for name in GENERATORS if name != "gpipe")  # 1f1b is as fast and takes less memory


class PlanSpace:
    """The configurations of one search and their stages' costs; costs that many share are computed once."""

    def __init__(self, source: CostSource, seq_len: int, global_batch: int, options: PlanOptions) -> None:
        self.source, self.seq_len, self.global_batch, self.options = source, seq_len, global_batch, options
        _check_known(source, options)
        self.memory = source.memory if options.memory_limit is None else options.memory_limit
        self.shortest, self.longest = source.slice_range(seq_len)
        self.costs = cache(source.costs)
        self.alike, self._attention_share = cache(self._first_alike), cache(self._compute_attention_share)
        self._partition, self._times = cache(self._compute_partition), cache(self._compute_times)
        self._row, self._tails, self.sizes = cache(self._compute_row), cache(self._compute_tails), cache(self._sizes)
        self._alike: dict[object, range] = {}

    # --- what divides ------------------------------------------------------------------------------------------------

    def meshes(self) -> Iterator[tuple[int, int, int, int]]:
        """Yields (tensor-parallel, pipeline-parallel, data-parallel degree, sequences of a microbatch)."""
        num_devices, num_layers = self.source.num_devices, len(self.source.kinds)
        most = _MOST_TENSOR_PARALLEL_NODES * self.source.devices_per_node
        for tensor in self.source.tensor_parallel_degrees:
            if num_devices % tensor or tensor > most or not self.options.allows("tensor_parallel", tensor):
                continue
            for pipeline in _divisors(num_devices // tensor):
                data = num_devices // tensor // pipeline
                fits = pipeline <= num_layers and self.global_batch % data == 0
                allowed = self.options.allows("pipeline_parallel", pipeline)
                if fits and allowed and self.options.allows("data_parallel", data):
                    for size in self._microbatch_sizes(self.global_batch // data):
                        yield tensor, pipeline, data, size

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
            names = self.options.schedule or (_SCHEDULES if pipeline > 1 else ("1f1b",))
            found = [name for name in names if stages in STAGES_PER_RANK[name]]
            found = [name for name in found if stages > 1 or ("interleaved" not in name and name != "breadth-first")]
            if num_microbatches == 1 and "interleaved-1f1b" in found:
                found = [name for name in found if name != "breadth-first"]
            if found:
                yield stages, found

    def slice_counts(self, pipeline: int) -> list[int]:
        if pipeline == 1 and self.options.num_slices is None:
            return [1] if self.seq_len <= self.longest else [-(-self.seq_len // self.longest)]
        shortest = max(self.shortest, min(_SHORTEST, max(1, self.seq_len // 8)))
        most = self.seq_len // shortest
        return [n for n in self.options.num_slices or _SLICES if n <= most and self.seq_len / n <= self.longest]

    def shape(self, configuration: Configuration) -> ScheduleShape:
        c = configuration
        num_microbatches = self.global_batch // (c.data_parallel * c.microbatch_size)
        return ScheduleShape(c.schedule, c.pipeline_parallel, num_microbatches, c.num_slices, c.stages_per_rank)

    # --- what stages cost --------------------------------------------------------------------------------------------

    def cut(self, configuration: Configuration) -> PlacedPartition:
        """Returns the partition of layers that makes the slowest rank fastest, by the time of whole sequences."""
        c = configuration
        placement = _placement(c.schedule, c.pipeline_parallel, c.stages_per_rank)
        return self._partition(c.tensor_parallel, c.microbatch_size, placement)

    def _compute_partition(self, tensor: int, size: int, placement: tuple[int, ...]) -> PlacedPartition:
        costs, num_layers = self.costs(tensor, size), len(self.source.kinds)
        seconds = cache(partial(_sequence_seconds, costs, min(self.seq_len, self.longest)))
        weights = [seconds(self.alike(range(layer, layer + 1))) for layer in range(num_layers)]
        ranks = placement if num_layers <= _MOST_LAYERS else None
        return PlacedPartition(costs, placement, tuple(partition_layers(weights, len(placement), placement=ranks)))

    def slices(self, tensor: int, size: int, count: int) -> tuple[int, ...]:
        """Returns slice lengths that take equal time, in multiples that suit matrix products."""
        granularity = max(1, min(64, self.seq_len // (4 * count)))
        found = equal_time_slices(self.seq_len, count, self._attention_share(tensor, size), granularity)
        if min(found) < self.shortest or max(found) > self.longest:
            found = equal_time_slices(self.seq_len, count, 0.0)
        return found

    def _compute_attention_share(self, tensor: int, size: int) -> float:
        """Returns A of t(x T) = t(T) ((1-A) x + A x²), from a layer's times of T and T/2 tokens."""
        costs, length = self.costs(tensor, size), min(self.seq_len, self.longest)
        middle = range(len(self.source.kinds) // 2, len(self.source.kinds) // 2 + 1)
        whole, half = (_sequence_seconds(costs, tokens, middle) for tokens in (length, length // 2))
        return min(1.0, max(0.0, 2 * (1 - 2 * half / whole)))

    def times(self, configuration: Configuration) -> StageTimes:
        c = configuration
        return self._times(c.tensor_parallel, c.microbatch_size, self.cut(c), c.num_slices)

    def _compute_times(self, tensor: int, size: int, cut: PlacedPartition, count: int) -> StageTimes:
        slices = self.slices(tensor, size, count)
        rows = [self._row(tensor, size, self.alike(layers), slices) for layers in cut.stages]
        compute, reduce, replay = np.split(np.stack(rows, axis=1), (len(_COMPUTE), len(_COMPUTE) + len(_REDUCE)))
        return StageTimes(
            compute=dict(zip(_COMPUTE, compute, strict=True)),
            replay=dict(zip(self.source.recomputations, replay, strict=True)),
            reduce=dict(zip(_REDUCE, reduce, strict=True)),
            slices=slices,
        )

    def _compute_row(self, tensor: int, size: int, layers: range, slices: tuple[int, ...]) -> Floats:
        """Returns the times of one stage: F, B, I, W, the all-reduces in F and I, and each R."""
        costs, length = self.costs(tensor, size), np.array(slices)
        context = np.cumsum(length) - length
        rows = [costs.seconds(layers, op, length, context) for op in _COMPUTE]
        rows += [costs.reduce_seconds(layers, op, length) for op in _REDUCE]
        for what in self.source.recomputations:
            rows.append(0.0 if what == "none" else costs.replay_seconds(layers, what, length, context))
        return np.stack([np.broadcast_to(np.asarray(row, float), length.shape) for row in rows])

    def _first_alike(self, layers: range) -> range:
        """Returns the first stage asked for that costs the same."""
        kinds = tuple(sorted(self.source.kinds[layer] for layer in layers))
        return self._alike.setdefault((kinds, layers.start == 0, layers.stop == len(self.source.kinds)), layers)

    def tails(self, configuration: Configuration) -> Floats:
        """Returns each rank's seconds after its last action, of gradients between replicas and of the optimizer."""
        return self._tails(self.cut(configuration), configuration.data_parallel, configuration.optimizer_shards)

    def _compute_tails(self, cut: PlacedPartition, data: int, shards: int) -> Floats:
        gradients = cut.per_stage(partial(cut.costs.gradient_seconds, data_parallel=data))
        optimizer = cut.per_stage(partial(cut.costs.optimizer_step_seconds, shards=shards))
        return np.stack([cut.per_rank(gradients), cut.per_rank(optimizer)])

    def _sizes(self, cut: PlacedPartition) -> StageSizes:
        costs, length = cut.costs, self.seq_len
        kept = {
            what: cut.per_stage(partial(costs.kept_bytes, recompute=what, length=length))
            for what in self.source.recomputations
        }
        kept["none"] = cut.per_stage(partial(costs.activation_bytes, length=length))
        largest = np.zeros(cut.num_ranks)
        np.maximum.at(largest, list(cut.placement), kept["none"])
        context = cut.per_stage(partial(costs.context_bytes, length=length))
        return StageSizes(cut.per_stage(costs.num_parameters), context, kept, largest)

    # --- bounds ------------------------------------------------------------------------------------------------------

    def bounded(self) -> Iterator[tuple[float, float, Configuration]]:
        """Yields (least seconds of the step, least bytes of the fullest rank, configuration) of all that divide."""
        for tensor, pipeline, data, size in self.meshes():
            for stages_per_rank, names in self.shapes(pipeline, self.global_batch // (data * size)):
                known: dict[tuple[PlacedPartition, int, bool], list[tuple[float, float]]] = {}
                for name, count in product(names, self.slice_counts(pipeline)):
                    choices = (tensor, pipeline, data, stages_per_rank, name, size, count)
                    alike = [Configuration(*choices, *saving) for saving in self._savings(data)]
                    key = (self.cut(alike[0]), count, name in _SPLIT)
                    if key not in known:
                        known[key] = self._bounds(alike)
                    for configuration, bounds in zip(alike, known[key], strict=True):
                        yield *bounds, configuration

    def _bounds(self, alike: list[Configuration]) -> list[tuple[float, float]]:
        """Returns the least seconds and bytes of configurations that differ only in how they save memory."""
        first, cut = alike[0], self.cut(alike[0])
        num_microbatches, splits_all = self.shape(first).num_microbatches, first.schedule in _SPLIT
        group = ConfigurationGroup(cut, self.times(first), self.sizes(cut), self.source, num_microbatches, splits_all)
        return [(group.least_seconds(each, self.tails(each).sum(axis=0)), group.least_bytes(each)) for each in alike]

    def _savings(self, data: int) -> list[tuple[str, float, bool]]:
        """Returns the ways to save memory as (recompute, offload, shard_optimizer), those that cost nothing first."""
        recomputations = [w for w in self.source.recomputations if self.options.allows("recompute", w)]
        offloads = self.options.offload or ((0.0, 1.0) if self.source.host else (0.0,))
        shards = [s for s in ((True, False) if data > 1 else (False,)) if self.options.allows("shard_optimizer", s)]
        return list(product(recomputations, offloads, shards))


def _sequence_seconds(costs: StageCosts, length: int, layers: range) -> float:
    """Returns the time of a whole sequence, forward and backward."""
    return sum(float(costs.seconds(layers, op, length, 0)) for op in (Op.F, Op.I, Op.W))


def _check_known(source: CostSource, options: PlanOptions) -> None:
    """Refuses choices whose times the source doesn't know."""
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
