"""Builds a model at toy size and its unsliced reference, for the self-checks."""

from slipstream.model.toy.reference_attention import full_precision, recorded_attention
from slipstream.model.toy.toy_models import (
    TOY_LENGTH,
    perturb_parameters,
    quiet_transformers,
    reference_model,
    toy_config,
    toy_model,
    toy_tokens,
)
