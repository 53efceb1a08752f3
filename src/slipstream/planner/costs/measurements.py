"""What a profile consists of: where and of which model it was measured, stages with their fits, and the link."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from slipstream.planner.costs.time_fit import SlicePoint, TimeFit
from slipstream.schedule import Op


@dataclass(frozen=True)
class Hardware:
    """What the times depend on beside the model."""

    device: str  # "cpu" or the GPU's name
    cpu: str
    cores: int
    threads: int  # of a process
    processes: int  # that measured side by side, as the ranks of a pipeline compute


@dataclass(frozen=True)
class ModelIdentity:
    """Which model: shapes that people know, and a hash of everything its configuration says."""

    model_type: str
    num_layers: int
    hidden_size: int
    vocab_size: int
    config_hash: str


@dataclass(frozen=True)
class Measurement:
    """An op of a measured stage on one (slice length, context)."""

    length: int
    context: int
    seconds: float  # median
    spread: float  # between the quartiles, over the median
    held_out: bool  # not used in the fit


@dataclass(frozen=True)
class MeasuredStage:
    """A stage of one or two layers: its fits and the points behind them, and its bytes."""

    first: int
    last: int  # layer, the stage's own
    fits: dict[Op, TimeFit]
    points: dict[Op, tuple[Measurement, ...]]
    activation_bytes: tuple[tuple[int, int], ...]  # (slice length, bytes)
    context_bytes: int  # of keys and values, per token of the sequence
    context_gradient_bytes: int  # of their gradients, likewise
    num_parameters: int

    @property
    def layers(self) -> range:
        """The layers it owns."""
        return range(self.first, self.last + 1)

    def activation_bytes_at(self, length: int) -> float:
        """What a slice's F leaves for its backward; between measured lengths, the straight line."""
        lengths, sizes = (list(column) for column in zip(*self.activation_bytes, strict=True))
        return float(np.interp(length, lengths, sizes))

    def errors(self, op: Op, held_out: bool) -> dict[SlicePoint, float]:
        """The fit's relative error at the points used for it, or at those that were not."""
        chosen = [point for point in self.points[op] if point.held_out is held_out]
        fit = self.fits[op]
        return {(p.length, p.context): abs(fit(p.length, p.context) - p.seconds) / p.seconds for p in chosen}


@dataclass(frozen=True)
class MeasuredLink:
    """What a message between two ranks costs: latency + bytes / bandwidth, and the measurements behind it."""

    latency: float  # seconds
    bandwidth: float  # bytes per second
    backend: str
    points: tuple[tuple[int, float], ...]  # (bytes, seconds)
