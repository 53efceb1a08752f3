"""PyTorch's flash attention kernels on tiles of a slice: several parts merged on CPU, one call on CUDA."""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.attention.backend import Gradients, Queries
from slipstream.attention.masked_math import MaskedMath
from slipstream.attention.ranges import Part, Tile

# What a thread works on in backward stays in its cache (2 MB): K, V, dK, dV of 2 heads and 1024 keys. It bounds
# the temporary dK and dV, and at 4096 tokens in 8 slices it takes 0.96-0.99 of the time of all heads at once.
HEADS_AT_ONCE = 2  # per thread
KEYS_AT_ONCE = 1024

_aten = torch.ops.aten


def merge_(output: Tensor, logsumexp: Tensor, other: Tensor, other_logsumexp: Tensor) -> None:
    """Attention over two disjoint sets of keys, from the attention over each; in place of the first.

    lse = log(e^lse1 + e^lse2),   O = e^(lse1 - lse) O1 + e^(lse2 - lse) O2
    """
    weight = torch.sigmoid(other_logsumexp - logsumexp)  # e^(lse2 - lse)
    output.lerp_(other.to(output.dtype), weight[..., None])
    logsumexp.copy_(torch.logaddexp(logsumexp, other_logsumexp))


class FlashCPU:
    """The CPU kernel does causal squares, rectangles and masks, so a tile is computed part by part."""

    def __init__(self, scale: float) -> None:
        self.scale = scale

    def width(self, key_width: int, value_width: int) -> int | None:
        """See Backend."""
        return max(key_width, value_width)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, output: Tensor, logsumexp: Tensor, tile: Tile) -> None:
        """See Backend."""
        for part in tile.parts:
            part_out, part_lse = _aten._scaled_dot_product_flash_attention_for_cpu(
                _fold(query[:, :, part.queries], key, part),
                key[:, :, part.keys],
                value[:, :, part.keys],
                is_causal=part.causal,
                attn_mask=_mask(query, tile, part),
                scale=self.scale,
            )
            out, lse = output[:, :, part.queries], logsumexp[:, :, part.queries]
            part_out, part_lse = part_out.reshape(out.shape), part_lse.reshape(lse.shape)
            if part.diagonal:
                out.copy_(part_out)
                lse.copy_(part_lse)
            else:
                merge_(out, lse, part_out, part_lse)

    def backward(self, queries: Queries, key: Tensor, value: Tensor, gradients: Gradients, tile: Tile) -> None:
        """See Backend."""
        group = queries.query.shape[1] // key.shape[1]
        num_heads = max(1, HEADS_AT_ONCE * torch.get_num_threads() // key.shape[0])
        for head in range(0, key.shape[1], num_heads):
            heads, key_heads = slice(head * group, (head + num_heads) * group), slice(head, head + num_heads)
            total = Gradients(gradients.query[:, heads], gradients.key[:, key_heads], gradients.value[:, key_heads])
            self._backward(queries.heads(heads), key[:, key_heads], value[:, key_heads], total, tile)

    def _backward(self, queries: Queries, key: Tensor, value: Tensor, total: Gradients, tile: Tile) -> None:
        """Some heads; the merged output and log-sum-exp make the parts independent of each other."""
        for part in tile.parts:
            query, out, lse, grad_out = (_fold(each, key, part) for each in queries.rows(part.queries))
            grad_query = total.query[:, :, part.queries]
            for keys in _pieces(part):
                dq, dk, dv = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
                    grad_out,
                    query,
                    key[:, :, keys],
                    value[:, :, keys],
                    out,
                    lse,
                    dropout_p=0.0,
                    is_causal=part.causal,
                    attn_mask=_mask(query, tile, part),
                    scale=self.scale,
                )
                grad_query.add_(dq.reshape(grad_query.shape))
                total.key[:, :, keys].add_(dk)
                total.value[:, :, keys].add_(dv)


def _fold(each: Tensor, key: Tensor, part: Part) -> Tensor:
    """(B,H,T,...) -> (B,Hkv,G*T,...) where all keys are seen: a key head's queries become one matrix."""
    if part.diagonal or part.masked or each.shape[1] == key.shape[1]:
        return each
    return each.reshape(each.shape[0], key.shape[1], -1, *each.shape[3:])


def _pieces(part: Part) -> list[slice]:
    """The part's keys; in pieces where no mask would have to be cut along."""
    if part.diagonal or part.masked:
        return [part.keys]
    starts = range(part.keys.start, part.keys.stop, KEYS_AT_ONCE)
    return [slice(start, min(start + KEYS_AT_ONCE, part.keys.stop)) for start in starts]


def _mask(query: Tensor, tile: Tile, part: Part) -> Tensor | None:
    """What the kernel adds to a masked part's scores: 0 where a key is seen."""
    if not part.masked:
        return None
    seen = tile.mask(part, query.device)
    return query.new_zeros(seen.shape).masked_fill_(~seen, -torch.inf)


class FlashCUDA:
    """The CUDA kernel aligns causal and sliding windows lower-right, so that most tiles are one call.

    Query t of T sees the keys S - T + t - window + 1 .. S - T + t of S. Other masks go to the masked math.
    """

    def __init__(self, scale: float) -> None:
        self.scale = scale
        self._math = MaskedMath(scale)

    def width(self, key_width: int, value_width: int) -> int | None:
        """See Backend."""
        return -(-max(key_width, value_width) // 8) * 8

    def forward(self, query: Tensor, key: Tensor, value: Tensor, output: Tensor, logsumexp: Tensor, tile: Tile) -> None:
        """See Backend."""
        if tile.irregular:
            self._math.forward(query, key, value, output, logsumexp, tile)
            return
        out, lse, *_ = _aten._flash_attention_forward(
            query.transpose(1, 2),  # (B,T,H,D)
            key.transpose(1, 2),  # (B,S,Hkv,D)
            value.transpose(1, 2),
            cum_seq_q=None,
            cum_seq_k=None,
            max_q=query.shape[2],
            max_k=key.shape[2],
            dropout_p=0.0,
            is_causal=True,
            return_debug_mask=False,
            scale=self.scale,
            window_size_left=_keys_before(tile),
            window_size_right=0,
        )
        output.copy_(out.transpose(1, 2))
        logsumexp.copy_(lse)

    def backward(self, queries: Queries, key: Tensor, value: Tensor, gradients: Gradients, tile: Tile) -> None:
        """See Backend."""
        if tile.irregular:
            self._math.backward(queries, key, value, gradients, tile)
            return
        query, out, lse, grad_out = queries
        no_dropout = query.new_empty(0)  # in place of its random state
        grads = _aten._flash_attention_backward(
            grad_out.transpose(1, 2),
            query.transpose(1, 2),
            key.transpose(1, 2),
            value.transpose(1, 2),
            out.transpose(1, 2),
            lse.contiguous(),
            cum_seq_q=None,
            cum_seq_k=None,
            max_q=query.shape[2],
            max_k=key.shape[2],
            dropout_p=0.0,
            is_causal=True,
            rng_state=no_dropout,
            unused=no_dropout,
            scale=self.scale,
            window_size_left=_keys_before(tile),
            window_size_right=0,
        )
        for total, grad in zip(gradients, grads, strict=True):
            total.add_(grad.transpose(1, 2))


def _keys_before(tile: Tile) -> int | None:
    return None if tile.window is None else tile.window - 1
