"""The inputs and buffers of a backend: `FlashCPU`, `FusedCUDA` or `MaskedMath`, which compute attention tile by tile.

`FusedCUDA` computes a slice with a regular mask as a whole, and `FlexCUDA` every slice.

Each computes the attention of one tile: its T queries and its S keys, [tile.first, tile.end). With
P = exp(scale * Q K^T - lse), the log-sum-exp taken over *all* keys of a query, the gradients of any rectangle of the
scores don't depend on the others (Dao 2022, FlashAttention, appendix B.2):

    dV = P^T dO,   dS = P * (dO V^T - rowsum(dO * O)),   dQ = scale * dS K,   dK = scale * dS^T Q

`forward` fills out (B,H,T,Dv) and lse (B,H,T), in float32 or wider; `backward` adds the tile's share to the gradients.
`width_multiple` is of what number the head dim of queries, keys and values must be a multiple, all padded to the same
with zeros; None where each keeps its own.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple

from torch import Tensor

from slipstream.attention.masks import KeyRanges
from slipstream.attention.store import ContextStore
from slipstream.keyed_draws import EAGER, NO_PLACE, Draws, PlaceSeed


class AttentionSite(NamedTuple):
    """Everything about one attention of a slice that isn't a tensor with a gradient."""

    store: ContextStore  # the microbatch's on this stage, which keeps key and value for later slices
    call: Hashable  # identifies this attention within the stage, the same for all slices
    ranges: KeyRanges  # which keys each query sees
    scale: float  # multiplies the scores
    softcap: float | None = None  # scores become softcap * tanh(scores / softcap)
    dropout: float = 0.0  # the probability of dropping an attention weight, drawn from `seed`
    seed: PlaceSeed = NO_PLACE  # of its tiles
    draws: Draws = EAGER  # also of the backward


class QueryState(NamedTuple):
    """The values of each query that a backward pass needs."""

    query: Tensor  # (B,H,T,D)
    output: Tensor  # (B,H,T,Dv), merged over all parts and the sink
    logsumexp: Tensor  # (B,H,T), likewise
    grad_output: Tensor  # (B,H,T,Dv)

    def heads(self, some: slice) -> QueryState:
        """Returns the same for some heads."""
        return QueryState(*(each[:, some] for each in self))

    def rows(self, some: slice) -> QueryState:
        """Returns the same for some queries."""
        return QueryState(*(each[:, :, some] for each in self))


class TileGradients(NamedTuple):
    """The buffers a backward pass adds to, in float32 or wider."""

    query: Tensor  # (B,H,T,D)
    key: Tensor  # (B,Hkv,S,D)
    value: Tensor  # (B,Hkv,S,Dv)
