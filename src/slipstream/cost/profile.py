"""A profile: the measured costs of a model's parts on one kind of hardware, from which those of any stage follow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from slipstream.array_types import Floats
from slipstream.cost.action_bytes import ActionBytes
from slipstream.cost.fit import FittedTime, SlicePoint, TimeFit
from slipstream.cost.measured_stages import combine, stage_row
from slipstream.cost.work import OPS, Stage, layer_of, part_kinds, parts_of, unit_names
from slipstream.errors import SlipstreamError, did_you_mean
from slipstream.foreign_text import parse_json, read_text
from slipstream.options import UNSHARED, Degrees
from slipstream.schedule import Op


@dataclass(frozen=True)
class Hardware:
    """The hardware on which the times were measured."""

    device: str  # "cpu" or the GPU's name
    cpu: str
    cores: int
    threads: int  # threads per process
    processes: int  # processes that measured at the same time, as the ranks of a pipeline compute


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
    num_in_experts: int = 0  # those of experts that are spread over ranks
    actions: tuple[tuple[int, ActionBytes], ...] = ()  # (slice length, bytes); empty in profiles of older versions

    @property
    def parts(self) -> range:
        """The numbers of the stage's parts, as `slipstream.cost.work` counts them."""
        return range(self.first, self.last + 1)

    def activation_bytes_at(self, length: Any) -> Any:
        """Returns the bytes that a slice's F keeps for its backward, linear between the measured lengths."""
        return np.interp(length, *np.transpose(self.activation_bytes))

    def action_bytes_at(self, length: int) -> ActionBytes:
        """Returns the bytes of the actions on a slice, interpolated linearly between the measured lengths."""
        lengths, measured = zip(*self.actions, strict=True)
        at = partial(np.interp, length, lengths)
        return ActionBytes(
            kept=float(at([actions.kept for actions in measured])),
            deferred=float(at([actions.deferred for actions in measured])),
            peaks={op: float(at([actions.peaks[op] for actions in measured])) for op in measured[0].peaks},
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
    # Bytes per second that each rank passes on while all of them sum a tensor, both ways and with nothing to compute.
    # None: as messages.
    sum_bandwidth: float | None = None

    @property
    def ring_bandwidth(self) -> float:
        """The bytes per second that each rank of a ring passes on."""
        return self.sum_bandwidth or self.bandwidth

    def handling_seconds(self, num_bytes: Any) -> Any:
        """Returns the seconds for which sending or receiving a message keeps a rank from computing, 0 if unknown."""
        if not self.handling:
            return 0.0 * np.asarray(num_bytes)
        longest, most = self.handling[-1]
        further = np.asarray(num_bytes) * (most / longest)
        return np.maximum(np.interp(num_bytes, *np.transpose(self.handling)), further)


FORMAT = 2
# The share of the measuring above which another program has a core.
_BUSY = 0.05


@dataclass(frozen=True)
class Profile:
    """Measured costs of one model's parts on one kind of hardware, in one dtype, at one microbatch size.

    `kinds[layer]` numbers the kinds of equal layers from 0; `units_per_layer` is 2 where their halves were measured,
    else 1, and `unit_kinds` numbers those of them that are equal. Every other stage is a sum of the measured `stages`
    (see `slipstream.cost.measured_stages`); what they cost says `MeasuredCosts`. Times are in seconds, sizes in bytes.
    """

    hardware: Hardware
    model: ModelIdentity
    versions: dict[str, str]
    dtype: str
    dtype_bytes: int  # bytes per number of the tensors sent between stages
    microbatch_size: int
    seq_len: int
    kinds: tuple[int, ...]
    kind_names: tuple[str, ...]
    units_per_layer: int
    stages: tuple[MeasuredStage, ...]
    optimizer_seconds: float  # an AdamW step, per parameter
    link: MeasuredLink | None = None  # None where a single process measured
    disturbed: float = 0.0  # the share of the measuring during which something else had this process's core
    # A stage's costs are each rank's; lengths are those of whole slices.
    degrees: Degrees = UNSHARED
    sequence_parallel: bool = False  # whether ranks that shared layers shared the tokens too
    tensor_plan: Mapping[str, str] | None = None  # how they shared layers, where it isn't as the model says
    attention_kernels: Mapping[str, str] = field(default_factory=dict)  # the fastest on the GPU, by shape
    unit_kinds: tuple[int, ...] = ()  # the kinds of each kind of layer's units, as in `part_kinds`
    format: int = FORMAT

    @property
    def is_disturbed(self) -> bool:
        """Whether another program had a core while this was measured, which it may not have later."""
        return self.disturbed > _BUSY

    # --- the costs of a stage ----------------------------------------------------------------------------------------

    def time(self, layers: Stage, op: Op) -> FittedTime:
        """Returns the time function of one op of a stage; R takes as long as F.

        Raises:
            SlipstreamError: where the model doesn't have these layers.
        """
        if isinstance(layers, range) and not 0 <= layers.start < layers.stop <= len(self.kinds):
            raise SlipstreamError(
                f"there is no stage with the layers {layers.start} to {layers.stop - 1}: the profile's model has the "
                f"layers 0 to {len(self.kinds) - 1}."
            )
        return self._time(stage_row(self.parts, self.parts_of(layers)), op)

    def part_time(self, name: str, op: Op) -> FittedTime:
        """Returns the time function of one of `part_names`, or of a whole layer of one of `kind_names`.

        Raises:
            SlipstreamError: where there is no such part.
        """
        ends = {"stage": [0], "embedding": [-2], "head": [-1]}
        places = ends.get(name) or [1 + unit for unit, named in self._unit_names if name in (named, layer_of(named))]
        if not places:
            hint = did_you_mean(name, self.part_names)
            raise SlipstreamError(f"the profile has no part {name!r}{hint} Its parts are {', '.join(self.part_names)}.")
        numbers = [0.0] * len(self.part_names)
        for place in places:
            numbers[place] += 1
        return self._time(numbers, op)

    @property
    def part_names(self) -> tuple[str, ...]:
        """The names of the fixed part of every stage, the kinds of units, the embedding and the head with the loss.

        A unit that layers of several kinds have in common is named after the first of them.
        """
        names = dict(reversed(self._unit_names))
        return ("stage", *(names[unit] for unit in sorted(names)), "embedding", "head")

    @property
    def _unit_names(self) -> list[tuple[int, str]]:
        return unit_names(self.kind_names, self.units_per_layer, self.unit_kinds)

    @cached_property
    def parts(self) -> tuple[int, ...]:
        """The kind of every part of the model: embedding, units of layers, head."""
        return part_kinds(self.kinds, self.units_per_layer, self.unit_kinds)

    def parts_of(self, layers: Stage) -> range:
        """Returns the numbers of a stage's parts: 0 is the embedding, the last the head."""
        return parts_of(layers, len(self.kinds), self.units_per_layer)

    @cached_property
    def part_weights(self) -> Floats:
        """The weights of the measured stages in the fixed part of a stage and in a part of each kind, (1 + kinds,
        stages)."""
        measured = tuple(stage.parts for stage in self.stages)
        rows = np.eye(len(self.part_names))
        return np.array([combine(self.parts, measured, row) for row in rows.tolist()])

    def _time(self, numbers: Sequence[float], op: Op) -> FittedTime:
        """Returns the time of a fixed part, and so many parts of each kind."""
        fits = tuple(stage.fits[Op.F if op is Op.R else op] for stage in self.stages)
        counts = tuple(number * self.slowdown for number in numbers)
        return FittedTime(fits, tuple(map(tuple, self.part_weights.tolist())), counts)

    @property
    def slowdown(self) -> float:
        """The seconds that pass for each second of computing: the small load of the rest of the machine goes on."""
        return 1.0 if self.is_disturbed else 1 / (1 - self.disturbed)

    @property
    def longest_slice(self) -> int:
        """The longest slice whose time is known, in tokens."""
        return min(fit.lengths[-1] for stage in self.stages for fit in stage.fits.values())

    @property
    def has_action_bytes(self) -> bool:
        """Whether the bytes of actions were measured, as older versions did not."""
        return all(stage.actions for stage in self.stages)

    # --- its accuracy ------------------------------------------------------------------------------------------------

    @property
    def error(self) -> float:
        """The mean relative error of all fits at the points held out (TeraPipe: under 2%)."""
        errors = [e for stage in self.stages for op in OPS for e in stage.errors(op, held_out=True).values()]
        return sum(errors) / len(errors) if errors else 0.0

    def points_off(self, tolerance: float) -> dict[SlicePoint, float]:
        """Returns the largest error at each point, held out or not, where it exceeds the tolerance."""
        worst: dict[SlicePoint, float] = {}
        for stage, op in product(self.stages, OPS):
            for point, error in (stage.errors(op, True) | stage.errors(op, False)).items():
                worst[point] = max(error, worst.get(point, 0.0))
        return {point: error for point, error in sorted(worst.items()) if error > tolerance}

    # --- its model and dtype -----------------------------------------------------------------------------------------

    def check(self, model: ModelIdentity, dtype: str | None = None) -> None:
        """Checks the model and dtype of the profile; a dtype of None isn't compared.

        Raises:
            SlipstreamError: naming the difference, for another model or dtype.
        """
        differing = [(name, value, vars(model)[name]) for name, value in vars(self.model).items()]
        problems = [f"model.{name} is {a!r} in the profile, {b!r} here" for name, a, b in differing if a != b]
        if dtype not in (None, self.dtype):
            problems.append(f"dtype is {self.dtype} in the profile, {dtype} here")
        if problems:
            raise SlipstreamError(
                f"the profile was measured for something else: {'; '.join(problems)}. Measure again with `slipstream "
                "profile`."
            )

    def save(self, path: Path) -> None:
        """Writes the profile as JSON."""
        from pydantic import TypeAdapter

        path.write_bytes(TypeAdapter(Profile).dump_json(self, indent=1) + b"\n")


def load_profile(path: Path) -> Profile:
    """Reads a profile. `slipstream.cost.MeasuredCosts(profile).cost(partition, slices)` simulates with it.

    Raises:
        SlipstreamError: for a file that doesn't exist, is incomplete, or isn't a profile of this format.
    """
    from pydantic import TypeAdapter, ValidationError

    try:
        values = parse_json(read_text(path))
        written = values.get("format") if isinstance(values, dict) else None
        if written != FORMAT:
            raise SlipstreamError(
                f"{path} has format={written!r}, this version reads {FORMAT}; measure again with `slipstream profile`."
            )
        return TypeAdapter(Profile).validate_python(values)
    except SlipstreamError:
        raise
    except OSError as error:
        raise SlipstreamError(f"can't read the profile {path}: {error.strerror}") from error
    except ValidationError as error:
        problem = error.errors()[0]
        where = ".".join(map(str, problem["loc"]))
        raise SlipstreamError(f"{path} isn't a profile: {where}: {problem['msg'].lower()}.") from error
    except ValueError as error:
        raise SlipstreamError(f"{path} isn't a profile: {error}. Write one with `slipstream profile`.") from error
