r"""Attention kernels: those of GPUs, FlashAttention's packages, PyTorch's for CPUs, and plain formulas.

The fused attention kernels of a GPU, on a slice with a regular mask: FlashAttention in one call, cuDNN's in two.

Both return the log-sum-exp, so that parts can be merged, and take that of the merged parts in backward. FlashAttention
aligns causal masks and windows lower-right, as a slice needs them. cuDNN's kernel, as PyTorch offers it, aligns them
upper-left; so a slice is its past, which every query sees whole, and its own keys, a causal square:

             first     start     end
               |---------|----|----|
               |         | \       |     F: two outputs, merged by their log-sum-exps
               |  past   |    \    |     B: each part with the merged output and log-sum-exp
               |         |       \ |
               |---------|---------|
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from slipstream.attention.backend import AttentionSite, QueryState, TileGradients
from slipstream.attention.kernel_passes import KeyGradients, merged
from slipstream.attention.masks import RegularMask, ScoreRectangle, ScoreTile

_aten = torch.ops.aten


class FusedKernel(Protocol):
    """Attention under a regular mask, of whose keys it is given all; tensors are (B, heads, tokens, D)."""

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, mask: RegularMask, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Returns the output, in the query's dtype, and the log-sum-exp (B,H,T), float32."""
        ...

    def backward(
        self, queries: QueryState, key: Tensor, value: Tensor, mask: RegularMask, scale: float
    ) -> tuple[Tensor, list[KeyGradients]]:
        """Returns the query's gradient, in its dtype, and those of the keys and values, in parts."""
        ...


class FlashKernel:
    """FlashAttention as PyTorch has it: version 2, unless another one was activated."""

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, mask: RegularMask, scale: float
    ) -> tuple[Tensor, Tensor]:
        """See `FusedKernel`."""
        output, logsumexp, *_ = _aten._flash_attention_forward(
            query.transpose(1, 2),  # (B,T,H,D)
            key.transpose(1, 2),  # (B,S,Hkv,D)
            value.transpose(1, 2),
            return_debug_mask=False,
            **self._settings(query, key, mask, scale),
        )
        return output.transpose(1, 2), logsumexp

    def backward(
        self, queries: QueryState, key: Tensor, value: Tensor, mask: RegularMask, scale: float
    ) -> tuple[Tensor, list[KeyGradients]]:
        """See `FusedKernel`."""
        query, out, lse, grad_out = queries
        no_dropout = query.new_empty(0)  # instead of its random state
        grad_query, grad_key, grad_value = _aten._flash_attention_backward(
            grad_out.transpose(1, 2),
            query.transpose(1, 2),
            key.transpose(1, 2),
            value.transpose(1, 2),
            out.transpose(1, 2),
            lse.contiguous(),
            rng_state=no_dropout,
            unused=no_dropout,
            **self._settings(query, key, mask, scale),
        )
        return grad_query.transpose(1, 2), [KeyGradients(0, grad_key.transpose(1, 2), grad_value.transpose(1, 2))]

    def _settings(self, query: Tensor, key: Tensor, mask: RegularMask, scale: float) -> dict[str, Any]:
        """Returns the keyword arguments that the forward and the backward kernel have in common."""
        return {
            "cum_seq_q": None,
            "cum_seq_k": None,
            "max_q": query.shape[2],
            "max_k": key.shape[2],
            "dropout_p": 0.0,
            "is_causal": True,
            "scale": scale,
            "window_size_left": None if mask.window is None else mask.window - 1,
            "window_size_right": 0,
        }


class CudnnKernel:
    """cuDNN's fused attention: causal masks without a window, of heads of up to 128 numbers."""

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, mask: RegularMask, scale: float
    ) -> tuple[Tensor, Tensor]:
        """See `FusedKernel`."""
        output, logsumexp = self._part(query, key[:, :, mask.past :], value[:, :, mask.past :], True, scale)
        if not mask.past:
            return output, logsumexp
        past, past_logsumexp = self._part(query, key[:, :, : mask.past], value[:, :, : mask.past], False, scale)
        return merged(output, logsumexp, past, past_logsumexp)

    def backward(
        self, queries: QueryState, key: Tensor, value: Tensor, mask: RegularMask, scale: float
    ) -> tuple[Tensor, list[KeyGradients]]:
        """See `FusedKernel`."""
        grad_query, own = self._part_backward(queries, key, value, slice(mask.past, None), True, scale)
        if not mask.past:
            return grad_query, [own]
        more, past = self._part_backward(queries, key, value, slice(0, mask.past), False, scale)
        return grad_query.add_(more), [own, past]

    def _part(self, query: Tensor, key: Tensor, value: Tensor, is_causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        output, logsumexp, *_ = _aten._scaled_dot_product_cudnn_attention(
            query, key, value, None, True, 0.0, is_causal, False, scale=scale
        )
        return output, logsumexp.squeeze(-1)

    def _part_backward(
        self, queries: QueryState, key: Tensor, value: Tensor, keys: slice, is_causal: bool, scale: float
    ) -> tuple[Tensor, KeyGradients]:
        query, out, lse, grad_out = queries
        key, value = key[:, :, keys], value[:, :, keys]
        no_dropout = torch.empty((), dtype=torch.int64, device=query.device)  # instead of its random state
        lengths = None, None, query.shape[2], key.shape[2]
        grad_query, grad_key, grad_value = _aten._scaled_dot_product_cudnn_attention_backward(
            grad_out,
            query,
            key,
            value,
            out,
            lse.contiguous()[..., None],
            no_dropout,
            no_dropout,
            None,
            *lengths,
            0.0,
            is_causal,
            scale=scale,
        )
        return grad_query, KeyGradients(keys.start, grad_key, grad_value)


class HeadsApart:
    """A kernel whose gradients of keys are those of each query head by itself, of one sequence.

    Where several query heads share a key head, a kernel rounds the gradient of each, and again their sum. Here the
    heads of a group are rows of a batch that see the same keys, and `add_gradients` sums them before it rounds.
    """

    def __init__(self, kernel: FusedKernel) -> None:
        self.kernel = kernel
        self.forward = kernel.forward

    def backward(
        self, queries: QueryState, key: Tensor, value: Tensor, mask: RegularMask, scale: float
    ) -> tuple[Tensor, list[KeyGradients]]:
        """See `FusedKernel`."""
        (rows, heads, length, width), key_heads = queries.query.shape, key.shape[1]
        if rows > 1:
            return self.kernel.backward(queries, key, value, mask, scale)
        # (G,Hkv,T,..): query head h reads key head h // G
        apart = (each.view(key_heads, -1, *each.shape[2:]).transpose(0, 1) for each in queries)
        key, value = (each.expand(heads // key_heads, -1, -1, -1) for each in (key, value))
        grad_query, parts = self.kernel.backward(QueryState(*apart), key, value, mask, scale)
        return grad_query.permute(2, 1, 0, 3).reshape(rows, length, heads, width).transpose(1, 2), parts


_FLASH = FlashKernel()


@dataclass(frozen=True)
class FusedCUDA:
    """Computes a tile by a fused kernel of a GPU; by the masked math where its mask is neither causal nor a window."""

    site: AttentionSite
    width_multiple: ClassVar[int] = 16  # as of `FlexCUDA`, which other slices of a sequence may need

    def forward(self, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, tile: ScoreTile) -> None:
        """See `attention_backend`."""
        if tile.irregular:
            MaskedMath(self.site).forward(query, key, value, out, lse, tile)
            return
        found_out, found_lse = _FLASH.forward(query, key, value, tile.regular, self.site.scale)
        out.copy_(found_out)
        lse.copy_(found_lse)

    def backward(self, queries: QueryState, key: Tensor, value: Tensor, grads: TileGradients, tile: ScoreTile) -> None:
        """See `attention_backend`."""
        if tile.irregular:
            MaskedMath(self.site).backward(queries, key, value, grads, tile)
            return
        grad_query, parts = _FLASH.backward(queries, key, value, tile.regular, self.site.scale)
        grads.query.add_(grad_query)
        for part in parts:
            grads.key.add_(part.key)
            grads.value.add_(part.value)


_log = logging.getLogger(__name__)


class Flash3Kernel:
    """FlashAttention-3 for Hopper, by the operators that the package flash_attn_interface registers."""

    def __init__(self, package: Any) -> None:
        self._ops = torch.ops.flash_attn_3  # there since the package was imported
        if not hasattr(self._ops, "fwd") or not hasattr(self._ops, "bwd"):
            raise ImportError(f"{package.__name__} has no operators flash_attn_3.fwd and bwd")

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, mask: RegularMask, scale: float
    ) -> tuple[Tensor, Tensor]:
        """See `FusedKernel`."""
        output, logsumexp, *_ = self._ops.fwd(*_tokens_first(query, key, value), **self._settings(mask, scale))
        return output.transpose(1, 2), logsumexp

    def backward(
        self, queries: QueryState, key: Tensor, value: Tensor, mask: RegularMask, scale: float
    ) -> tuple[Tensor, list[KeyGradients]]:
        """See `FusedKernel`."""
        query, output, logsumexp, grad_output = queries
        inputs = _tokens_first(query, key, value)
        found = [torch.empty_like(each) for each in inputs]
        self._ops.bwd(
            *_tokens_first(grad_output),
            *inputs,
            *_tokens_first(output),
            logsumexp.contiguous(),
            **dict(zip(("dq", "dk", "dv"), found, strict=True)),
            deterministic=torch.are_deterministic_algorithms_enabled(),
            **self._settings(mask, scale),
        )
        return _heads_first(*found)

    def _settings(self, mask: RegularMask, scale: float) -> dict[str, Any]:
        left = -1 if mask.window is None else mask.window - 1
        return {"softmax_scale": scale, "is_causal": True, "window_size_left": left, "window_size_right": 0}


class Flash4Kernel:
    """FlashAttention-4 for Hopper and Blackwell, by the functions of its module; compiled when it first runs."""

    def __init__(self, package: Any) -> None:
        self._forward: Callable[..., tuple[Tensor, Tensor]] = package._flash_attn_fwd
        self._backward: Callable[..., tuple[Tensor, Tensor, Tensor]] = package._flash_attn_bwd

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, mask: RegularMask, scale: float
    ) -> tuple[Tensor, Tensor]:
        """See `FusedKernel`."""
        inputs = _tokens_first(query, key, value)
        output, logsumexp = self._forward(*inputs, return_lse=True, **self._settings(mask, scale))
        return output.transpose(1, 2), logsumexp

    def backward(
        self, queries: QueryState, key: Tensor, value: Tensor, mask: RegularMask, scale: float
    ) -> tuple[Tensor, list[KeyGradients]]:
        """See `FusedKernel`."""
        query, output, logsumexp, grad_output = queries
        tensors = _tokens_first(query, key, value, output, grad_output)
        return _heads_first(*self._backward(*tensors, logsumexp.contiguous(), **self._settings(mask, scale)))

    def _settings(self, mask: RegularMask, scale: float) -> dict[str, Any]:
        window = {} if mask.window is None else {"window_size_left": mask.window - 1, "window_size_right": 0}
        return {"softmax_scale": scale, "causal": True, **window}


class _Package(NamedTuple):
    """An installed module, and the major compute capabilities for which it has kernels."""

    module: str
    capabilities: tuple[int, ...]
    kernel: Callable[[Any], FusedKernel]
    is_deterministic: bool


_PACKAGES: Mapping[str, _Package] = {
    "flash 3": _Package("flash_attn_interface", (9,), Flash3Kernel, is_deterministic=True),
    "flash 4": _Package("flash_attn.cute.interface", (9, 10), Flash4Kernel, is_deterministic=False),
}


def package_kernels(capability: int) -> dict[str, FusedKernel]:
    """Returns, by name, the kernels of installed packages that a GPU of this major compute capability can run now."""
    must_repeat = torch.are_deterministic_algorithms_enabled()
    usable = {
        name: _installed(name)
        for name, package in _PACKAGES.items()
        if capability in package.capabilities and (package.is_deterministic or not must_repeat)
    }
    return {name: kernel for name, kernel in usable.items() if kernel is not None}


@cache
def _installed(name: str) -> FusedKernel | None:
    """Returns a package's kernel, or None where it isn't installed or can't be imported."""
    package = _PACKAGES[name]
    try:
        if find_spec(package.module.partition(".")[0]) is None:
            return None
        return package.kernel(importlib.import_module(package.module))
    except Exception as error:  # of a package that may do anything
        _log.info("FlashAttention of %s isn't used: %s: %s", package.module, type(error).__name__, error)
        return None


def _tokens_first(*tensors: Tensor) -> list[Tensor]:
    """Returns (B,T,H,D) of (B,H,T,D)."""
    return [each.transpose(1, 2) for each in tensors]


def _heads_first(grad_query: Tensor, grad_key: Tensor, grad_value: Tensor) -> tuple[Tensor, list[KeyGradients]]:
    """Returns the gradients as a `FusedKernel` does."""
    return grad_query.transpose(1, 2), [KeyGradients(0, grad_key.transpose(1, 2), grad_value.transpose(1, 2))]


# A thread's work in backward fits in its cache (2 MB): K, V, dK, dV of 2 heads and 1024 keys, or of more heads where
# there are fewer keys. This limits the temporary dK and dV, and at 4096 tokens in 8 slices it takes 0.96-0.99 of the
# time of all heads together.
KEYS_AT_ONCE = 1024
ROWS_AT_ONCE = 2 * KEYS_AT_ONCE  # keys times heads, per thread


def merge_(output: Tensor, logsumexp: Tensor, other: Tensor, other_logsumexp: Tensor) -> None:
    """Combines the attention over two disjoint sets of keys, in place of the first.

    lse = log(e^lse1 + e^lse2),   O = e^(lse1 - lse) O1 + e^(lse2 - lse) O2
    """
    weight = torch.sigmoid(other_logsumexp - logsumexp)  # e^(lse2 - lse)
    output.lerp_(other.to(output.dtype), weight[..., None])
    logsumexp.copy_(torch.logaddexp(logsumexp, other_logsumexp))


@dataclass(frozen=True)
class FlashCPU:
    """Computes a tile rectangle by rectangle, as the CPU kernel handles causal squares, full rectangles and masks."""

    site: AttentionSite
    width_multiple: ClassVar[int] = 1

    def forward(self, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, tile: ScoreTile) -> None:
        """See `attention_backend`."""
        for part in tile.parts:
            part_out, part_lse = _aten._scaled_dot_product_flash_attention_for_cpu(
                _fold(query[:, :, part.queries], key, part),
                key[:, :, part.keys],
                value[:, :, part.keys],
                is_causal=part.causal,
                attn_mask=_mask(query, tile, part),
                scale=self.site.scale,
            )
            own_out, own_lse = out[:, :, part.queries], lse[:, :, part.queries]
            part_out, part_lse = part_out.reshape(own_out.shape), part_lse.reshape(own_lse.shape)
            if part.diagonal:
                own_out.copy_(part_out)
                own_lse.copy_(part_lse)
            else:
                merge_(own_out, own_lse, part_out, part_lse)

    def backward(self, queries: QueryState, key: Tensor, value: Tensor, grads: TileGradients, tile: ScoreTile) -> None:
        """See `attention_backend`."""
        for part in tile.parts:
            mask = _mask(queries.query, tile, part)
            for keys in _pieces(part):
                total = TileGradients(grads.query[:, :, part.queries], grads.key[:, :, keys], grads.value[:, :, keys])
                self._backward(queries.rows(part.queries), key[:, :, keys], value[:, :, keys], total, part, mask)

    def _backward(
        self,
        queries: QueryState,
        key: Tensor,
        value: Tensor,
        total: TileGradients,
        part: ScoreRectangle,
        mask: Tensor | None,
    ) -> None:
        """Adds the gradients of some queries and keys; with the merged output and log-sum-exp the parts are
        independent."""
        num_rows, num_heads, num_keys, _ = key.shape
        group = queries.query.shape[1] // num_heads
        at_once = max(1, ROWS_AT_ONCE * torch.get_num_threads() // (num_keys * num_rows))
        for head in range(0, num_heads, at_once):
            heads, key_heads = slice(head * group, (head + at_once) * group), slice(head, head + at_once)
            query, out, lse, grad_out = (_fold(each, key[:, key_heads], part) for each in queries.heads(heads))
            dq, dk, dv = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
                grad_out,
                query,
                key[:, key_heads],
                value[:, key_heads],
                out,
                lse,
                dropout_p=0.0,
                is_causal=part.causal,
                attn_mask=mask,
                scale=self.site.scale,
            )
            grad_query = total.query[:, heads]
            grad_query.add_(dq.reshape(grad_query.shape))
            total.key[:, key_heads].add_(dk)
            total.value[:, key_heads].add_(dv)


def _fold(each: Tensor, key: Tensor, part: ScoreRectangle) -> Tensor:
    """Turns (B,H,T,...) into (B,Hkv,G*T,...) where all keys are seen: a key head's queries become one matrix."""
    if part.diagonal or part.masked or each.shape[1] == key.shape[1]:
        return each
    return each.reshape(each.shape[0], key.shape[1], -1, *each.shape[3:])


def _pieces(part: ScoreRectangle) -> list[slice]:
    """Returns the rectangle's keys, divided where that would not divide a mask."""
    if part.diagonal or part.masked:
        return [part.keys]
    starts = range(part.keys.start, part.keys.stop, KEYS_AT_ONCE)
    return [slice(start, min(start + KEYS_AT_ONCE, part.keys.stop)) for start in starts]


def _mask(query: Tensor, tile: ScoreTile, part: ScoreRectangle) -> Tensor | None:
    """Returns what the kernel adds to a masked rectangle's scores: 0 where a key is seen."""
    if not part.masked:
        return None
    seen = tile.mask(part, query.device)
    return query.new_zeros(seen.shape).masked_fill_(~seen, -torch.inf)


SCORES_AT_ONCE = 1 << 24  # limits memory: a long tile is computed some queries at a time


@dataclass(frozen=True)
class MaskedMath:
    """Scores s = scale * q.k, or softcap * tanh(scale * q.k / softcap); P = exp(s - lse); O = (keep * P) V.

    `keep` is attention dropout's 0 or 1/(1-p), drawn from the seed and the tile's index, and drawn again in backward.
    In backward dS = P * (keep * dO V^T - rowsum(dO * O)), times 1 - (s / softcap)^2 for tanh.
    """

    site: AttentionSite
    selected: Tensor | None = None  # (B,T,k) the keys that each query sees of those in its range; None: all
    width_multiple: ClassVar[int | None] = None

    def forward(self, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, tile: ScoreTile) -> None:
        """See `attention_backend`."""
        query, key, value = (each.to(out.dtype) for each in (query, key, value))
        generator = self._generator(query.device, tile)
        for block, seen in self._blocks(query, key, tile):
            scores = self._scores(query[:, :, block], key, seen)  # (B,H,t,S)
            lse[:, :, block] = scores.logsumexp(-1)  # (B,H,t)
            probs = scores.sub_(lse[:, :, block, None]).exp_()
            out[:, :, block] = _times(self._dropped(probs, generator), value)

    def backward(self, queries: QueryState, key: Tensor, value: Tensor, grads: TileGradients, tile: ScoreTile) -> None:
        """See `attention_backend`."""
        wide = grads.query.dtype
        key, value = key.to(wide), value.to(wide)
        generator = self._generator(key.device, tile)
        for block, seen in self._blocks(queries.query, key, tile):
            query, out, lse, grad_out = (each.to(wide) for each in queries.rows(block))
            scores = self._scores(query, key, seen)  # (B,H,t,S)
            probs = (scores - lse[..., None]).exp_()
            keep = self._dropped(torch.ones_like(probs), generator)
            grads.value.add_(_transposed_times(probs * keep, grad_out, value))
            grad_scores = _times(grad_out, value.mT).mul_(keep)
            grad_scores.sub_((grad_out * out).sum(-1, keepdim=True)).mul_(probs).mul_(self.site.scale)
            if self.site.softcap is not None:
                grad_scores.mul_(1 - (scores.masked_fill_(~seen, 0) / self.site.softcap) ** 2)
            grads.query[:, :, block] += _times(grad_scores, key)
            grads.key.add_(_transposed_times(grad_scores, query, key))

    def _scores(self, query: Tensor, key: Tensor, seen: Tensor) -> Tensor:
        scores = _times(query, key.mT).mul_(self.site.scale)
        if self.site.softcap is not None:
            scores.div_(self.site.softcap).tanh_().mul_(self.site.softcap)
        return scores.masked_fill_(~seen, -torch.inf)

    def _blocks(self, query: Tensor, key: Tensor, tile: ScoreTile) -> Iterator[tuple[slice, Tensor]]:
        """Yields some queries at a time, with a mask (t,S) or (B,1,t,S) of the keys they see."""
        batch, heads, length, _ = query.shape
        rows = max(1, SCORES_AT_ONCE // (batch * heads * key.shape[2]))
        for start in range(0, length, rows):
            block = slice(start, min(start + rows, length))
            seen = tile.mask(ScoreRectangle(block, slice(0, key.shape[2])), query.device)
            yield block, seen if self.selected is None else seen & self._is_selected(self.selected, tile, block)

    def _is_selected(self, selected: Tensor, tile: ScoreTile, block: slice) -> Tensor:
        """Returns which of the tile's keys were selected for some of its queries, (B,1,t,S)."""
        first = tile.start - self.site.ranges.start
        keys = selected[tile.rows, first + block.start : first + block.stop].long()  # (B,t,k)
        length = max(tile.end, self.site.store.length)
        found = torch.zeros(*keys.shape[:2], length, dtype=torch.bool, device=keys.device).scatter_(2, keys, True)
        return found[:, None, :, tile.first : tile.end]

    def _generator(self, device: torch.device, tile: ScoreTile) -> torch.Generator | None:
        if self.site.dropout == 0.0:
            return None
        return self.site.draws.generator(device, self.site.seed.part(tile.index))

    def _dropped(self, probs: Tensor, generator: torch.Generator | None) -> Tensor:
        if self.site.dropout == 0.0:
            return probs
        draw = torch.rand(probs.shape, generator=generator, device=probs.device, dtype=probs.dtype)
        return probs.mul_((draw >= self.site.dropout) / (1 - self.site.dropout))


def _times(left: Tensor, right: Tensor) -> Tensor:
    """Multiplies (B,H,t,n) x (B,Hkv,n,m) -> (B,H,t,m): a group of heads shares one key head."""
    batch, heads, rows, width = left.shape
    folded = left.reshape(batch, right.shape[1], -1, width)  # (B,Hkv,G*t,n)
    return (folded @ right).view(batch, heads, rows, -1)


def _transposed_times(left: Tensor, right: Tensor, key: Tensor) -> Tensor:
    """Multiplies (B,H,t,n), (B,H,t,m) -> (B,Hkv,n,m): summed over the queries, and over the heads of a group."""
    left, right = (each.reshape(each.shape[0], key.shape[1], -1, each.shape[3]) for each in (left, right))
    return left.mT @ right
