"""The configuration of `slipstream train`: its sections and its file."""

from __future__ import annotations

from slipstream.training.config.config_file import dump_config, load_config
from slipstream.training.config.run_config import Config, named_schedule
from slipstream.training.config.sections import DataSection, ModelSection, OptimizerSection, SampleSection

__all__ = [
    "Config",
    "DataSection",
    "ModelSection",
    "OptimizerSection",
    "SampleSection",
    "dump_config",
    "load_config",
    "named_schedule",
]
