"""The kinds of models a Pipeline trains: causal LMs and sequences of layers."""

from __future__ import annotations

from slipstream.pipeline.families.choose_family import causal_lm, family_of, layer_sequence
from slipstream.pipeline.families.export import gather_state
from slipstream.pipeline.families.loss import causal_cross_entropy
from slipstream.pipeline.families.sequence_partition import Balance
from slipstream.pipeline.families.stage_layout import ExecutedStep, StageLayout
from slipstream.pipeline.families.weight_source import WeightSource, pretrained_weights, random_weights

__all__ = [
    "Balance",
    "ExecutedStep",
    "StageLayout",
    "WeightSource",
    "causal_cross_entropy",
    "causal_lm",
    "family_of",
    "gather_state",
    "layer_sequence",
    "pretrained_weights",
    "random_weights",
]
