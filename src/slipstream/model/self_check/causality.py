"""Refuses models whose tokens see later ones."""

from __future__ import annotations

import torch
from transformers import PretrainedConfig

from slipstream.errors import SlipstreamError
from slipstream.model.model_config import check_is_causal_lm
from slipstream.model.toy.toy_comparison import full_precision
from slipstream.model.toy.toy_model import toy_model, toy_tokens

_TOLERANCE = 1e-5  # sums that a model forms in float32 differ by up to 1e-6
_LAST = 8  # tokens that are exchanged


def check_causal(config: PretrainedConfig) -> None:
    """Raises SlipstreamError where the architecture is no causal LM, or a toy of it isn't. Not collective.

    What keeps a toy from running is others' to say.
    """
    check_is_causal_lm(config)
    try:
        with torch.no_grad(), full_precision():
            difference = _difference(config)
    except Exception:  # the model's own code
        return
    if difference > _TOLERANCE:
        decoder = getattr(config, "is_decoder", None) is False
        hint = "Set is_decoder=True in its configuration to train it as a causal LM" if decoder else "Give a causal LM"
        raise SlipstreamError(
            f"model_type {config.model_type!r} isn't causal: its logits of a token depend on later tokens, as an "
            f"encoder's do, so that no token slice is ever complete. {hint}."
        )


def _difference(config: PretrainedConfig) -> float:
    """Returns by how much the logits of a toy's first tokens change with its last ones, relative to the largest."""
    model, tokens = toy_model(config), toy_tokens(config)
    others = torch.cat([tokens[:, :-_LAST], tokens[:, -_LAST:].roll(1, dims=0)], dim=1)
    first, second = (model(input_ids=each, use_cache=False).logits[:, :-_LAST] for each in (tokens, others))
    return float((first - second).abs().max() / first.abs().max())
