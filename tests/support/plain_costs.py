"""Costs of a model's units that can be added up by hand."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from slipstream.array_types import Floats, Ints
from slipstream.schedule import Op

SHARES = {Op.F: 1.0, Op.B: 2.0, Op.I: 1.2, Op.W: 0.8}


@dataclass(frozen=True)
class PlainCosts:
    """Layers that cost their tokens, and a head of three quarters of one."""

    num_layers: int = 12
    units_per_layer: int = 1
    num_frozen_units: int = 0
    latency: float = 0.5
    bandwidth: float | None = None

    def seconds(self, op: Op, lengths: Ints, contexts: Ints) -> tuple[Floats, Floats]:
        layers = np.full(self.num_layers * self.units_per_layer, 1 / self.units_per_layer)
        return SHARES[op] * np.outer([0.01, *layers, 0.75], lengths), np.full(len(lengths), 2.0)

    def activation_bytes(self, lengths: Ints) -> tuple[Floats, Floats]:
        return np.zeros((self.num_layers * self.units_per_layer + 2, len(lengths))), np.zeros(len(lengths))

    kept_bytes = activation_bytes

    def state_bytes(self) -> Floats:
        return np.zeros(self.num_layers * self.units_per_layer + 2)

    def message_bytes(self, lengths: Ints) -> Floats:
        return np.zeros(len(lengths))

    handling_seconds = message_bytes
