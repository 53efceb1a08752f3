"""Attention by plain formulas, which know every mask, soft cap, dropout and selection of keys, in any dtype."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import torch
from torch import Tensor

from slipstream.attention.backend import AttentionSite, QueryState, TiledBackend, TileGradients, merge_
from slipstream.attention.masks import ScoreRectangle, ScoreTile

# Limits memory: a long tile is computed some queries at a time.
SCORES_AT_ONCE = 1 << 24


class MaskedMath(TiledBackend):
    """Scores s = scale * q.k, or softcap * tanh(scale * q.k / softcap); P = exp(s - lse); O = (keep * P) V.

    `keep` is attention dropout's 0 or 1/(1-p), drawn from the seed and the tile's index, and drawn again in backward.
    In backward dS = P * (keep * dO V^T - rowsum(dO * O)), times 1 - (s / softcap)^2 for tanh.
    """

    width_multiple: ClassVar[int | None] = None

    @classmethod
    def takes(cls, query: Tensor, value: Tensor, site: AttentionSite) -> bool:
        """See `AttentionBackend`."""
        return True

    def forward(self, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, tile: ScoreTile) -> None:
        """See `TiledBackend`."""
        query, key, value = (tensor.to(out.dtype) for tensor in (query, key, value))
        generator = self._generator(query.device, tile)
        for block, seen in self._blocks(query, key, tile):
            scores = self._scores(query[:, :, block], key, seen)  # (B,H,t,S)
            # A query that has selected none of these keys gets a finite number, so that other keys can be merged.
            part_lse = scores.logsumexp(-1).clamp_(min=torch.finfo(lse.dtype).min)  # (B,H,t)
            probs = scores.sub_(part_lse[..., None]).exp_()
            found = _times(self._dropped(probs, generator), value), part_lse
            merge_((out[:, :, block], lse[:, :, block]), found, is_first=tile.has_own)

    def backward(self, queries: QueryState, key: Tensor, value: Tensor, grads: TileGradients, tile: ScoreTile) -> None:
        """See `TiledBackend`."""
        wide = grads.query.dtype
        key, value = key.to(wide), value.to(wide)
        generator = self._generator(key.device, tile)
        for block, seen in self._blocks(queries.query, key, tile):
            query, out, lse, grad_out = (tensor.to(wide) for tensor in queries.rows(block))
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
            selected = self.site.selected
            yield block, seen if selected is None else seen & self._is_selected(selected, tile, block)

    def _is_selected(self, selected: Tensor, tile: ScoreTile, block: slice) -> Tensor:
        """Returns which of the tile's keys were selected for some of its queries, (B,1,t,S)."""
        first = tile.start - self.site.ranges.start
        keys = selected[tile.rows, first + block.start : first + block.stop].long() - tile.first  # (B,t,k)
        length = tile.keys_end - tile.first
        # Keys elsewhere are marked in one more place.
        keys = keys.masked_fill_((keys < 0) | (keys >= length), length)
        mask = torch.zeros(*keys.shape[:2], length + 1, dtype=torch.bool, device=keys.device).scatter_(2, keys, True)
        return mask[:, None, :, :length]

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
    left, right = (tensor.reshape(tensor.shape[0], key.shape[1], -1, tensor.shape[3]) for tensor in (left, right))
    return left.mT @ right
