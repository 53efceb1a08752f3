"""The configuration of `slipstream train`: its sections and its file."""

from slipstream.training.config.config_file import dump_config, load_config
from slipstream.training.config.data_section import DataSection, SourceSection
from slipstream.training.config.lora_section import LoraSection
from slipstream.training.config.optimizer_section import OptimizerSection
from slipstream.training.config.order_rules import named_schedule
from slipstream.training.config.preference_section import PreferenceSection
from slipstream.training.config.run_config import DECIDED_BY_PLAN, Config, precision_named
from slipstream.training.config.sections import (
    ModelSection,
    ParallelSection,
    SampleSection,
    TrainingSection,
)
