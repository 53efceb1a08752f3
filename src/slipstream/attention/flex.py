"""FlexAttention for masks and scores that the fused kernels don't know: packed documents, chunks, soft caps.

PyTorch compiles a kernel for the mask and the change of scores when they are first used, in some ten seconds, and skips
the blocks of 128 x 128 scores that nobody sees.
"""

from __future__ import annotations

import logging
from functools import cache, lru_cache
from importlib.util import find_spec
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from slipstream.attention.backend import AttentionBackend, AttentionSite, KeySums, QueryState, added, merged_with
from slipstream.attention.fused_cuda import fits_kernels
from slipstream.attention.masked_math import MaskedMath
from slipstream.attention.masks import KeyRanges
from slipstream.attention.store import AttentionResult, ContextStore

_log = logging.getLogger(__name__)
_BLOCK = 128
_MOST_ERROR = 0.03  # largest error allowed on a small slice in bfloat16, relative to the largest number


@cache
def flex_works(device: torch.device, softcap: float | None) -> bool:
    """Returns whether compiled kernels agree with masked math on a small slice; logs where they don't."""
    if find_spec("triton") is None:
        return False
    try:
        error = _error(device, softcap)
    # A compiler may raise anything.
    except Exception as problem:
        _log.info("FlexAttention can't be compiled, so masks are computed without it: %s", problem)
        return False
    if error > _MOST_ERROR:
        _log.info("FlexAttention is off by %.1g on %s, so masks are computed without it", error, device)
    return error <= _MOST_ERROR


class FlexCUDA(AttentionBackend):
    """Computes a whole slice, in the dtype of the query."""

    width_multiple: ClassVar[int | None] = 16

    def __init__(self, site: AttentionSite) -> None:
        self.site = site

    @classmethod
    def takes(cls, query: Tensor, value: Tensor, site: AttentionSite) -> bool:
        """See `AttentionBackend`."""
        return fits_kernels(query, value, site) and flex_works(query.device, site.softcap)

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, so_far: AttentionResult | None = None
    ) -> AttentionResult:
        """See `AttentionBackend`."""
        with torch.no_grad():
            return merged_with(so_far, self._run(query.detach(), key.detach(), value.detach()))

    @torch.enable_grad()
    def differentiate(
        self, queries: QueryState, key: Tensor, value: Tensor, sums: KeySums, so_far: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        """See `AttentionBackend`.

        The forward runs again. Its own softmax P' has another log-sum-exp than the slice's, which may have a sink; with
        w = exp(lse' - lse), so that P = w P', the gradients of output and log-sum-exp that make
        dS = P (dP - rowsum(dO O)) are w dO and w (rowsum(dO O') - rowsum(dO O)).
        """
        # `data` has a version of its own: later slices write to the buffers that these are of
        leaves = [tensor.data.requires_grad_() for tensor in (queries.query, key, value)]
        output, logsumexp = self._run(*leaves)
        with torch.no_grad():
            weight = (logsumexp - queries.logsumexp).exp()
            grad = queries.grad_output.float()
            change = (grad * (output.float() - queries.output.float())).sum(-1)
            gradients = (weight[..., None] * grad).to(output.dtype), (weight * change).to(logsumexp.dtype)
        grad_query, grad_key, grad_value = torch.autograd.grad((output, logsumexp), leaves, gradients)
        sums.key.add_(grad_key)
        sums.value.add_(grad_value)
        return (added(so_far, grad_query),)

    def _run(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        cap = self.site.softcap
        output, aux = _compiled()(
            query,
            key,
            value,
            score_mod=None if cap is None else _capped(cap),
            block_mask=_block_mask(self.site.ranges, query.device),
            scale=self.site.scale,
            enable_gqa=query.shape[1] != key.shape[1],
            return_aux=AuxRequest(lse=True),
        )
        return output, aux.lse


@cache
def _compiled() -> Any:
    return torch.compile(flex_attention)


@cache
def _capped(cap: float) -> Any:
    """Returns the scores' change: softcap * tanh(scores / softcap)."""

    def capped(score: Tensor, _row: Tensor, _head: Tensor, _query: Tensor, _key: Tensor) -> Tensor:
        return cap * torch.tanh(score / cap)

    return capped


@lru_cache(maxsize=64)
def _block_mask(ranges: KeyRanges, device: torch.device) -> BlockMask:
    """Returns which blocks of a slice's scores are seen, in part or whole; keys count from the first that is seen."""
    length, num_keys = ranges.end - ranges.start, ranges.keys_end - ranges.first
    first_key = ranges.first_key - ranges.first  # (rows, T)
    past = ranges.start - ranges.first
    # a kernel is compiled for every number that this function knows, so it knows tensors alone
    first_keys = first_key.to(device)
    last_key = torch.tensor(past, device=device)

    def seen(row: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key >= first_keys[row, query]) & (key <= query + last_key)

    def seen_alike(_row: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key >= first_keys[0, query]) & (key <= query + last_key)

    counts, blocks = zip(*_blocks(first_key, past, num_keys), strict=True)
    (some, full), (some_at, full_at) = ([tensor.to(device) for tensor in pair] for pair in (counts, blocks))
    return BlockMask.from_kv_blocks(
        *(some, some_at, full, full_at),
        BLOCK_SIZE=_BLOCK,
        mask_mod=seen if ranges.num_rows > 1 else seen_alike,
        seq_lengths=(length, num_keys),
    )


def _blocks(first_key: Tensor, past: int, num_keys: int) -> list[tuple[Tensor, Tensor]]:
    """Returns number (rows, 1, Q) and indices (rows, 1, Q, K) of the blocks of keys that each block of queries sees in
    part, and of those that all of its queries see whole."""
    rows, length = first_key.shape
    num_blocks, num_key_blocks = -(-length // _BLOCK), -(-num_keys // _BLOCK)
    padded = torch.nn.functional.pad(first_key[:, None].float(), (0, num_blocks * _BLOCK - length), mode="replicate")
    by_block = padded.view(rows, num_blocks, _BLOCK).long()
    begins = torch.arange(num_key_blocks) * _BLOCK  # first key of each block
    # Last visible key of each block of queries.
    last = (torch.arange(1, num_blocks + 1) * _BLOCK).clamp(max=length) - 1 + past
    positions = torch.arange(num_blocks) * _BLOCK + past  # position of each block's first query
    ends = begins + _BLOCK - 1
    touched = (ends >= by_block.amin(-1)[..., None]) & (begins <= last[:, None])  # (rows, Q, K)
    whole = (begins >= by_block.amax(-1)[..., None]) & (ends <= positions[:, None])
    return [_ordered(touched & ~whole), _ordered(whole)]


def _ordered(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Returns how many blocks are chosen, and all blocks, the chosen ones first."""
    order = chosen.int().argsort(dim=-1, descending=True, stable=True)
    return chosen.sum(-1, dtype=torch.int32)[:, None], order.int()[:, None]


def _error(device: torch.device, softcap: float | None) -> float:
    """Returns the largest difference of a slice's output and gradients from masked math in float32, relative to the
    largest number of each."""
    start = 60
    length = 260
    generator = torch.Generator(device).manual_seed(0)
    first_key = torch.stack([torch.arange(length) // period * period for period in (100, 70)])[:, start:]
    site = AttentionSite(ContextStore(length), 0, KeyRanges(first_key, start), 0.2, softcap)
    sizes = (4, length - start), (2, length), (2, length), (4, length - start)
    drawn = [torch.randn(2, *size, 64, device=device, generator=generator).bfloat16() for size in sizes]
    found = _results(FlexCUDA(site), *drawn)
    wanted = _results(MaskedMath(site), *(tensor.float() for tensor in drawn))
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(found, wanted, strict=True))


def _results(backend: AttentionBackend, query: Tensor, key: Tensor, value: Tensor, grad: Tensor) -> list[Tensor]:
    output, logsumexp = backend.attend(query, key, value)
    sums = KeySums(*(torch.zeros_like(tensor, dtype=torch.float32) for tensor in (key, value)))
    queries = QueryState(query, output, logsumexp, grad)
    return [output, *backend.differentiate(queries, key, value, sums), *sums]
