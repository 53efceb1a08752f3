"""Checks a whole run, and prepares its text, before a rank starts or a byte is written."""

from __future__ import annotations

from slipstream.training.preflight.all_checks import preflight
from slipstream.training.preflight.machine_checks import check_machine, check_world_size
from slipstream.training.preflight.model_checks import load_model_config
from slipstream.training.preflight.run_inputs import RunInputs

__all__ = ["RunInputs", "check_machine", "check_world_size", "load_model_config", "preflight"]
