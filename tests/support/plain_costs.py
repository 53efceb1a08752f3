"""Costs of a model's units that can be added up by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from slipstream.array_types import Floats
from slipstream.cost import Costs, LinkTime, Work
from slipstream.schedule import Op

SHARES = {Op.F: 1.0, Op.B: 2.0, Op.I: 1.2, Op.W: 0.8}


@dataclass(frozen=True)
class PlainCosts(Costs):
    """Layers that cost their tokens, and a head of three quarters of one."""

    num_layers: int = 12
    units_per_layer: int = 1
    latency: float = 0.5

    @property
    def parts(self) -> Sequence[int]:
        return (1, *[0] * self.num_layers * self.units_per_layer, 2)

    def link(self, num_ranks: int, replicas: int = 1) -> LinkTime:
        return LinkTime(self.latency)

    def each_seconds(self, work: Work) -> Floats:
        return SHARES[work.op] * np.outer([1 / self.units_per_layer, 0.01, 0.75], work.lengths)

    def fixed_seconds(self, work: Work) -> Floats:
        return np.full(len(work.lengths), 2.0)
