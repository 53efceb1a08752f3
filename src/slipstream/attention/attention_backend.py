"""The interface of the code that computes one tile of attention: the fused kernels and the masked math."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor

from slipstream.attention.key_ranges import ScoreTile


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


class AttentionGradients(NamedTuple):
    """The buffers a backward pass adds to, in float32 or wider."""

    query: Tensor  # (B,H,T,D)
    key: Tensor  # (B,Hkv,S,D)
    value: Tensor  # (B,Hkv,S,Dv)


class AttentionBackend(Protocol):
    """Computes the attention of one tile: its T queries and its S keys, [tile.first, tile.end).

    With P = exp(scale * Q K^T - lse), the log-sum-exp taken over *all* keys of a query, the gradients of any rectangle
    of the scores don't depend on the others (Dao 2022, FlashAttention, appendix B.2):

        dV = P^T dO,   dS = P * (dO V^T - rowsum(dO * O)),   dQ = scale * dS K,   dK = scale * dS^T Q
    """

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, output: Tensor, logsumexp: Tensor, tile: ScoreTile
    ) -> None:
        """Fills output (B,H,T,Dv) and logsumexp (B,H,T), in float32 or wider."""
        ...

    def backward(
        self, queries: QueryState, key: Tensor, value: Tensor, gradients: AttentionGradients, tile: ScoreTile
    ) -> None:
        """Adds the tile's share to the gradients."""
        ...

    def width(self, key_width: int, value_width: int) -> int | None:
        """Returns the head dim to which keys and values are padded with zeros; None where each keeps its own."""
        ...
