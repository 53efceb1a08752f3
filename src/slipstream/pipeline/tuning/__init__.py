"""schedule="auto" and slices="auto": measures the first steps and chooses from them."""

from __future__ import annotations

from slipstream.pipeline.tuning.trials import (
    Answer,
    Holdings,
    Request,
    Trial,
    holdings_of,
)
from slipstream.pipeline.tuning.tuner import Tuner

__all__ = [
    "Answer",
    "Holdings",
    "Request",
    "Trial",
    "Tuner",
    "holdings_of",
]
