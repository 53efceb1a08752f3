"""The kinds of models a Pipeline trains: causal LMs and sequences of layers."""

from slipstream.pipeline.families.export import gather_state, save_pretrained
from slipstream.pipeline.families.loss import causal_cross_entropy, cross_entropy
from slipstream.pipeline.families.model_family import causal_lm, family_of, layer_sequence
from slipstream.pipeline.families.sequence_partition import Balance
from slipstream.pipeline.families.stage_layout import ExecutedStep, StageLayout
from slipstream.pipeline.families.weight_source import WeightSource, pretrained_weights, random_weights
