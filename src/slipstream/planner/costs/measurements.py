"""The parts of a profile: its hardware and model, the measured stages with their fits, and the link."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from slipstream.planner.costs.action_bytes import ActionBytes
from slipstream.planner.costs.time_fit import SlicePoint, TimeFit
from slipstream.schedule import Op


@dataclass(frozen=True)
class Hardware:
    """The hardware on which the times were measured."""

    device: str  # "cpu" or the GPU's name
    cpu: str
    cores: int
    threads: int  # of a process
    processes: int  # that measured at the same time, as the ranks of a pipeline compute


@dataclass(frozen=True)
class ModelIdentity:
    """The model: its main sizes, and a hash of its whole configuration."""

    model_type: str
    num_layers: int
    hidden_size: int
    vocab_size: int
    config_hash: str


@dataclass(frozen=True)
class Measurement:
    """The time of an op of a measured stage at one (slice length, context)."""

    length: int
    context: int
    seconds: float  # median
    spread: float  # the difference of the quartiles over the median
    held_out: bool  # not used in the fit


@dataclass(frozen=True)
class MeasuredStage:
    """A measured stage of some parts of the model: its fits, the points behind them, and its bytes."""

    first: int  # part: 0 is the embedding
    last: int  # the number of its last part, which belongs to it
    fits: dict[Op, TimeFit]
    points: dict[Op, tuple[Measurement, ...]]
    activation_bytes: tuple[tuple[int, int], ...]  # (slice length, bytes)
    context_bytes: int  # keys and values, per token of the sequence
    context_gradient_bytes: int  # their gradients, per token of the sequence
    num_parameters: int
    actions: tuple[tuple[int, ActionBytes], ...] = ()  # (slice length, bytes); empty in profiles of older versions

    @property
    def parts(self) -> range:
        """The numbers of the stage's parts, as `slipstream.planner.costs.stage_basis` counts them."""
        return range(self.first, self.last + 1)

    def activation_bytes_at(self, length: Any) -> Any:
        """Returns what a slice's F keeps for its backward, interpolated linearly between the measured lengths."""
        return np.interp(length, *np.transpose(self.activation_bytes))

    def action_bytes_at(self, length: int) -> ActionBytes:
        """Returns the bytes of the actions on a slice, interpolated linearly between the measured lengths."""
        lengths, measured = zip(*self.actions, strict=True)
        at = partial(np.interp, length, lengths)
        return ActionBytes(
            kept=float(at([each.kept for each in measured])),
            deferred=float(at([each.deferred for each in measured])),
            peaks={op: float(at([each.peaks[op] for each in measured])) for op in measured[0].peaks},
        )

    def errors(self, op: Op, held_out: bool) -> dict[SlicePoint, float]:
        """Returns the fit's relative error at the points held out, or at those it was fitted to."""
        chosen = {(p.length, p.context): p.seconds for p in self.points[op] if p.held_out is held_out}
        return {point: abs(self.fits[op](*point) - seconds) / seconds for point, seconds in chosen.items()}


@dataclass(frozen=True)
class MeasuredLink:
    """The time of a message between two ranks, latency + bytes / bandwidth, and the measurements behind it."""

    latency: float  # seconds
    bandwidth: float  # bytes per second
    backend: str
    points: tuple[tuple[int, float], ...]  # (bytes, seconds)
    handling: tuple[tuple[int, float], ...] = ()  # (bytes, seconds); empty in profiles of older versions

    def handling_seconds(self, num_bytes: Any) -> Any:
        """Returns the seconds for which sending or receiving a message keeps a rank from computing, 0 if unknown."""
        if not self.handling:
            return 0.0 * np.asarray(num_bytes)
        longest, most = self.handling[-1]
        further = np.asarray(num_bytes) * (most / longest)
        return np.maximum(np.interp(num_bytes, *np.transpose(self.handling)), further)
