"""What the actions of a pipeline cost, from what its stages cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, product
from typing import Any, Protocol, TypeVar

import numpy as np

from slipstream.array_types import Ints
from slipstream.errors import SlipstreamError
from slipstream.planner.costs.stage_basis import StageParts, check_partition
from slipstream.schedule import Op
from slipstream.simulator import TableCost


@dataclass(frozen=True)
class ActionBytes:
    """The bytes of a stage's actions on a slice. Messages, keys and values, and weight gradients are counted apart.

    Args:
        kept: what F keeps for the backward.
        deferred: what I leaves for W, output gradients among it, less what it frees of what F kept.
        peaks: the most that F holds above what it keeps, and B, I and W above what was there before.
        alone: the most that F holds where it keeps nothing.
    """

    kept: float
    deferred: float
    peaks: Mapping[Op, float]
    alone: float = 0.0

    @classmethod
    def estimated(cls, kept: float, made: float, num_layers: int) -> ActionBytes:
        """Returns the bytes where only those that F keeps are known, and those that a backward makes before it frees
        any: W needs all that F kept, and a layer's F holds what it would keep."""
        return cls(kept, 0.0, {Op.F: 0.0, Op.B: made, Op.I: made, Op.W: 0.0}, kept / num_layers)


OPS = (Op.F, Op.B, Op.I, Op.W)  # the ops that have times of their own; R takes as long as F
WITH_MESSAGES = (Op.F, Op.B, Op.I)  # the ops whose inputs and results travel between stages
_Table = TypeVar("_Table", bound=TableCost, covariant=True)


class _StageCosts(Protocol[_Table]):
    """What stages cost: `AnalyticCosts` or `Profile`."""

    def seconds(self, layers: StageParts, op: Op, length: Any, context: Any) -> Any: ...

    def activation_bytes(self, layers: StageParts, length: int) -> float: ...

    def kept_bytes(self, layers: StageParts, recompute: str, length: int) -> float: ...

    def handling_seconds(self, length: Any) -> Any: ...

    def action_costs(self, times: Mapping[tuple[int, int, Op], float], slices: Sequence[int]) -> _Table: ...


def messages_of_stages(num_stages: int) -> Ints:
    """Returns how many messages F, and B or I, of each stage takes and sends."""
    ends = np.arange(num_stages)
    found: Ints = 0 + (ends > 0) + (ends < num_stages - 1)
    return found


def pipeline_costs(
    costs: _StageCosts[_Table], num_layers: int, units_per_layer: int, partition: Sequence[float], slices: Sequence[int]
) -> _Table:
    """Returns the simulator's costs of a pipeline: times and activations of every stage and slice, and messages.

    Args:
        costs: of any stage.
        num_layers: of the model.
        units_per_layer: 2 where its layers can be cut in half, else 1.
        partition: layers of each stage, perhaps with halves; 0 for an end of the model alone.
        slices: tokens of each slice.

    Raises:
        SlipstreamError: where the layers don't add up to the model's, a slice is empty, or its time is unknown.
    """
    check_partition(partition, num_layers, units_per_layer)
    if min(slices, default=0) < 1:
        raise SlipstreamError(f"slices={list(slices)}: give at least one, each of 1 token or more.")
    times: dict[tuple[int, int, Op], float] = {}
    activations, kept = dict[tuple[int, int], float](), dict[tuple[int, int], float]()
    stages = StageParts.of_partition(partition, num_layers, units_per_layer)
    contexts = accumulate(slices[:-1], initial=0)
    places = enumerate(zip(slices, contexts, strict=True))
    for (stage, layers), (index, (length, context)) in product(enumerate(stages), places):
        handled = float(costs.handling_seconds(length)) * messages_of_stages(len(stages))[stage]
        for op in (*OPS, Op.R):
            times[stage, index, op] = float(costs.seconds(layers, op, length, context))
            times[stage, index, op] += handled if op in WITH_MESSAGES else 0.0
        activations[stage, index] = float(costs.activation_bytes(layers, length))
        kept[stage, index] = float(costs.kept_bytes(layers, "full", length))
    return replace(costs.action_costs(times, slices), activations=activations, kept=kept)
