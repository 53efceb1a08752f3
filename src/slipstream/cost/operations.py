"""Costs by counted operations alone: each operation of a product takes one unit of time, and nothing else takes any.

They are alike on every machine, and in proportion to what a step computes. So they compare plans and balance cuts where
no speeds are known.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from slipstream.array_types import Floats
from slipstream.cost.costs import NO_LINK, LinkTime
from slipstream.cost.counted_parts import CountedParts
from slipstream.cost.operation_counts import ModelCount, PartCount
from slipstream.cost.work import Work
from slipstream.options import UNSHARED, Degrees
from slipstream.schedule import BACKWARDS, Op


@dataclass(frozen=True)
class CountedOperations(CountedParts):
    """The operations of a counted model's parts on one rank, as if each took a second; arguments are those of
    `CountedCosts`."""

    model: ModelCount
    degrees: Degrees = UNSHARED
    microbatch_size: int = 1
    sequence_parallel: bool = False

    def each_seconds(self, work: Work) -> Floats:
        return self._rows(lambda part: self._part_operations(part, *work), work)

    def _part_operations(self, part: PartCount, op: Op, length: Any, context: Any) -> Any:
        if op in BACKWARDS and not part.has_backward:
            return 0.0
        if op is Op.B:
            return sum(self._part_operations(part, half, length, context) for half in (Op.I, Op.W))
        op = Op.F if op is Op.R else op
        calls = [call for call in part.attentions if op is Op.F or (op is Op.I and call.has_gradient)]
        scores = sum(self.sharing.score_operations(call, op, length, context) for call in calls)
        return self.sharing.flops(part.ops[op], self.sharing.tokens(length)) + scores

    def each_selective_replay(self, work: Work) -> Floats:
        return self._rows(lambda part: 0.0, work)

    def link(self, num_ranks: int, replicas: int = 1) -> LinkTime:
        return NO_LINK
