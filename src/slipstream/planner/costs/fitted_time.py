"""The time of a stage from measured ones: each of its parts is a difference of measurements, and takes 0 at least."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from slipstream.planner.costs.time_fit import TimeFit


@dataclass(frozen=True)
class FittedTime:
    """The time of one op, t(slice_length, context_length) in seconds, of any number of parts of each kind.

    Takes ints or integer arrays. A part's time is a weighted sum of measured stages' fits. Weights may be negative, as
    parts are differences of stages, so that noise may bring it below 0: then it counts as 0.
    """

    fits: tuple[TimeFit, ...]  # of the measured stages
    weights: tuple[tuple[float, ...], ...]  # of the fits in every kind of part
    numbers: tuple[float, ...]  # of the parts of every kind

    def __call__(self, length: Any, context: Any) -> Any:
        measured = [fit(length, context) for fit in self.fits]
        total = sum(n * _positive(row, measured) for n, row in zip(self.numbers, self.weights, strict=True) if n)
        return total if isinstance(total, np.ndarray) else float(total)


def _positive(weights: Sequence[float], values: Sequence[Any]) -> Any:
    return np.maximum(sum(weight * value for weight, value in zip(weights, values, strict=True) if weight), 0.0)
