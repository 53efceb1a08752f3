"""Scales the loss of float16 training, and counts steps whose gradients aren't finite."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from slipstream.errors import NonFiniteError

_STATE = ("scale", "num_good", "num_bad", "num_skipped")


@dataclass
class LossScale:
    """A factor of the loss that keeps small gradients above float16's smallest number, adjusted during training.

    Micikevicius et al. 2018, "Mixed Precision Training", section 3.2: the loss is multiplied by `scale` and every
    gradient divided by it. A step with a gradient that isn't finite is skipped and counted, and the scale falls; after
    `growth_interval` good steps in a row it grows. Powers of two change no digit of a gradient.

    bfloat16 and float32 need no scale; there `LossScale.fixed()` still skips and counts.
    """

    scale: float = 2.0**16
    growth: float = 2.0
    backoff: float = 0.5
    growth_interval: int = 2000
    max_bad: int = 20  # bad steps in a row before training stops with an error

    def __post_init__(self) -> None:
        self.num_skipped = 0  # bad steps of the whole run
        self.num_good = self.num_bad = 0  # steps in a row

    @classmethod
    def fixed(cls) -> LossScale:
        """Returns a scale that is always 1."""
        return cls(1.0, growth=1.0, backoff=1.0)

    def update(self, finite: bool) -> None:
        """Adjusts the scale after a step; `finite` says whether all gradients are finite, the same on every rank.

        All are finite if their norm is, which `Pipeline.clip_grad_norm_` returns. If not, the optimizer must not step.
        Raises NonFiniteError after `max_bad` such steps in a row.
        """
        if finite:
            self.num_bad = 0
            self.num_good += 1
            if self.num_good == self.growth_interval:
                self.scale *= self.growth
                self.num_good = 0
            return
        self.scale *= self.backoff
        self.num_good = 0
        self.num_bad += 1
        self.num_skipped += 1
        if self.num_bad >= self.max_bad:
            raise NonFiniteError(
                f"{self.num_bad} steps in a row had gradients that are not finite; the loss scale is now "
                f"{self.scale:g}. Lower the learning rate, lengthen its warm-up, or train in bfloat16."
            )

    def state_dict(self) -> dict[str, Any]:
        """Returns the state for resuming, as plain numbers."""
        return {name: getattr(self, name) for name in _STATE}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from the state that `state_dict` returned."""
        for name in _STATE:
            setattr(self, name, state[name])
