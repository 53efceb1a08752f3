"""Skips steps with gradients that aren't finite, on every rank, and adjusts the scale of float16's losses."""

from __future__ import annotations

from typing import TypedDict

from slipstream.errors import SlipstreamError


class LossScaleState(TypedDict):
    """The state of a LossScale in a checkpoint."""

    scale: float
    num_good: int
    num_bad: int
    num_skipped: int


class LossScale:
    """A factor of the loss that keeps small gradients above float16's smallest number, adjusted during training.

    Micikevicius et al. 2018, "Mixed Precision Training", section 3.2: the loss is multiplied by `scale` and every
    gradient divided by it. A step with a gradient that isn't finite is skipped and counted, and the scale falls; after
    `growth_interval` good steps in a row it grows. Powers of two change no digit of a gradient.

    bfloat16 and float32 need no scale; there `LossScale.fixed()` still skips and counts.
    """

    def __init__(
        self,
        scale: float = 2.0**16,
        growth: float = 2.0,
        backoff: float = 0.5,
        growth_interval: int = 2000,
        max_bad: int = 20,
    ) -> None:
        """`max_bad` is the number of bad steps in a row after which training stops with an error."""
        if not (scale > 0 and growth >= 1 and 0 < backoff <= 1 and growth_interval >= 1 and max_bad >= 1):
            raise SlipstreamError(
                f"a loss scale of {scale} that grows by {growth} every {growth_interval} good steps, falls by "
                f"{backoff} and gives up after {max_bad} bad ones: give a positive scale, growth of at least 1, "
                "backoff in (0, 1], and counts of at least 1."
            )
        self.scale = scale
        self.num_skipped = 0  # in the whole run
        self._growth, self._backoff, self._growth_interval, self._max_bad = growth, backoff, growth_interval, max_bad
        self._num_good = 0  # in a row
        self._num_bad = 0  # in a row

    @classmethod
    def fixed(cls, scale: float = 1.0, max_bad: int = 20) -> LossScale:
        """Returns a scale that never changes; by default 1."""
        return cls(scale, growth=1.0, backoff=1.0, max_bad=max_bad)

    def update(self, finite: bool) -> None:
        """Adjusts the scale after a step; `finite` says whether all gradients are finite, the same on every rank.

        All are finite if their norm is, which `Pipeline.clip_grad_norm_` returns. If not, the optimizer must not step.
        Raises SlipstreamError after `max_bad` such steps in a row.
        """
        if finite:
            self._num_bad = 0
            self._num_good += 1
            if self._num_good == self._growth_interval:
                self.scale *= self._growth
                self._num_good = 0
            return
        self.scale *= self._backoff
        self._num_good = 0
        self._num_bad += 1
        self.num_skipped += 1
        if self._num_bad >= self._max_bad:
            raise SlipstreamError(
                f"{self._num_bad} steps in a row had gradients that are not finite; the loss scale is now "
                f"{self.scale:g}. Lower the learning rate, lengthen its warm-up, or train in bfloat16."
            )

    def state_dict(self) -> LossScaleState:
        """Returns what resuming needs, as plain numbers."""
        return {
            "scale": self.scale,
            "num_good": self._num_good,
            "num_bad": self._num_bad,
            "num_skipped": self.num_skipped,
        }

    def load_state_dict(self, state: LossScaleState) -> None:
        """Continues from the state that `state_dict` returned."""
        self.scale, self.num_skipped = state["scale"], state["num_skipped"]
        self._num_good, self._num_bad = state["num_good"], state["num_bad"]
