"""What it costs to train a part of a model, from measured costs of training all of it and counts of both.

A run measures a model once, with all weights trained, and keeps that. Where some are frozen, or an adapter is trained
beside them, a unit's F, I and W take as much of the measured time as their counted products are of those with all
weights trained: nothing of I and W below the lowest trained part, no W of a frozen one, a little more of F where there
is an adapter.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cached_property

import numpy as np

from slipstream.array_types import Floats, Ints
from slipstream.planner.costs import ActionBytes, ModelCount, PartCount, Profile, Stage, StageParts
from slipstream.planner.joint import ProfileUnits
from slipstream.schedule import Op


@dataclass(frozen=True, kw_only=True)
class PartlyTrained(Profile):
    """A profile whose bytes are those of training a part of the model.

    What a frozen layer keeps less for its backward isn't known, so that above the lowest trained part activations count
    as measured.

    Args:
        whole: the counted model with all weights trained.
        part: the same with what is trained.
    """

    whole: ModelCount
    part: ModelCount

    @classmethod
    def of(cls, profile: Profile, whole: ModelCount, part: ModelCount) -> PartlyTrained:
        """Returns the profile for what is trained in `part`."""
        own = {each.name: getattr(profile, each.name) for each in fields(Profile)}
        return cls(**own, whole=whole, part=part)

    def has_backward(self, stage: Stage) -> bool:
        return self.parts_of(stage).stop > self.part.num_frozen_parts

    def num_parameters(self, layers: Stage) -> int:
        more = self._difference(layers, lambda part: part.num_parameters)
        return super().num_parameters(layers) + round(more / self.tensor_parallel)

    def num_trained(self, layers: Stage) -> int:
        frozen = sum(number * part.num_frozen for number, part in self.part.counted(self._parts(layers)))
        return max(0, self.num_parameters(layers) - round(frozen / self.tensor_parallel))

    def activation_bytes(self, layers: Stage, length: int) -> float:
        return super().activation_bytes(self._with_backward(layers), length) if self.has_backward(layers) else 0.0

    def kept_bytes(self, layers: Stage, recompute: str, length: int) -> float:
        return super().kept_bytes(layers, recompute, length) if self.has_backward(layers) else 0.0

    def action_bytes(self, layers: Stage, length: int) -> ActionBytes:
        if self.has_backward(layers):
            return super().action_bytes(self._with_backward(layers), length)
        during = super().action_bytes(layers, length).alone
        return ActionBytes(0.0, 0.0, dict.fromkeys((Op.F, Op.B, Op.I, Op.W), 0.0) | {Op.F: during}, during)

    def context_gradient_bytes(self, layers: Stage, length: int) -> float:
        return super().context_gradient_bytes(self._with_backward(layers), length) if self.has_backward(layers) else 0.0

    def _parts(self, layers: Stage) -> StageParts:
        own = self.parts_of(layers)
        return StageParts(own.start, own.stop)

    def _with_backward(self, layers: Stage) -> StageParts:
        """Returns the parts of a stage from the lowest trained one on."""
        own = self.parts_of(layers)
        return StageParts(max(own.start, self.part.num_frozen_parts), own.stop)

    def _difference(self, layers: Stage, value: Callable[[PartCount], float]) -> float:
        totals = [
            sum(number * value(part) for number, part in count.counted(self._parts(layers)))
            for count in (self.part, self.whole)
        ]
        return totals[0] - totals[1]


@dataclass(frozen=True)
class PartlyTrainedUnits(ProfileUnits):
    """The costs of a model's units (see `UnitCosts`) where a part of the model is trained."""

    profile: PartlyTrained

    @property
    def num_frozen_units(self) -> int:
        return self.profile.part.num_frozen_parts

    def seconds(self, op: Op, lengths: Ints, contexts: Ints) -> tuple[Floats, Floats]:
        units, fixed = super().seconds(op, lengths, contexts)
        if op is not Op.B:
            return units * self._shares[op][:, None], fixed
        inputs, weights = (super(PartlyTrainedUnits, self).seconds(each, lengths, contexts)[0] for each in (Op.I, Op.W))
        computed = inputs * self._shares[Op.I][:, None] + weights * self._shares[Op.W][:, None]
        both = inputs + weights
        return units * np.divide(computed, both, out=np.zeros_like(both), where=both > 0), fixed

    def activation_bytes(self, lengths: Ints) -> tuple[Floats, Floats]:
        units, fixed = super().activation_bytes(lengths)
        return self._above(units), fixed

    def kept_bytes(self, lengths: Ints) -> tuple[Floats, Floats]:
        units, fixed = super().kept_bytes(lengths)
        return self._above(units), fixed

    def state_bytes(self) -> Floats:
        parts = [StageParts(part, part + 1) for part in range(len(self.profile.parts))]
        numbers = np.array([self.profile.num_parameters(part) for part in parts], float)
        trained = np.array([self.profile.num_trained(part) for part in parts], float)
        found: Floats = self.state.weights * numbers + (self.state.gradients + self.state.optimizer) * trained
        return found

    def _above(self, units: Floats) -> Floats:
        """Returns what the units have, nothing for those that have no backward."""
        return units * (np.arange(len(units)) >= self.num_frozen_units)[:, None]

    @cached_property
    def _shares(self) -> dict[Op, Floats]:
        """The part of a unit's measured F, I and W that remains."""
        counts = self.profile.whole, self.profile.part
        pairs = list(zip(*([count.of_kind[kind] for kind in count.parts] for count in counts), strict=True))
        return {op: np.array([_share(op, *pair) for pair in pairs]) for op in (Op.F, Op.I, Op.W)}


def _share(op: Op, whole: PartCount, part: PartCount) -> float:
    """Returns the products of an op in relation to those with all weights trained; of a part without products whether
    the op runs."""
    runs = {Op.F: True, Op.I: part.has_backward, Op.W: part.num_trained > 0}[op]
    before, now = (each.ops[op].flops.per_token for each in (whole, part))
    return float(runs) if not before else now / before * runs


def trains_a_part(units: ProfileUnits, whole: ModelCount, part: ModelCount) -> ProfileUnits:
    """Returns the units' costs where what `part` says is trained."""
    return PartlyTrainedUnits(PartlyTrained.of(units.profile, whole, part), units.state)
