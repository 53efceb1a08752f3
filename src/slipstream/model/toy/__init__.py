"""A model at toy size and its unsliced reference, for the self-checks."""

from __future__ import annotations

from slipstream.model.toy.reference import full_precision, noting_attention
from slipstream.model.toy.small_model import (
    TOY_LENGTH,
    move_off_special_values,
    quiet_transformers,
    small_model,
    toy_config,
    toy_model,
    toy_tokens,
)

__all__ = [
    "TOY_LENGTH",
    "full_precision",
    "move_off_special_values",
    "noting_attention",
    "quiet_transformers",
    "small_model",
    "toy_config",
    "toy_model",
    "toy_tokens",
]
