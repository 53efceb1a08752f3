"""Slipstream's attention for transformers: by its AttentionInterface, and for models that attend by code of their own.

A model whose attention goes through `AttentionInterface` calls the functions registered under the name 'slipstream', so
its code stays unchanged: the mask function returns the range of keys that each query of the slice sees, and the
attention function reads the keys and values of the slices before from the context store.

Layers with attention of their own get the keys and values of all tokens so far from the cache, as where they generate
text in pieces. Their masks are those that the model builds for that, by transformers' own functions; here documents are
added to them, and position biases are made to count from a document's start (ALiBi: Press et al. 2022, "Train Short,
Test Long").
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PretrainedConfig, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, and_masks, causal_mask_function

from slipstream.attention import AttentionSite, KeyRanges, attend
from slipstream.errors import SlipstreamError
from slipstream.keyed_draws import current_draws
from slipstream.model.hooks.masks import MaskFunction, NotCausalError
from slipstream.model.hooks.token_slice import TokenSlice, current_slice

NAME = "slipstream"
# Argument for a bias that a model adds to the scores of all pairs of queries and keys by itself.
POSITION_BIAS = "position_bias"


def sliced_mask(*args: Any, mask_function: MaskFunction, **kwargs: Any) -> KeyRanges | NotCausalError:
    """Returns the value that transformers passes to every layer as `attention_mask`."""
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
    indices: Tensor | None = None,  # (b, T, k), the keys selected by an indexer
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
    call = context.next_call(module)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    random = (dropout, context.attention_seed(), current_draws()) if dropout else ()
    site = AttentionSite(context.store, call, attention_mask, scale, softcap, *random)
    if context.exchange is not None:
        if indices is not None:
            context.refuse_shared("a selection of keys")
        site = site._replace(exchange=context.exchange)
    return attend(query, key, value, site, s_aux, indices).transpose(1, 2), None


def use_attention(model: PreTrainedModel, name: str, layers: Iterable[nn.Module]) -> None:
    """Lets the model attend by the implementation of this name, with layers that a user copied, which have a
    configuration of their own."""
    model.set_attn_implementation(name)
    if model.config._attn_implementation != name:
        # The model attends by code of its own.
        return
    for module in (module for layer in layers for module in layer.modules()):
        config = vars(module).get("config")
        if isinstance(config, PretrainedConfig) and config._attn_implementation != name:
            config._attn_implementation = name


AttentionInterface.register(NAME, sliced_attention)
AttentionMaskInterface.register(NAME, sliced_mask)


_WITHOUT_TENSORS = ("flash", "flex")  # names of attention with masks other than tensors of queries and keys


def check_own_attention(config: PretrainedConfig) -> None:
    """Raises SlipstreamError where such a model was loaded with attention whose masks can't be those of a slice."""
    name = _implementation(config)
    if any(word in name for word in _WITHOUT_TENSORS):
        raise SlipstreamError(
            f"model_type {config.model_type!r} attends by code of its own, loaded with attn_implementation={name!r}, "
            "which can't be cut into slices. Load it with attn_implementation='eager', or leave that out."
        )


@contextmanager
def masks_and_biases(model: PreTrainedModel, tokens: TokenSlice) -> Iterator[None]:
    """Makes the model's masks and position biases those of the slice, for one forward."""
    with ExitStack() as stack:
        if tokens.document_start is not None:
            stack.enter_context(_masks_of_documents(_implementation(model.config), tokens))
        for file in {sys.modules[type(module).__module__] for module in model.modules()}:
            for name, of_slice in _BIASES.items():
                if hasattr(file, name):
                    stack.enter_context(patch.object(file, name, partial(of_slice, getattr(file, name), tokens)))
        yield


def _implementation(config: PretrainedConfig) -> str:
    return str(config.get_text_config()._attn_implementation or "eager")


@contextmanager
def _masks_of_documents(name: str, tokens: TokenSlice) -> Iterator[None]:
    build = ALL_MASK_ATTENTION_FUNCTIONS[name]
    start = tokens.document_start

    def is_in_document(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        assert start is not None
        return key >= start[batch, query - tokens.start]

    def build_with_documents(*args: Any, mask_function: Any = causal_mask_function, **kwargs: Any) -> Any:
        kwargs |= {"mask_function": and_masks(mask_function, is_in_document), "allow_is_causal_skip": False}
        return build(*args, **kwargs)

    # The function is registered in this process only, next to transformers' own of that name.
    ALL_MASK_ATTENTION_FUNCTIONS[name] = build_with_documents
    try:
        yield
    finally:
        del ALL_MASK_ATTENTION_FUNCTIONS[name]


def _positions_in_documents(tokens: TokenSlice) -> Tensor:
    """Returns the position of each key (b, end) in the document of the slice's queries that see it, if any does."""
    assert tokens.document_start is not None
    keys = torch.arange(tokens.end, device=tokens.document_start.device)
    before = tokens.document_start[:, :1].expand(-1, tokens.start)  # keys before the slice: its first query's document
    return (keys - torch.cat([before, tokens.document_start], dim=1)).clamp(min=0)


def _alibi(
    build: Callable[..., Tensor], tokens: TokenSlice, attention_mask: Tensor, num_heads: int, dtype: torch.dtype
) -> Tensor:
    """Returns the bias of each key, (b * heads, 1, end): slope times position, of Bloom and Falcon.

    It is rounded to `dtype` or less, so it must count from the document's start, although a softmax is the same
    wherever positions begin.
    """
    if tokens.document_start is None:
        return build(attention_mask, num_heads, dtype)
    alone = build(torch.ones_like(attention_mask), num_heads, dtype)  # (b * heads, 1, end), the bias without documents
    positions = _positions_in_documents(tokens).repeat_interleave(num_heads, dim=0)
    return alone.gather(2, positions[:, None])


def _alibi_from_the_end(
    build: Callable[..., Tensor], tokens: TokenSlice, num_heads: int, sequence_length: int, *args: Any, **kwargs: Any
) -> Tensor:
    """Returns the bias of each key, (heads, 1, end): slope times the distance from the sequence's last key, of MPT.

    Its code takes the bias's last columns, which would count from the slice's last key: the same but for rounding.
    """
    bias = build(num_heads, sequence_length, *args, **kwargs)  # (heads, 1, sequence_length)
    first = sequence_length - tokens.length
    return bias[..., first : first + tokens.end] if first >= 0 else bias


_BIASES: dict[str, Callable[..., Tensor]] = {  # function's name in models' files -> our builder of its biases
    "build_alibi_tensor": _alibi,
    "build_mpt_alibi_tensor": _alibi_from_the_end,
}
