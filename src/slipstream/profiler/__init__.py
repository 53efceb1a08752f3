"""Measures what the parts of a model cost on the present hardware, by running real stages on real slices."""

from __future__ import annotations

from slipstream.profiler.model_counting import count_model
from slipstream.profiler.profile_identity import (
    identify_hardware,
    identify_model,
    versions,
    without_origin,
)
from slipstream.profiler.profile_run import ProfileSettings, profile_model

__all__ = [
    "ProfileSettings",
    "count_model",
    "identify_hardware",
    "identify_model",
    "profile_model",
    "versions",
    "without_origin",
]
