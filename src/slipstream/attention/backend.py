"""The computation of attention: the protocol of a backend, its inputs and buffers, and the walk over a slice's tiles.

A backend computes the attention of a whole slice, or of one tile at a time: its T queries and its S keys,
[tile.first, tile.keys_end). With P = exp(scale * Q K^T - lse), the log-sum-exp taken over *all* keys of a query, the
gradients of any rectangle of the scores don't depend on the others (Dao 2022, FlashAttention, appendix B.2):

    dV = P^T dO,   dS = P * (dO V^T - rowsum(dO * O)),   dQ = scale * dS K,   dK = scale * dS^T Q
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Hashable, Iterator
from typing import ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from slipstream.attention.masks import KeyRanges, ScoreTile
from slipstream.attention.store import AttentionResult, ContextStore
from slipstream.keyed_draws import EAGER, NO_PLACE, Draws, PlaceSeed


class TokenExchange(Protocol):
    """The exchanges around attention of ranks that have different tokens of a slice; `parallel` implements it.

    They exchange heads for tokens, after which each has all tokens of some heads; or each gets the keys and values of
    all tokens, and its queries see them from a place of their own.
    """

    def moves_heads(self, query: Tensor, key: Tensor, is_whole: bool) -> bool:
        """Returns whether this attention exchanges heads for tokens; `is_whole`: the slice is the whole sequence."""
        ...

    def heads_for_tokens(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns some heads of all tokens of the slice, of all heads of this rank's tokens. Collective."""
        ...

    def tokens_for_heads(self, output: Tensor) -> Tensor:
        """Returns all heads (B,H,T,Dv) of this rank's tokens, of its heads of all tokens. Collective."""
        ...

    def own_heads(self, each: Tensor) -> Tensor:
        """Returns this rank's part of a tensor with one number a query head, (H,)."""
        ...

    def own_queries(self, ranges: KeyRanges) -> KeyRanges:
        """Returns which keys the queries of this rank's tokens see, of those that a slice's queries see."""
        ...

    def gather_keys(self, *tensors: Tensor) -> list[Tensor]:
        """Returns keys and values (B,Hkv,n,D) of all tokens of the slice, of those of each rank's. Collective."""
        ...

    def reduce_scatter(self, *gradients: Tensor) -> list[Tensor]:
        """Returns the sums over the ranks of gradients (B,Hkv,n,D), for this rank's tokens alone. Collective."""
        ...

    def sum(self, each: Tensor) -> Tensor:
        """Returns the sum of the ranks' tensors, each with the gradient of the sum. Collective."""
        ...


class AttentionSite(NamedTuple):
    """Everything about one attention of a slice that isn't a tensor with a gradient."""

    store: ContextStore  # keys and values of the microbatch on this stage, for later slices too
    call: Hashable  # id of this attention within the stage, the same for all slices
    ranges: KeyRanges  # keys visible to each query
    scale: float  # factor of the scores
    softcap: float | None = None  # None, or a limit c: scores become c * tanh(scores / c)
    dropout: float = 0.0  # probability of dropping an attention weight, drawn from `seed`
    seed: PlaceSeed = NO_PLACE  # seed of the attention's tiles
    draws: Draws = EAGER  # random draws of forward and backward
    selected: Tensor | None = None  # (B,T,k), the visible ones among the keys in each query's range; None: all
    # Exchange with ranks that have other tokens of the slice; None: all tokens here.
    exchange: TokenExchange | None = None

    @property
    def here(self) -> AttentionSite:
        """The same for the queries that are here, each of which sees the same keys as in the whole slice."""
        return self if self.exchange is None else self._replace(ranges=self.exchange.own_queries(self.ranges))

    @property
    def has_plain_scores(self) -> bool:
        """Whether scores are products alone, of all keys in a query's range."""
        return self.softcap is None and not self.dropout and self.selected is None


class QueryState(NamedTuple):
    """The values of each query that a backward pass needs."""

    query: Tensor  # (B,H,T,D)
    output: Tensor  # (B,H,T,Dv), merged over all parts and the sink
    logsumexp: Tensor  # (B,H,T), likewise
    grad_output: Tensor  # (B,H,T,Dv)

    def heads(self, some: slice) -> QueryState:
        """Returns the same for some heads."""
        return QueryState(*(tensor[:, some] for tensor in self))

    def rows(self, some: slice) -> QueryState:
        """Returns the same for some queries."""
        return QueryState(*(tensor[:, :, some] for tensor in self))


class KeySums(NamedTuple):
    """Sums of the gradients of keys and values, to which a backward pass adds."""

    key: Tensor  # (B,Hkv,S,D), in float32 or wider, or in the type of keys and values
    value: Tensor  # (B,Hkv,S,Dv)


class TileGradients(NamedTuple):
    """The buffers to which a tile's backward adds."""

    query: Tensor  # (B,H,T,D), in float32 or wider
    key: Tensor  # (B,Hkv,S,D), in the type of the sums
    value: Tensor  # (B,Hkv,S,Dv)


class AttentionBackend(Protocol):
    """Computes the attention of a slice; keys and values are those from the first that any query sees."""

    site: AttentionSite
    width_multiple: ClassVar[int | None]
    """Of what number the head dim of queries, keys and values must be a multiple, all padded to the same with zeros;
    None where each keeps its own."""

    def __init__(self, site: AttentionSite) -> None: ...

    @classmethod
    def takes(cls, query: Tensor, value: Tensor, site: AttentionSite) -> bool:
        """Returns whether this backend computes the attention of such tensors; the first one that does is used."""
        ...

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, so_far: AttentionResult | None = None
    ) -> AttentionResult:
        """Returns output (B,H,T,Dv) and log-sum-exp (B,H,T), in the query's or a wider dtype.

        `so_far` is the result for other keys, with which these keys' is merged, in place if it is wide.
        """
        ...

    def differentiate(
        self, queries: QueryState, key: Tensor, value: Tensor, sums: KeySums, so_far: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        """Adds to the gradients of keys and values; returns the query's, in its own or a wider dtype, and those of the
        slice's own keys and values where they are added up beside `sums`.

        `so_far` is the query's gradient from other keys, to which these keys' is added, in place if it is wide.
        """
        ...


class TiledBackend(AttentionBackend, Protocol):
    """Computes a slice tile by tile."""

    def __init__(self, site: AttentionSite) -> None:
        self.site = site

    @abstractmethod
    def forward(self, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, tile: ScoreTile) -> None:
        """Merges a tile's attention into out (B,H,T,Dv) and lse (B,H,T), in float32 or wider; the attention to the
        queries' own keys comes first, and fills them."""

    @abstractmethod
    def backward(self, queries: QueryState, key: Tensor, value: Tensor, grads: TileGradients, tile: ScoreTile) -> None:
        """Adds the tile's share to the gradients."""

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, so_far: AttentionResult | None = None
    ) -> AttentionResult:
        """See `AttentionBackend`."""
        wide = torch.promote_types(query.dtype, torch.float32)
        if so_far is not None:
            output, logsumexp = so_far[0].to(wide), so_far[1]
        else:
            output = _empty(query, value.shape[-1], wide)
            logsumexp = query.new_empty(query.shape[:-1], dtype=wide)
            if not self.site.ranges.has_own:
                # A query may see none of the keys.
                output.zero_()
                logsumexp.fill_(torch.finfo(wide).min)
        for tile, rows, seen in self._tiles():
            self.forward(query[rows], key[seen], value[seen], output[rows], logsumexp[rows], tile)
        return output, logsumexp

    def differentiate(
        self, queries: QueryState, key: Tensor, value: Tensor, sums: KeySums, so_far: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        """See `AttentionBackend`."""
        wide = torch.promote_types(queries.query.dtype, torch.float32)
        total = _empty(queries.query, queries.query.shape[-1], wide).zero_() if so_far is None else so_far.to(wide)
        for tile, rows, seen in self._tiles():
            gradients = TileGradients(total[rows], sums.key[seen], sums.value[seen])
            self.backward(QueryState(*(tensor[rows] for tensor in queries)), key[seen], value[seen], gradients, tile)
        return (total,)

    def _tiles(self) -> Iterator[tuple[ScoreTile, tuple[slice, ...], tuple[slice, ...]]]:
        """Yields each tile with the indices of its queries and of its keys among the slice's keys."""
        ranges = self.site.ranges
        for tile in ranges.tiles:
            queries = slice(tile.start - ranges.start, tile.end - ranges.start)
            keys = slice(tile.first - ranges.first, tile.keys_end - ranges.first)
            yield tile, (tile.rows, slice(None), queries), (tile.rows, slice(None), keys)


def merge_(so_far: AttentionResult, found: AttentionResult, is_first: bool = False) -> None:
    """Combines the attention over two disjoint sets of keys, in place of the first; where `is_first`, that has none.

    lse = log(e^lse1 + e^lse2),   O = e^(lse1 - lse) O1 + e^(lse2 - lse) O2
    """
    output, logsumexp = so_far
    if is_first:
        output.copy_(found[0])
        logsumexp.copy_(found[1])
        return
    weight = torch.sigmoid(found[1] - logsumexp)  # e^(lse2 - lse)
    output.lerp_(found[0].to(output.dtype), weight[..., None])
    logsumexp.copy_(torch.logaddexp(logsumexp, found[1]))


def merged_with(so_far: AttentionResult | None, found: AttentionResult) -> AttentionResult:
    """Returns the attention to some keys and to others, wide where there are both."""
    if so_far is None:
        return found
    total = so_far[0].to(so_far[1].dtype), so_far[1]
    merge_(total, found)
    return total


def added(so_far: Tensor | None, share: Tensor) -> Tensor:
    """Returns the sum of a query's gradients from some keys and from others, wide where there are both."""
    return share if so_far is None else so_far.to(torch.promote_types(share.dtype, torch.float32)).add_(share)


def _empty(like: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    """Returns an empty (B,H,T,width) tensor stored as (B,T,H,width), the order in which models use it."""
    batch, heads, length, _ = like.shape
    return like.new_empty(batch, length, heads, width, dtype=dtype).transpose(1, 2)
