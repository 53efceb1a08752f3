"""Computes the attention of one token slice as a single autograd function over a context store.

Layers that attend by code of their own get the keys and values of all tokens so far (`read_prefix`): copies, as such
code may keep any part of them for its backward.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import AbstractContextManager, nullcontext
from math import ceil
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.attention.backend import AttentionBackend, AttentionSite, KeySums, QueryState
from slipstream.attention.flash_cpu import FlashCPU
from slipstream.attention.flex import FlexCUDA
from slipstream.attention.fused_cuda import FusedCUDA, PartlyFusedCUDA
from slipstream.attention.key_blocks import KeyBlock
from slipstream.attention.masked_math import MaskedMath
from slipstream.attention.masks import KeyRanges
from slipstream.attention.store import AttentionResult, ContextStore
from slipstream.autograd_calls import differentiable_once, direct_apply, with_backward
from slipstream.errors import SlipstreamError

BACKENDS: tuple[type[AttentionBackend], ...] = (FlashCPU, FusedCUDA, FlexCUDA, PartlyFusedCUDA, MaskedMath)
"""In order of preference: the first that takes an attention computes it."""


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    site: AttentionSite,
    sinks: Tensor | None = None,
    selected: Tensor | None = None,
) -> Tensor:
    """Returns the attention of one slice to every key that its queries see, including those of earlier slices.

    It is exact: over all slices, the gradients of query, key, value and sinks are those of unsliced attention.
    Collective where the site has an exchange: then T counts this rank's tokens of the slice, and each rank attends with
    some heads of all tokens, or with its own tokens to the keys of all.

    Args:
        query: (B, H, T, D), the slice [ranges.start, ranges.end) of the sequence.
        key: (B, Hkv, T, D); Hkv divides H (grouped-query attention).
        value: (B, Hkv, T, Dv).
        site: where the slice's keys and values are kept, which keys each query sees, and how scores are computed.
        sinks: (H,), one logit per head that takes probability and has no value.
        selected: (B, T, k), the numbers of the sequence's keys that each query sees, of those in its range; None: all.

    Returns:
        (B, H, T, Dv), stored as (B, T, H, Dv).

    Raises:
        SlipstreamError: shapes or dtypes don't match.
        ContextError: the slices ran in an order that doesn't allow this one.
    """
    query, key, value = _autocast(query, key, value)
    moved = site.exchange
    is_whole = site.ranges.end - site.ranges.start == site.store.length
    if moved is None or not moved.moves_heads(query, key, is_whole):
        moved = None
    else:
        query, key, value = moved.heads_for_tokens(query, key, value)
        sinks = None if sinks is None else moved.own_heads(sinks)
        site = site._replace(exchange=None)
    asked = _selecting(site.here, selected)
    _check(query, key, value, sinks, asked.ranges)
    backend = next(kind for kind in BACKENDS if kind.takes(query, value, asked))
    value_width = value.shape[-1]
    multiple = backend.width_multiple
    if multiple is not None and (value_width % multiple or value_width != query.shape[-1]):
        width = ceil(max(query.shape[-1], value_width) / multiple) * multiple
        query, key, value = (_padded(tensor, width) for tensor in (query, key, value))
    output: Tensor = _slice_attention(query, key, value, sinks, selected, site, backend)
    output = output if output.shape[-1] == value_width else output[..., :value_width]
    return output if moved is None else moved.tokens_for_heads(output)


def _padded(tensor: Tensor, width: int) -> Tensor:
    # Zeros add nothing to a score and append only zeros to an output.
    return tensor if width == tensor.shape[-1] else F.pad(tensor, (0, width - tensor.shape[-1]))


def _selecting(site: AttentionSite, selected: Tensor | None) -> AttentionSite:
    # The graph keeps the selected keys as it keeps the query, and may drop them as such.
    return site if selected is None else site._replace(selected=selected)


class _SliceAttention(torch.autograd.Function):
    """Attends to the store after writing it; backward adds to the gradients of all keys it read (rules 2 and 5).

    forward   K, V    |  0  |  1  | [2] |        slice 2 writes its keys and reads 0, 1, 2
    backward  dK, dV  | += 2| += 2| own |        slice 2 adds to 0, 1, 2; then 2 is final and returned

    Where each rank has some tokens of the slice and the keys of all, the slice's keys are gathered before they are
    written, and all ranks' parts of its gradients are summed once they are final, in float32 or wider.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor | None,
        selected: Tensor | None,
        site: AttentionSite,
        backend: type[AttentionBackend],
    ) -> Tensor:
        if site.exchange is not None and not site.store.can_replay(site.call):
            key, value = site.exchange.gather_keys(key, value)
        here = _selecting(site.here, selected)
        blocks = site.store.write_keys(site.call, key, value, site.ranges, here.ranges)
        output, logsumexp = site.store.attend(lambda: _attend(query, blocks, sinks, backend, here))
        ctx.save_for_backward(query, output, logsumexp, sinks, selected)
        ctx.site, ctx.backend = site, backend
        return output

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        query, output, logsumexp, sinks, selected = ctx.saved_tensors
        site: AttentionSite = ctx.site
        here = _selecting(site.here, selected)
        exchange = site.exchange
        # The gradient gets other tensors' layout here, once, and not for every rectangle.
        if not grad_output.transpose(1, 2).is_contiguous():
            grad_output = grad_output.transpose(1, 2).contiguous().transpose(1, 2)
        queries = QueryState(query, output, logsumexp, grad_output)
        with _without_autocast(query):
            grad_query: Tensor | None = None
            finals = list[Tensor]()
            for block in site.store.key_gradients(site.call, site.ranges, here.ranges):
                computing = ctx.backend(here if block.ranges is here.ranges else _within(here, block))
                sums = KeySums(*block.sums)
                grad_query, *made = computing.differentiate(queries, block.key, block.value, sums, grad_query)
                # Only the first block has the slice's own keys, whose gradients a kernel may have finished.
                finals = finals or made
            assert grad_query is not None, "the first block has the queries' own keys"
            grad_sinks = None if sinks is None else _sink_gradient(queries, sinks)
        own = site.store.finish(site.call, site.ranges)
        if not finals:
            if exchange:
                own = exchange.reduce_scatter(*(total.to(logsumexp.dtype) for total in own))
            finals = [_copy(total, query.dtype) for total in own]
        return grad_query.to(query.dtype), *finals, grad_sinks, None, None, None


_slice_attention = direct_apply(_SliceAttention)


def _without_autocast(query: Tensor) -> AbstractContextManager[object]:
    """Switches autocast off, where it is on."""
    device = query.device.type
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext()


def _attend(
    query: Tensor,
    blocks: Iterator[KeyBlock],
    sinks: Tensor | None,
    backend: type[AttentionBackend],
    site: AttentionSite,
) -> AttentionResult:
    """Returns the attention to the keys of all blocks, merged."""
    with _without_autocast(query):
        result: AttentionResult | None = None
        for block in blocks:
            # Of a store on the device there is one block, with all that the slice sees.
            computing = backend(site if block.ranges is site.ranges else _within(site, block))
            result = computing.attend(query, block.key, block.value, result)
        assert result is not None, "the first block has the queries' own keys"
        output, logsumexp = result
        if sinks is not None:
            output, logsumexp = _with_sinks(output, logsumexp, sinks)
    return output.to(query.dtype), logsumexp


def _within(site: AttentionSite, block: KeyBlock) -> AttentionSite:
    """Returns the attention to one block on the host alone."""
    selected = None if site.selected is None else site.selected - block.start
    return site._replace(ranges=block.ranges, selected=selected, seed=site.seed.part(block.start))


def _copy(sums: Tensor, dtype: torch.dtype) -> Tensor:
    # A view would keep the buffers of the whole sequence.
    return sums.transpose(1, 2).to(dtype, memory_format=torch.contiguous_format, copy=True).transpose(1, 2)


def _with_sinks(output: Tensor, logsumexp: Tensor, sinks: Tensor) -> AttentionResult:
    """Merges a key of score `sink` and value 0: lse' = log(e^lse + e^sink), O' = e^(lse - lse') O."""
    sink = sinks.to(logsumexp.dtype)[:, None]  # (H,1)
    return output * torch.sigmoid(logsumexp - sink)[..., None], torch.logaddexp(logsumexp, sink)


def _sink_gradient(queries: QueryState, sinks: Tensor) -> Tensor:
    """Returns -sum of P_sink * rowsum(dO * O) over batch and queries, with P_sink = e^(sink - lse)."""
    wide = queries.logsumexp.dtype
    probs = (sinks.to(wide)[:, None] - queries.logsumexp).exp()  # (B,H,T)
    delta = (queries.grad_output.to(wide) * queries.output).sum(-1)  # (B,H,T)
    return -(probs * delta).sum((0, 2)).to(sinks.dtype)


def _autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Casts as autocast does for PyTorch's own attention."""
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(t if t.dtype == torch.float64 else t.to(dtype) for t in tensors)


def _check(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, ranges: KeyRanges) -> None:
    batch, heads, length, width = query.shape
    fits = key.shape == (batch, key.shape[1], length, width) and value.shape[:3] == key.shape[:3]
    if not fits or heads % key.shape[1]:
        raise SlipstreamError(
            f"{_shapes(query, key, value)}; give (B,H,T,D), (B,Hkv,T,D), (B,Hkv,T,Dv), H a multiple of Hkv"
        )
    if length != ranges.end - ranges.start or ranges.num_rows not in (1, batch):
        raise SlipstreamError(
            f"{_shapes(query, key, value)}; the key ranges are of {ranges.num_rows} rows and {ranges}"
        )
    if not query.dtype == key.dtype == value.dtype:
        raise SlipstreamError(f"query is {query.dtype}, key {key.dtype}, value {value.dtype}: give one dtype")
    if sinks is not None and sinks.shape != (heads,):
        raise SlipstreamError(f"sinks have shape {tuple(sinks.shape)}: give one logit per head, ({heads},)")


def _shapes(query: Tensor, key: Tensor, value: Tensor) -> str:
    return f"query {tuple(query.shape)}, key {tuple(key.shape)}, value {tuple(value.shape)}"


def read_prefix(
    key: Tensor, value: Tensor, store: ContextStore, call: Hashable, ranges: KeyRanges
) -> tuple[Tensor, Tensor]:
    """Adds a slice's keys and values to the store and returns those of all tokens up to its end.

    Over all slices, the gradients of key and value are those of unsliced attention. Not collective.

    Args:
        key: (B, Hkv, T, D), of the slice [ranges.start, ranges.end) of the sequence.
        value: (B, Hkv, T, Dv).
        store: the microbatch's on this stage.
        call: identifies this attention within the stage, the same for all slices.
        ranges: which keys each query sees. Those before the first that any query sees are zeros.

    Returns:
        (B, Hkv, ranges.end, D) and (B, Hkv, ranges.end, Dv).

    Raises:
        ContextError: the slices ran in an order that doesn't allow this one.
        SlipstreamError: the store has them on the host, a block for each slice.
    """
    store.check_on_device("attention that reads the keys and values of all tokens by code of the model")

    # Reads the store after writing it; backward adds to the gradients of all keys it read (rules 2 and 5).
    #
    # forward   K, V    |  0  |  1  | [2] |        slice 2 writes its keys and returns 0, 1, 2
    # backward  dK, dV  | += 2| += 2| own |        slice 2 adds to 0, 1, 2; then 2 is final and returned

    def forward(key: Tensor, value: Tensor) -> list[Tensor]:
        return [_up_to(ranges, buffer) for buffer in store.write(call, key, value, ranges)]

    def backward(*gradients: Tensor) -> list[Tensor]:
        (seen,) = store.key_gradients(call, ranges, ranges)
        for total, gradient in zip(seen.sums, gradients, strict=True):
            total += gradient[:, :, ranges.first :]
        sums = store.finish(call, ranges)
        return [part.to(gradient.dtype, copy=True) for part, gradient in zip(sums, gradients, strict=True)]

    keys, values = with_backward(forward, backward, key, value)
    return keys, values


def _up_to(ranges: KeyRanges, buffer: Tensor) -> Tensor:
    """Copies a sequence's tokens that a slice sees: buffers change later, and those before it may be unwritten."""
    prefix = buffer[:, :, : ranges.end].clone(memory_format=torch.contiguous_format)
    prefix[:, :, : ranges.first] = 0
    return prefix
