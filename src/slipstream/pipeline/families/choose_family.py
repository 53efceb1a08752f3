"""Which kind of model a Pipeline was given."""

from __future__ import annotations

import torch
from torch import nn

from slipstream.model.sequential import is_plain_sequential
from slipstream.pipeline.families.causal_lm import CausalLMFamily
from slipstream.pipeline.families.layer_sequence import SequenceFamily
from slipstream.pipeline.families.model_family import ModelFamily
from slipstream.pipeline.families.settings import Settings
from slipstream.pipeline.families.weight_source import WeightSource, in_memory
from slipstream.pipeline.ranks import Ranks


def family_of(model: object, settings: Settings, ranks: Ranks, device: torch.device) -> ModelFamily:
    """Collective. Raises SlipstreamError for what is neither a causal LM nor an nn.Sequential."""
    if isinstance(model, nn.Sequential) and is_plain_sequential(model):
        return SequenceFamily(model, settings, ranks, device)
    return CausalLMFamily(model if isinstance(model, WeightSource) else in_memory(model), settings, ranks, device)
