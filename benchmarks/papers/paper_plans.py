"""A paper's configuration as `slipstream plan` sees it: the planner's space, costs, simulator and account of memory.

Only what the papers' systems do and Slipstream doesn't is set here: attention without a fused kernel, float16
gradients, as many layers in each stage, the paper's slices, whole backwards, recomputation of every slice, and messages
without scatter/gather.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import cache, cached_property
from typing import Any

import numpy as np

from slipstream.array_types import Floats
from slipstream.cost import (
    Cluster,
    CountedCosts,
    CountedSource,
    Degrees,
    ModelCount,
    OpCount,
    PartCount,
    Stage,
    StageParts,
    System,
    Update,
    Work,
)
from slipstream.cost.cluster_links import ClusterCost
from slipstream.planner.plan import Plan
from slipstream.planner.search.placed_partition import PlacedPartition
from slipstream.planner.search.plan_options import PlanOptions
from slipstream.planner.search.plan_space import PlanSpace

PAPERS = System("the papers'", writes_scores=True, whole_backwards=True)


@dataclass(frozen=True)
class LayersAlone(ModelCount):
    """A model without embedding and head, whose stages are all alike."""

    def counted(self, stage: Stage) -> tuple[tuple[int, PartCount], ...]:
        return tuple((number, part) for number, part in super().counted(stage) if part.attentions)

    @classmethod
    def of(cls, model: ModelCount) -> LayersAlone:
        return cls(**{each.name: getattr(model, each.name) for each in fields(model)})


@dataclass(frozen=True)
class PaperCosts(CountedCosts):
    """Costs where replicas reduce their gradients in float16, Slipstream's are float32; and where one fitted share of
    the peak stands for all that products take, unless reading takes longer."""

    system: System = PAPERS

    def _rows(self, value: Callable[[PartCount], Any], work: Work) -> Floats:
        return super()._rows(lambda part: value(part) if self._is_there(part) else 0.0, work)

    def _each(self, value: Callable[[PartCount], float]) -> Floats:
        return super()._each(lambda part: value(part) if self._is_there(part) else 0.0)

    def _is_there(self, part: PartCount) -> bool:
        return bool(part.attentions) or not isinstance(self.model, LayersAlone)

    def product_seconds(self, part: PartCount, count: OpCount, tokens: Any) -> Any:
        device, t = self.cluster.device, self.degrees.tensor
        read = count.matmul_bytes.at(tokens) / t / device.bytes_per_second
        return np.maximum(count.flops.at(tokens) / t / device.matmul_flops(self.model.dtype), read)

    def gradient_seconds(self, layers: Stage, update: Update) -> float:
        num_bytes = self.model.dtype_bytes * self.num_parameters(layers)
        return float(self.cluster.all_reduce_seconds(num_bytes, update.copies, self.replica_stride))

    @property
    def replica_stride(self) -> int:
        """The devices between a rank and the same one of the next replica."""
        return self.degrees.tensor


@dataclass(frozen=True, kw_only=True)
class UnscatteredCost(ClusterCost):
    """Messages that every tensor-parallel rank sends whole, and that nobody gathers (PTD-P Figure 9a)."""

    @cached_property
    def byte_seconds(self) -> Mapping[bool, float]:
        senders = min(self.stride, self.cluster.devices_per_node)
        return {True: 1 / self.cluster.inside.rate(senders), False: 1 / self.cluster.between.rate(senders)}


class UnscatteredCosts(PaperCosts):
    """Costs of pipelines without scatter/gather."""

    def action_costs(self, *args: Any, **options: Any) -> ClusterCost:
        return UnscatteredCost(**vars(super().action_costs(*args, **options)))


class PaperSource(CountedSource):
    """A model on a described cluster, with costs of the papers' time.

    Args:
        costs: (model, cluster, degrees, sequences of a microbatch) -> what stages cost.
    """

    def __init__(self, model: ModelCount, cluster: Cluster, costs: Callable[..., CountedCosts] = PaperCosts) -> None:
        super().__init__(model, cluster, "a paper's model", system=PAPERS)
        self._costs = costs

    def costs(self, degrees: Degrees, microbatch_size: int) -> CountedCosts:
        return self._costs(self.model, self.cluster, Degrees(degrees.tensor), microbatch_size)


class PaperSpace(PlanSpace):
    """The planner's space, with as many layers in each stage and, where they are given, a paper's slices."""

    def __init__(
        self,
        source: PaperSource,
        seq_len: int,
        global_batch: int,
        options: PlanOptions | None = None,
        slices: tuple[int, ...] | None = None,
    ) -> None:
        super().__init__(source, seq_len, global_batch, options or PlanOptions())
        self._given_slices, self._equal_layers = slices, cache(self._cut_equally)

    def cut(self, plan: Plan) -> PlacedPartition:
        return self._equal_layers(plan.degrees, plan.microbatch_size, plan.pipeline_parallel, plan.stages_per_rank)

    def _cut_equally(self, degrees: Degrees, size: int, pipeline: int, stages_per_rank: int) -> PlacedPartition:
        num_stages = pipeline * stages_per_rank
        layers = len(self.source.kinds) // num_stages
        placement = tuple(stage % pipeline for stage in range(num_stages))
        stages = StageParts.of_partition((layers,) * num_stages, len(self.source.kinds), self.source.units_per_layer)
        return PlacedPartition(
            self.costs(degrees, size), placement, (*(stage.start for stage in stages), stages[-1].stop)
        )

    def slices(self, plan: Plan) -> tuple[int, ...]:
        return self._given_slices or super().slices(plan)
