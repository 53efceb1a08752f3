"""The kinds of models a Pipeline trains: causal LMs and sequences of layers."""

from __future__ import annotations

from slipstream.pipeline.families.choose_family import family_of
from slipstream.pipeline.families.export import gather_state
from slipstream.pipeline.families.loss import causal_cross_entropy
from slipstream.pipeline.families.model_family import Inputs
from slipstream.pipeline.families.sequence_partition import Balance
from slipstream.pipeline.families.settings import Settings
from slipstream.pipeline.families.stage_layout import Layout, Ran, check_ranks
from slipstream.pipeline.families.weight_source import Source

__all__ = [
    "Balance",
    "Inputs",
    "Layout",
    "Ran",
    "Settings",
    "Source",
    "causal_cross_entropy",
    "check_ranks",
    "family_of",
    "gather_state",
]
