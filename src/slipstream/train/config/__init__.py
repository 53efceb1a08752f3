"""The configuration of `slipstream train`: its sections and its file."""

from slipstream.train.config.config_file import load_config
from slipstream.train.config.config_values import dump_config, parse_config
from slipstream.train.config.data_section import DataSection, PreferenceSection, SourceSection
from slipstream.train.config.overrides import SMALLEST, read_settings, set_override
from slipstream.train.config.rules import named_schedule
from slipstream.train.config.run_config import DECIDED_BY_PLAN, Config, precision_named
from slipstream.train.config.sections import (
    MESH_SETTINGS,
    LoraSection,
    ModelSection,
    OptimizerSection,
    ParallelSection,
    SampleSection,
    TrainingSection,
)
