"""Computes attention by its formulas, for what no fused kernel does: softcap, dropout, any device and dtype."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from slipstream.attention.attention_backend import AttentionGradients, QueryState
from slipstream.attention.key_ranges import ScoreRectangle, ScoreTile

SCORES_AT_ONCE = 1 << 24  # limits memory: a long tile is computed some queries at a time


class MaskedMath:
    """Scores s = scale * q.k, or softcap * tanh(scale * q.k / softcap); P = exp(s - lse); O = (keep * P) V.

    `keep` is attention dropout's 0 or 1/(1-p), drawn from the seed and the tile's index, and drawn again in backward.
    In backward dS = P * (keep * dO V^T - rowsum(dO * O)), times 1 - (s / softcap)^2 for tanh.
    """

    def __init__(self, scale: float, softcap: float | None = None, dropout: float = 0.0, seed: int = 0) -> None:
        self.scale = scale
        self.softcap = softcap
        self.dropout = dropout
        self.seed = seed

    def width(self, key_width: int, value_width: int) -> int | None:
        """See AttentionBackend."""
        return None

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, output: Tensor, logsumexp: Tensor, tile: ScoreTile
    ) -> None:
        """See AttentionBackend."""
        query, key, value = (each.to(output.dtype) for each in (query, key, value))
        generator = self._generator(query.device, tile)
        for block, seen in _blocks(query, key, tile):
            scores = self._scores(query[:, :, block], key, seen)  # (B,H,t,S)
            lse = scores.logsumexp(-1)  # (B,H,t)
            probs = scores.sub_(lse[..., None]).exp_()
            output[:, :, block] = _times(self._dropped(probs, generator), value)
            logsumexp[:, :, block] = lse

    def backward(
        self, queries: QueryState, key: Tensor, value: Tensor, gradients: AttentionGradients, tile: ScoreTile
    ) -> None:
        """See AttentionBackend."""
        wide = gradients.query.dtype
        key, value = key.to(wide), value.to(wide)
        generator = self._generator(key.device, tile)
        for block, seen in _blocks(queries.query, key, tile):
            query, out, lse, grad_out = (each.to(wide) for each in queries.rows(block))
            scores = self._scores(query, key, seen)  # (B,H,t,S)
            probs = (scores - lse[..., None]).exp_()
            keep = self._dropped(torch.ones_like(probs), generator)
            gradients.value.add_(_transposed_times(probs * keep, grad_out, value))
            grad_scores = _times(grad_out, value.mT).mul_(keep)
            grad_scores.sub_((grad_out * out).sum(-1, keepdim=True)).mul_(probs).mul_(self.scale)
            if self.softcap is not None:
                grad_scores.mul_(1 - (scores.masked_fill_(~seen, 0) / self.softcap) ** 2)
            gradients.query[:, :, block] += _times(grad_scores, key)
            gradients.key.add_(_transposed_times(grad_scores, query, key))

    def _scores(self, query: Tensor, key: Tensor, seen: Tensor) -> Tensor:
        scores = _times(query, key.mT).mul_(self.scale)
        if self.softcap is not None:
            scores.div_(self.softcap).tanh_().mul_(self.softcap)
        return scores.masked_fill_(~seen, -torch.inf)

    def _generator(self, device: torch.device, tile: ScoreTile) -> torch.Generator:
        return torch.Generator(device).manual_seed((self.seed * 1_000_003 + tile.index) % (1 << 63))

    def _dropped(self, probs: Tensor, generator: torch.Generator) -> Tensor:
        if self.dropout == 0.0:
            return probs
        draw = torch.rand(probs.shape, generator=generator, device=probs.device, dtype=probs.dtype)
        return probs.mul_((draw >= self.dropout) / (1 - self.dropout))


def _blocks(query: Tensor, key: Tensor, tile: ScoreTile) -> Iterator[tuple[slice, Tensor]]:
    """Yields some queries at a time, with a mask (t, S) of the keys they see."""
    batch, heads, length, _ = query.shape
    rows = max(1, SCORES_AT_ONCE // (batch * heads * key.shape[2]))
    for start in range(0, length, rows):
        block = slice(start, min(start + rows, length))
        yield block, tile.mask(ScoreRectangle(block, slice(0, key.shape[2])), query.device)


def _times(left: Tensor, right: Tensor) -> Tensor:
    """Multiplies (B,H,t,n) x (B,Hkv,n,m) -> (B,H,t,m): a group of heads shares one key head."""
    batch, heads, rows, width = left.shape
    folded = left.reshape(batch, right.shape[1], -1, width)  # (B,Hkv,G*t,n)
    return (folded @ right).view(batch, heads, rows, -1)


def _transposed_times(left: Tensor, right: Tensor, key: Tensor) -> Tensor:
    """Multiplies (B,H,t,n), (B,H,t,m) -> (B,Hkv,n,m): summed over the queries, and over the heads of a group."""
    left, right = (each.reshape(each.shape[0], key.shape[1], -1, each.shape[3]) for each in (left, right))
    return left.mT @ right
