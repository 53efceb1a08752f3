"""Runs a schedule with real tensors: the public Pipeline and the parts it is built from."""

from slipstream.pipeline.families import StageLayout
from slipstream.pipeline.families.causal_lm import CausalLMFamily
from slipstream.pipeline.families.causal_lm_layout import check_options, host_context_refusal
from slipstream.pipeline.introspection import UNSUPPORTED_CALLS
from slipstream.pipeline.memory import less_on_host
from slipstream.pipeline.pipeline import Pipeline
from slipstream.pipeline.pipeline_options import ExpectedBatch, PipelineOptions, SequenceLoss
from slipstream.pipeline.planning import (
    UNCOUNTABLE,
    LoneRankPlans,
    context_place,
    decided_options,
    held_beside,
    is_counted,
    is_free,
)
from slipstream.pipeline.saving import describe_model
from slipstream.pipeline.weight_source import WeightSource, pretrained_source, with_frozen, without_dropout
