"""The family of the model that a Pipeline was given, and what only one family has.

A family makes the stages, splits every batch, and is called at both ends of a step.
"""

from __future__ import annotations

import torch
from torch import nn

from slipstream.errors import SlipstreamError
from slipstream.parallel import Ranks
from slipstream.pipeline.families.causal_lm import CausalLMFamily
from slipstream.pipeline.families.layer_sequence import SequenceFamily
from slipstream.pipeline.pipeline_options import PipelineOptions
from slipstream.pipeline.weights import WeightSource, in_memory

ModelFamily = CausalLMFamily | SequenceFamily


def family_of(model: object, options: PipelineOptions, ranks: Ranks, device: torch.device) -> ModelFamily:
    """Returns the model's family; raises SlipstreamError unless it is a causal LM or an nn.Sequential. Collective."""
    if isinstance(model, nn.Sequential):
        return SequenceFamily(model, options, ranks, device)
    return CausalLMFamily(model if isinstance(model, WeightSource) else in_memory(model), options, ranks, device)


_SAVE = "Save a sequence by torch.save(pipe.state_dict(), path), which rank 0 has as a whole."


def causal_lm(family: ModelFamily, wanted: str, instead: str = _SAVE) -> CausalLMFamily:
    """Returns the family of a causal LM; raises SlipstreamError for any other, which lacks what is `wanted`."""
    if not isinstance(family, CausalLMFamily):
        raise SlipstreamError(
            f"{wanted} is for models of transformers, but this pipeline's is an nn.Sequential. {instead}"
        )
    return family


def layer_sequence(family: ModelFamily, wanted: str) -> SequenceFamily:
    """Returns the family of an nn.Sequential; raises SlipstreamError for any other, which lacks what is `wanted`."""
    if not isinstance(family, SequenceFamily):
        raise SlipstreamError(
            f"{wanted} is for an nn.Sequential, but this pipeline's model is a causal LM: `slipstream plan` says how "
            "even its ranks are."
        )
    return family
