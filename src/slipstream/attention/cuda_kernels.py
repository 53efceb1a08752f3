r"""The fused attention kernels of a GPU, on a slice with a regular mask: FlashAttention in one call, cuDNN's in two.

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

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from slipstream.attention.attention_backend import AttentionSite, QueryState, TileGradients
from slipstream.attention.key_ranges import RegularMask, ScoreTile
from slipstream.attention.masked_math import MaskedMath

_aten = torch.ops.aten


class KeyGradients(NamedTuple):
    """The gradients of some of the keys and values that a kernel was given, in their dtype."""

    first: int  # of the keys
    key: Tensor  # (B,Hkv,n,D)
    value: Tensor


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


def add_gradients(parts: list[KeyGradients], past: int, *totals: Tensor) -> list[Tensor]:
    """Adds the gradients of earlier slices' keys and values to the totals of both; returns the slice's own, complete.

    Totals (B,Hkv,S,D) are in float32, with `past` keys of earlier slices. A slice's own are final with what later
    slices left in them, and are rounded as they are added: one pass where adding and copying took two.
    """
    own = []
    for index, total in enumerate(totals):
        for part in parts:
            gradient = (part.key, part.value)[index]
            end, earlier = part.first + gradient.shape[2], past - part.first
            if earlier > 0:
                total[:, :, part.first : min(past, end)].add_(gradient[:, :, :earlier])
            if end > past:
                left = total[:, :, past:]
                batch, heads, length, width = left.shape
                own.append(gradient.new_empty(batch, length, heads, width).transpose(1, 2))
                torch.add(left, gradient[:, :, max(0, earlier) :], out=own[-1])
    return own


def merged(output: Tensor, logsumexp: Tensor, other: Tensor, other_logsumexp: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the attention over two disjoint sets of keys, in the outputs' dtype but summed in that of the
    log-sum-exps; in three passes over memory."""
    weight = torch.sigmoid(other_logsumexp - logsumexp)  # e^(lse2 - lse), (B,H,T)
    weight = weight.transpose(1, 2).contiguous().transpose(1, 2)[..., None]  # in memory as the outputs are
    total = output * (1 - weight)
    torch.addcmul(total, other, weight, out=output)
    return output, torch.logaddexp(logsumexp, other_logsumexp)


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
