"""The configuration of `slipstream train`: its sections and its file."""

from slipstream.train.config.data_section import DataSection, PreferenceSection, SourceSection
from slipstream.train.config.rules import named_schedule
from slipstream.train.config.run_config import (
    DECIDED_BY_PLAN,
    MESH_SETTINGS,
    SMALLEST,
    Config,
    dump_config,
    load_config,
    parse_config,
    precision_named,
    read_settings,
    set_override,
)
from slipstream.train.config.sections import (
    LoraSection,
    ModelSection,
    OptimizerSection,
    ParallelSection,
    SampleSection,
    TrainingSection,
)
