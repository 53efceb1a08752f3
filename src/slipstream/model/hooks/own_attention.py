"""Lets models that attend by code of their own, not through transformers' AttentionInterface, see earlier slices.

Their layers get the keys and values of all tokens so far from the cache, as where they generate text in pieces. Their
masks are those that the model builds for that, by transformers' own functions; here documents are added to them, and
position biases are made to count from a document's start (ALiBi: Press et al. 2022, "Train Short, Test Long").
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, and_masks, causal_mask_function

from slipstream.errors import SlipstreamError
from slipstream.model.hooks.token_slice import TokenSlice

_WITHOUT_TENSORS = ("flash", "flex")  # names of attention whose masks aren't tensors of queries and keys


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

    ALL_MASK_ATTENTION_FUNCTIONS[name] = build_with_documents  # in this process, beside the function of that name
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
    alone = build(torch.ones_like(attention_mask), num_heads, dtype)  # (b * heads, 1, end)
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


_BIASES: dict[str, Callable[..., Tensor]] = {  # what the files of models call the functions that build their biases
    "build_alibi_tensor": _alibi,
    "build_mpt_alibi_tensor": _alibi_from_the_end,
}
