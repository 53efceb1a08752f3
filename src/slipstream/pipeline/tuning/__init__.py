"""schedule="auto" and slices="auto": measures the first steps and chooses from them."""

from __future__ import annotations

from slipstream.pipeline.tuning.trials import (
    Trial,
    TrialMemory,
    TrialRequest,
    TrialResult,
    holdings_of,
)
from slipstream.pipeline.tuning.tuner import Tuner, make_tuner

__all__ = [
    "Trial",
    "TrialMemory",
    "TrialRequest",
    "TrialResult",
    "Tuner",
    "holdings_of",
    "make_tuner",
]
