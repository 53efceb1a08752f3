"""Slipstream's attention and mask functions, registered with transformers under the name 'slipstream'.

A model whose attention goes through `AttentionInterface` calls these instead of its own, so its code stays unchanged:
the mask function returns the range of keys that each query of the slice sees, and the attention function reads the keys
and values of the slices before from the context store.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PretrainedConfig, PreTrainedModel

from slipstream.attention import AttentionSite, KeyRanges, attend
from slipstream.errors import SlipstreamError
from slipstream.keyed_draws import current_draws
from slipstream.model.hooks.mask_tables import MaskFunction, NotCausalError
from slipstream.model.hooks.token_slice import current_slice

NAME = "slipstream"
POSITION_BIAS = "position_bias"  # what a model adds to scores by itself, for all pairs of queries and keys


def sliced_mask(*args: Any, mask_function: MaskFunction, **kwargs: Any) -> KeyRanges | NotCausalError:
    """Returns what transformers passes to every layer as `attention_mask`."""
    context = current_slice()
    if context.records_masks:
        context.tables.functions.append(mask_function)
    return context.next_mask()


def sliced_attention(
    module: nn.Module,
    query: Tensor,  # (b, heads, T, d)
    key: Tensor,  # (b, key-value heads, T, d)
    value: Tensor,
    attention_mask: KeyRanges | NotCausalError | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: Tensor | None = None,  # attention sinks, one logit a head
    indices: Tensor | None = None,  # (b, T, k) the keys that an indexer selected
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Returns the attention of one slice to itself and all slices before, (b, T, heads, d), as transformers expects."""
    if not isinstance(attention_mask, KeyRanges):
        raise SlipstreamError(
            f"{type(module).__name__} attends with {attention_mask or 'no mask of transformers'}, so what a slice may "
            "attend to is unknown. Token slices need causal, sliding-window or blockwise masks."
        )
    if kwargs.get(POSITION_BIAS) is not None:
        raise SlipstreamError(f"{type(module).__name__} adds a bias of its own to scores, which slices don't have")
    context = current_slice()
    call, scale = context.next_call(module), query.shape[-1] ** -0.5 if scaling is None else scaling
    random = (dropout, context.attention_seed(), current_draws()) if dropout else ()
    site = AttentionSite(context.store, call, attention_mask, scale, softcap, *random)
    return attend(query, key, value, site, s_aux, indices).transpose(1, 2), None


def use_attention(model: PreTrainedModel, name: str, layers: Iterable[nn.Module]) -> None:
    """Lets the model attend by the implementation of this name, with layers that a user copied, which have a
    configuration of their own."""
    model.set_attn_implementation(name)
    if model.config._attn_implementation != name:
        return  # it attends by code of its own
    for module in (module for layer in layers for module in layer.modules()):
        config = vars(module).get("config")
        if isinstance(config, PretrainedConfig) and config._attn_implementation != name:
            config._attn_implementation = name


AttentionInterface.register(NAME, sliced_attention)
AttentionMaskInterface.register(NAME, sliced_mask)
