"""Finds what an architecture's layers carry from token to token besides keys and values, which slices don't carry.

Nothing is compared: a layer that never attends through transformers' interface, or that asks the cache for a state of
its own, can't be sliced at any size. So this holds where the self-check is switched off, too.
"""

from __future__ import annotations

import torch
from transformers import PretrainedConfig, PreTrainedModel

from slipstream.attention import ContextStore, KeyRanges
from slipstream.errors import SlipstreamError
from slipstream.model.causal_lm_stage import CausalLMStage
from slipstream.model.layer_range import LayerRange
from slipstream.model.model_anatomy import ModelAnatomy, find_anatomy, toy_failure
from slipstream.model.model_cutting import copy_with_shared_weights
from slipstream.model.self_check.toy_runs import TokenCuts
from slipstream.model.toy import toy_model, toy_tokens
from slipstream.model.toy_comparison import full_precision, recorded_attention

_TWO_SLICES = TokenCuts((0, 5, 12), (0, 12))


def check_carried_state(config: PretrainedConfig, anatomy: ModelAnatomy | None = None) -> None:
    """Runs a toy of the architecture once whole and once in two slices, forwards only. Not collective.

    Raises SlipstreamError, naming the layer and the state, where slices can't be exact whatever the sizes are.
    """
    if getattr(config, "output_router_logits", False):  # of mixtures of experts: not a sum over tokens
        reason = "output_router_logits=True adds a load-balancing loss over the whole batch, which slices don't sum to"
        raise refusal(config, f"{reason}. Set output_router_logits=False")
    anatomy = anatomy or find_anatomy(config)
    try:
        with torch.no_grad(), full_precision():
            model, tokens = toy_model(config), toy_tokens(config, _TWO_SLICES.length)
            reason = _without_attention(model, anatomy, tokens) or _state_in_cache(model, anatomy, tokens)
    except Exception as error:  # the model's own code
        raise refusal(config, toy_failure(error)) from error
    if reason:
        raise refusal(config, reason)


def refusal(config: PretrainedConfig, reason: str) -> SlipstreamError:
    """Returns the error that says why token slices of an architecture wouldn't be exact."""
    return SlipstreamError(
        f"model_type {config.model_type!r} can't be trained in token slices: {reason}. "
        "`slipstream check` runs this check for any model; Llama, Qwen, Mistral, Gemma, GPT-2 and the like pass it."
    )


def _without_attention(model: PreTrainedModel, anatomy: ModelAnatomy, tokens: torch.Tensor) -> str:
    """Says which layer never attends through the interface; empty if all do."""
    with recorded_attention() as attending:
        model(input_ids=tokens, use_cache=False)
    layers = enumerate(anatomy.layers_of(model))
    found = (
        f"layer {index} ({type(layer).__name__}) never attends through transformers' AttentionInterface, so "
        "what it needs from earlier tokens (other attention, a recurrent state) can't be provided"
        for index, layer in layers
        if not set(layer.modules()) & set(attending)
    )
    return next(found, "")


def _state_in_cache(model: PreTrainedModel, anatomy: ModelAnatomy, tokens: torch.Tensor) -> str:
    """Says which state a layer asks the cache for, or that it reads the mask; empty if it does neither."""
    store = ContextStore(_TWO_SLICES.length)
    whole = LayerRange(0, len(anatomy.layers_of(model)))
    try:
        stage = CausalLMStage(copy_with_shared_weights(model), anatomy, whole, torch.device("cpu"))
        for piece in _TWO_SLICES.token_slices(tokens):
            stage.forward(piece, None, store)
    except SlipstreamError as error:
        return str(error)
    except Exception as error:  # the model's own code
        if KeyRanges.__name__ not in str(error):
            raise
        return "its own code reads the attention mask, as an indexer does that selects keys (sparse attention)"
    return ""
