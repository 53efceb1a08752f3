"""FlashAttention on CPUs, by PyTorch's kernel."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from slipstream.attention.backend import AttentionSite, QueryState, TiledBackend, TileGradients, merge_
from slipstream.attention.masks import ScoreRectangle, ScoreTile

_aten = torch.ops.aten
# A thread's work in backward fits in its cache (2 MB): K, V, dK, dV of 2 heads and 1024 keys, or of more heads where
# there are fewer keys. This limits the temporary dK and dV, and at 4096 tokens in 8 slices it takes 0.96-0.99 of the
# time of all heads together.
KEYS_AT_ONCE = 1024
ROWS_AT_ONCE = 2 * KEYS_AT_ONCE  # keys times heads, per thread


class FlashCPU(TiledBackend):
    """Computes a tile rectangle by rectangle, as the CPU kernel handles causal squares, full rectangles and masks."""

    width_multiple: ClassVar[int | None] = 1

    @classmethod
    def takes(cls, query: Tensor, value: Tensor, site: AttentionSite) -> bool:
        """See `AttentionBackend`."""
        return query.device.type == "cpu" and site.has_plain_scores

    def forward(self, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, tile: ScoreTile) -> None:
        """See `TiledBackend`."""
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
            found = part_out.reshape(own_out.shape), part_lse.reshape(own_lse.shape)
            merge_((own_out, own_lse), found, is_first=part.diagonal)

    def backward(self, queries: QueryState, key: Tensor, value: Tensor, grads: TileGradients, tile: ScoreTile) -> None:
        """See `TiledBackend`."""
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
            heads = slice(head * group, (head + at_once) * group)
            key_heads = slice(head, head + at_once)
            query, out, lse, grad_out = (_fold(tensor, key[:, key_heads], part) for tensor in queries.heads(heads))
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
    """Returns the mask that the kernel adds to a rectangle's scores: 0 where a key is seen."""
    if not part.masked:
        return None
    seen = tile.mask(part, query.device)
    return query.new_zeros(seen.shape).masked_fill_(~seen, -torch.inf)
