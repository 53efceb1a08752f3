"""The kinds of models a Pipeline trains: causal LMs and sequences of layers."""

from slipstream.pipeline.families.model_family import Balance, ModelFamily
from slipstream.pipeline.families.stage_layout import ExecutedStep, StageLayout
