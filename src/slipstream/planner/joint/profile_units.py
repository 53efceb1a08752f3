"""The costs of a model's units from a profile."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from slipstream.array_types import Floats, Ints
from slipstream.planner.costs import Profile, StateBytes
from slipstream.schedule import Op


@dataclass(frozen=True)
class ProfileUnits:
    """The measured costs of the embedding, the layers or their halves, and the head (see `UnitCosts`)."""

    profile: Profile
    state: StateBytes

    @property
    def num_layers(self) -> int:
        return len(self.profile.kinds)

    @property
    def units_per_layer(self) -> int:
        return self.profile.units_per_layer

    @property
    def num_frozen_units(self) -> int:
        return 0

    @property
    def latency(self) -> float:
        return self.profile.link.latency if self.profile.link else 0.0

    @property
    def bandwidth(self) -> float | None:
        return self.profile.link.bandwidth if self.profile.link else None

    @property
    def longest_slice(self) -> int:
        """The longest slice whose time is known, in tokens."""
        return min(fit.lengths[-1] for stage in self.profile.stages for fit in stage.fits.values())

    def seconds(self, op: Op, lengths: Ints, contexts: Ints) -> tuple[Floats, Floats]:
        units, fixed = self._by_part([stage.fits[op](lengths, contexts) for stage in self.profile.stages])
        # differences of noisy measurements may be below 0
        return self.profile.slowdown * np.maximum(units, 0.0), self.profile.slowdown * np.maximum(fixed, 0.0)

    def activation_bytes(self, lengths: Ints) -> tuple[Floats, Floats]:
        kept, _ = self._contexts(lengths)
        units, fixed = self._by_part([stage.activation_bytes_at(lengths) for stage in self.profile.stages])
        return units + kept, fixed

    def kept_bytes(self, lengths: Ints) -> tuple[Floats, Floats]:
        return self._contexts(lengths)[0], self.message_bytes(lengths)

    def state_bytes(self) -> Floats:
        each = self.state.weights + self.state.gradients + self.state.optimizer
        parameters, _ = self.profile.by_part([float(stage.num_parameters) for stage in self.profile.stages])
        return each * np.maximum(parameters, 0.0)

    def message_bytes(self, lengths: Ints) -> Floats:
        sizes: Floats = np.asarray(self.profile.message_bytes(lengths), float)
        return sizes

    def handling_seconds(self, lengths: Ints) -> Floats:
        seconds: Floats = np.asarray(self.profile.handling_seconds(lengths), float)
        return seconds

    def _contexts(self, lengths: Ints) -> tuple[Floats, Floats]:
        """The keys and values of the slices' tokens and their gradients."""
        each = [float(stage.context_bytes + stage.context_gradient_bytes) for stage in self.profile.stages]
        return self._by_part(list(np.outer(each, lengths)))

    def _by_part(self, stages: list[Floats]) -> tuple[Floats, Floats]:
        """Splits what the measured stages have, among the parts, (parts, slices), and the fixed part."""
        columns = [self.profile.by_part(column) for column in np.transpose(stages).tolist()]
        units = np.array([units for units, _ in columns], float).T.reshape(len(self.profile.parts), -1)
        return units, np.array([fixed for _, fixed in columns], float)
