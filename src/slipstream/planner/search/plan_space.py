"""The space of a plan: every configuration that divides, with the costs of its stages and its lower bounds."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache, lru_cache
from itertools import product

import numpy as np

from slipstream.array_types import Floats
from slipstream.errors import SlipstreamError
from slipstream.planner.costs import CostSource
from slipstream.planner.partition import partition_layers
from slipstream.planner.plans import Configuration
from slipstream.planner.search.plan_options import PlanOptions
from slipstream.planner.search.step_bounds import (
    ConfigurationGroup,
    PlacedPartition,
    RankSizes,
    StageTimes,
    TailSeconds,
)
from slipstream.planner.slicing import equal_time_slices
from slipstream.schedule import GENERATORS, STAGES_PER_RANK, Op, make_schedule

_STAGES_PER_RANK = (1, 2, 3, 4, 5, 6, 8, 10, 12)
_SLICES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
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
        self.kinds_of, self._attention_share = cache(self._kinds_of), cache(self._compute_attention_share)
        self._partition, self.times = cache(self._compute_partition), cache(self._compute_times)
        self.tails, self.sizes = cache(self._compute_tails), cache(self._compute_sizes)
        self._rows: dict[tuple[object, ...], Floats] = {}

    def num_microbatches(self, data: int, size: int) -> int:
        return self.global_batch // (data * size)

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

    # --- what stages cost --------------------------------------------------------------------------------------------

    def cut(self, tensor: int, size: int, pipeline: int, stages_per_rank: int, schedule: str) -> PlacedPartition:
        """Returns the partition of layers that makes the slowest rank fastest, by the time of whole sequences."""
        return self._partition(tensor, size, _placement(schedule, pipeline, stages_per_rank))

    def _compute_partition(self, tensor: int, size: int, placement: tuple[int, ...]) -> PlacedPartition:
        weights = self._layer_seconds(tensor, size)
        ranks = placement if len(weights) <= _MOST_LAYERS else None
        return PlacedPartition(placement, tuple(partition_layers(weights, len(placement), placement=ranks)))

    def _layer_seconds(self, tensor: int, size: int) -> list[float]:
        costs, num_layers = self.costs(tensor, size), len(self.source.kinds)
        length = min(self.seq_len, self.longest)
        found: dict[object, float] = {}
        for layer, kind in enumerate(self.source.kinds):
            key = (kind, layer == 0, layer == num_layers - 1)
            if key not in found:
                ops = (Op.F, Op.I, Op.W)
                found[key] = sum(float(costs.seconds(range(layer, layer + 1), op, length, 0)) for op in ops)
        return [found[kind, i == 0, i == num_layers - 1] for i, kind in enumerate(self.source.kinds)]

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
        whole, half = (
            sum(float(costs.seconds(middle, op, n, 0)) for op in (Op.F, Op.I, Op.W)) for n in (length, length // 2)
        )
        return min(1.0, max(0.0, 2 * (1 - 2 * half / whole)))

    def _compute_times(self, tensor: int, size: int, cut: PlacedPartition, count: int) -> StageTimes:
        slices = self.slices(tensor, size, count)
        rows = [self._row(tensor, size, layers, slices) for layers in cut.stages]
        table = np.stack(rows, axis=1)  # (kind of time, stage, slice)
        forward, backward, inputs, weights, forward_reduce, backward_reduce, *replays = table
        replay = dict(zip(self.source.recomputations, replays, strict=True))
        return StageTimes(
            forward, backward, inputs, weights, replay, {Op.F: forward_reduce, Op.I: backward_reduce}, slices
        )

    def _row(self, tensor: int, size: int, layers: range, slices: tuple[int, ...]) -> Floats:
        """The times of one stage: F, B, I, W, the all-reduces in F and I, and each R; equal stages share them."""
        key = (tensor, size, self.kinds_of(layers), slices)
        if key not in self._rows:
            costs = self.costs(tensor, size)
            length = np.array(slices)
            context = np.cumsum(length) - length
            rows = [costs.seconds(layers, op, length, context) for op in (Op.F, Op.B, Op.I, Op.W)]
            rows += [costs.reduce_seconds(layers, op, length) for op in (Op.F, Op.I)]
            for what in self.source.recomputations:
                nothing = what == "none"
                rows.append(0.0 * length if nothing else costs.replay_seconds(layers, what, length, context))
            self._rows[key] = np.stack([np.broadcast_to(np.asarray(row, float), length.shape) for row in rows])
        return self._rows[key]

    def _kinds_of(self, layers: range) -> tuple[object, ...]:
        """Returns a key that is equal for stages that cost the same."""
        counts = tuple(sorted(self.source.kinds[layer] for layer in layers))
        return counts, layers.start == 0, layers.stop == len(self.source.kinds)

    def _compute_tails(self, tensor: int, size: int, cut: PlacedPartition, data: int, shards: int) -> TailSeconds:
        costs = self.costs(tensor, size)
        return TailSeconds(
            cut.per_rank([costs.gradient_seconds(layers, data) for layers in cut.stages]),
            cut.per_rank([costs.optimizer_step_seconds(layers, shards) for layers in cut.stages]),
        )

    def _compute_sizes(self, tensor: int, size: int, cut: PlacedPartition) -> RankSizes:
        costs, length = self.costs(tensor, size), self.seq_len
        whole = np.array([costs.activation_bytes(g, length) for g in cut.stages])
        kept = {
            what: whole if what == "none" else np.array([costs.kept_bytes(g, what, length) for g in cut.stages])
            for what in self.source.recomputations
        }
        parameters = np.array([costs.num_parameters(g) for g in cut.stages])
        context = np.array([costs.context_bytes(g, length) for g in cut.stages])
        largest = np.zeros(cut.num_ranks)
        np.maximum.at(largest, list(cut.placement), whole)
        return RankSizes(
            parameters=cut.per_rank(parameters),
            context=cut.per_rank(context),
            kept={what: cut.per_rank(sizes) for what, sizes in kept.items()},
            largest=largest,
            of_stages=kept,
            context_of_stages=context,
            parameters_of_stages=parameters,
        )

    # --- bounds ------------------------------------------------------------------------------------------------------

    def bounded(self) -> Iterator[tuple[float, float, Configuration]]:
        """Yields (least seconds of the step, least bytes of the fullest rank, configuration) of all that divide."""
        for mesh in self.meshes():
            tensor, pipeline, data, size = mesh
            for stages_per_rank, names in self.shapes(pipeline, self.num_microbatches(data, size)):
                known: dict[tuple[PlacedPartition, int, bool], list[tuple[float, float]]] = {}
                for name, count in product(names, self.slice_counts(pipeline)):
                    cut = self.cut(tensor, size, pipeline, stages_per_rank, name)
                    key = (cut, count, name in _SPLIT)
                    if key not in known:
                        group = self._group(tensor, data, size, *key)
                        known[key] = [(group.least_seconds(*w), group.least_bytes(*w)) for w in self._savings(data)]
                    for way, (seconds, size_bound) in zip(self._savings(data), known[key], strict=True):
                        configuration = Configuration(*mesh[:3], stages_per_rank, name, size, count, *way)
                        yield seconds, size_bound, configuration

    def _group(
        self, tensor: int, data: int, size: int, cut: PlacedPartition, count: int, splits_all: bool
    ) -> ConfigurationGroup:
        return ConfigurationGroup(
            cut=cut,
            times=self.times(tensor, size, cut, count),
            sizes=self.sizes(tensor, size, cut),
            state=self.source.state,
            host=self.source.host,
            tails={shard: self.tails(tensor, size, cut, data, data if shard else 1) for shard in (True, False)},
            num_microbatches=self.num_microbatches(data, size),
            data_parallel=data,
            splits_all=splits_all,
        )

    def _savings(self, data: int) -> list[tuple[str, float, bool]]:
        """Returns the ways to save memory as (recompute, offload, shard_optimizer), those that cost nothing first."""
        recomputations = [w for w in self.source.recomputations if self.options.allows("recompute", w)]
        offloads = self.options.offload or ((0.0, 1.0) if self.source.host else (0.0,))
        shards = [s for s in ((True, False) if data > 1 else (False,)) if self.options.allows("shard_optimizer", s)]
        return list(product(recomputations, offloads, shards))


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
