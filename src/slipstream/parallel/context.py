"""Context parallelism: ranks with the same weights share every slice, each with some of its tokens.

Everything but attention works on a rank's tokens. Around attention each rank exchanges its tokens of all heads for all
tokens of some heads (DeepSpeed-Ulysses: Jacobs et al. 2023), so that the attention of a slice over its context runs
unchanged, and keys and values are kept of these heads alone:

              tokens  0 1 2 | 3 4                        tokens  0 1 2 3 4
    rank 0    heads   a b c d |            rank 0    heads   a b
    rank 1                    | a b c d    rank 1    heads       c d

Where there are fewer heads of keys than ranks, several ranks get the same one, and its gradients are added.

Or the keys and values of a slice are gathered on all ranks, each of which keeps the whole context and attends with its
own queries alone (Grattafiori et al. 2024, "The Llama 3 Herd of Models", section 3.3.2). That is the same exchange,
where every rank gets all heads of keys and queries stay.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise
from math import gcd, prod

import torch
from torch import Tensor

from slipstream.attention import KeyRanges
from slipstream.autograd_calls import with_backward
from slipstream.errors import SlipstreamError
from slipstream.model.hooks import TokenSlice
from slipstream.options import numbers_exchanged
from slipstream.parallel.mesh import divisors_text
from slipstream.parallel.parameter_share import part_bounds
from slipstream.parallel.rank_group import RankGroup, sum_over_ranks

_Heads = list[list[int]]  # heads of each rank
_Parts = tuple[tuple[int, int], ...]  # [begin, end) of each rank's tokens within a slice


@dataclass(frozen=True)
class SliceExchange:
    """Exchanges heads for tokens, or gathers keys, around the attention of one slice."""

    group: RankGroup
    parts: _Parts  # empty: the whole slice here, as in a forward for shapes only
    kind: str = "auto"  # the exchanged tensors: "heads", "keys", or "auto" to choose by `moves_heads`

    def moves_heads(self, query: Tensor, key: Tensor, is_whole: bool) -> bool:
        """Returns whether an attention of these sizes exchanges heads for tokens.

        By default the one that moves fewer bytes. Keys do only where g Hkv < Hq + lcm(Hkv, g), and then the context of
        all heads is about as large as queries, keys, values and outputs of the own tokens: what they take of memory
        doesn't decide. In a sequence of one slice the last ranks' queries would see far more keys than the first ones',
        so heads are exchanged there.
        """
        if self.kind != "auto":
            return self.kind == "heads"
        size = self.group.size
        num_queries = query.shape[1]
        num_keys = key.shape[1]
        widening = torch.promote_types(key.dtype, torch.float32).itemsize / key.dtype.itemsize
        by_heads, by_keys = numbers_exchanged(num_queries, num_keys, size, widening)
        return num_queries % size == 0 and (is_whole or by_heads <= by_keys)

    def heads_for_tokens(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns this rank's heads of all tokens, (B,Hq/g,n,D), (B,h,n,D) and (B,h,n,Dv), of all heads of this rank's
        tokens. Queries, keys and values travel together, so that no two backwards can differ in their order.
        Collective.

        Raises SlipstreamError where the ranks can't have equal numbers of query heads.
        """
        check_heads(query.shape[1], self.group.size)
        if not self.parts:
            return query, key, value
        heads = heads_of_ranks(query.shape[1], query.shape[1], self.group.size)
        of_keys = heads_of_ranks(query.shape[1], key.shape[1], self.group.size)
        of_each = (heads, of_keys, of_keys)
        length = query.shape[2]
        queries, keys, values = with_backward(
            lambda *tensors: tuple(self._spread_heads(tensors, of_each)),
            lambda *gradients: tuple(_as_long(parts, length) for parts in self._spread_tokens(gradients, of_each)),
            *(query, key, value),
        )
        return queries, keys, values

    def tokens_for_heads(self, output: Tensor) -> Tensor:
        """Returns all heads of this rank's tokens, (B,Hq,T,Dv), of its heads of all tokens. Collective."""
        if not self.parts:
            return output
        num_heads = output.shape[1] * self.group.size
        heads = [heads_of_ranks(num_heads, num_heads, self.group.size)]
        length = max(1, self._num_own)
        return with_backward(
            lambda whole: (_as_long(self._spread_tokens([whole], heads)[0], length),),
            lambda gradient: tuple(self._spread_heads([gradient], heads)),
            output,
        )[0]

    def own_heads(self, each: Tensor) -> Tensor:
        """Returns this rank's part of a tensor with one number a query head."""
        return each.view(self.group.size, -1)[self.group.rank] if self.parts else each

    def own_queries(self, ranges: KeyRanges) -> KeyRanges:
        """Returns the ranges of this rank's queries; of the slice's last token where it has none."""
        if not self.parts:
            return ranges
        return ranges.part(*computed_tokens(self.parts[self.group.rank], ranges.end - ranges.start))

    def gather_keys(self, *tensors: Tensor) -> list[Tensor]:
        """Returns (B,Hkv,n,D) of all tokens of the slice, of (B,Hkv,T,D) of this rank's. Collective."""
        return self._spread_heads(tensors, self._all_heads(tensors)) if self.parts else [*tensors]

    def reduce_scatter(self, *gradients: Tensor) -> list[Tensor]:
        """Returns the sums over the ranks of (B,Hkv,n,D), this rank's tokens of them. Collective."""
        if not self.parts:
            return [*gradients]
        sums = self._spread_tokens(gradients, self._all_heads(gradients))
        return [_as_long(part, max(1, self._num_own)) for part in sums]

    def sum(self, each: Tensor) -> Tensor:
        """Returns the sum of the ranks' tensors, each with the gradient of the sum. Collective."""
        return sum_over_ranks(each, self.group) if self.parts else each

    @cached_property
    def _num_own(self) -> int:
        begin, end = self.parts[self.group.rank]
        return end - begin

    def _all_heads(self, tensors: Sequence[Tensor]) -> list[_Heads]:
        return [[[*range(tensor.shape[1])]] * self.group.size for tensor in tensors]

    def _spread_heads(self, tensors: Sequence[Tensor], heads: Sequence[_Heads]) -> list[Tensor]:
        """Returns each tensor's heads for this rank, of all tokens, of the tensors of its tokens. Collective."""
        ranks = range(self.group.size)
        me = self.group.rank
        # A rank without tokens has a padding one, which it doesn't send.
        own = [tensor.narrow(2, 0, self._num_own) for tensor in tensors]
        sent = [[_some(tensor, of[rank]) for tensor, of in zip(own, heads, strict=True)] for rank in ranks]
        shapes = [
            [
                (tensor.shape[0], len(of[me]), end - begin, tensor.shape[3])
                for tensor, of in zip(own, heads, strict=True)
            ]
            for begin, end in self.parts
        ]
        received = self._exchanged(sent, shapes)
        return [torch.cat(pieces, 2) for pieces in zip(*received, strict=True)]

    def _spread_tokens(self, tensors: Sequence[Tensor], heads: Sequence[_Heads]) -> list[Tensor]:
        """Returns each tensor's tokens of this rank, of all heads, of the tensors of its heads; several ranks' parts of
        a head are added up. Collective."""
        sent = [[tensor[:, :, begin:end] for tensor in tensors] for begin, end in self.parts]
        shapes = [
            [
                (tensor.shape[0], len(of[rank]), self._num_own, tensor.shape[3])
                for tensor, of in zip(tensors, heads, strict=True)
            ]
            for rank in range(self.group.size)
        ]
        received = self._exchanged(sent, shapes)
        return [_joined(pieces, of) for pieces, of in zip(zip(*received, strict=True), heads, strict=True)]

    def _exchanged(self, sent: list[list[Tensor]], shapes: Sequence[Sequence[tuple[int, ...]]]) -> list[list[Tensor]]:
        """Returns the tensors of these shapes that come from each rank. Collective."""
        counts = [sum(tensor.numel() for tensor in tensors) for tensors in sent]
        every = [tensor for tensors in sent for tensor in tensors]
        flat = every[0].new_empty(sum(counts))
        for place, tensor in zip(torch.split(flat, [tensor.numel() for tensor in every]), every, strict=True):
            # The tensors are views in another layout, so each is copied once, right to its place.
            place.view(tensor.shape).copy_(tensor)
        sizes = [[prod(shape) for shape in of_rank] for of_rank in shapes]
        received = self.group.all_to_all(flat, counts, [*map(sum, sizes)])
        parts = iter(torch.split(received, [size for of_rank in sizes for size in of_rank]))
        return [[next(parts).view(shape) for shape in of_rank] for of_rank in shapes]


def shared_slice(piece: TokenSlice, rank: int, size: int) -> TokenSlice:
    """Returns a rank's part of a slice that several ranks share."""
    length = piece.input_ids.shape[1]
    parts = tuple(part_bounds(length, size, part) for part in range(size))
    return replace(
        piece,
        input_ids=own_tokens(piece.input_ids, rank, size),
        position_ids=own_tokens(piece.position_ids, rank, size),
        lone_sequences=sequences_within(piece.lone_sequences, *computed_tokens(parts[rank], length)),
        parts=parts,
        part=rank,
    )


def own_tokens(each: Tensor, rank: int, size: int) -> Tensor:
    """Returns a rank's part of (b, T, ...), one for each token of a slice that several ranks share."""
    length = each.shape[1]
    begin, end = computed_tokens(part_bounds(length, size, rank), length)
    return each[:, begin:end]


def sequences_within(sequences: Sequence[tuple[int, int]], begin: int, end: int) -> tuple[tuple[int, int], ...]:
    """Returns the tokens between two places of each sequence that has some there, and its largest position."""
    bounds = pairwise(accumulate((length for length, _ in sequences), initial=0))
    cut = ((min(b, end) - max(a, begin), sequence[1]) for (a, b), sequence in zip(bounds, sequences, strict=True))
    return tuple(piece for piece in cut if piece[0] > 0)


def computed_tokens(part: tuple[int, int], length: int) -> tuple[int, int]:
    """Returns which tokens [begin, end) of a slice a rank computes: its part, or the last token where that has none."""
    return part if part[0] < part[1] else (length - 1, length)


def check_heads(num_heads: int, num_ranks: int, num_tensor_ranks: int = 1) -> None:
    """Raises SlipstreamError where ranks can't have equal numbers of a layer's query heads, or of those of each of the
    ranks that share the layer."""
    if num_heads % num_ranks:
        whose = f" of each of tp={num_tensor_ranks} ranks" if num_tensor_ranks > 1 else ""
        raise SlipstreamError(
            f"{num_heads} query heads{whose} can't be spread over cp={num_ranks} ranks. Give cp a divisor of "
            f"{num_heads}: {divisors_text(num_heads)}; or give parallel.context_exchange=keys."
        )


def heads_of_ranks(num_queries: int, num_heads: int, num_ranks: int) -> _Heads:
    """Returns which of a layer's heads each rank has: as many query heads each, and the heads of keys and values that
    these read, one for each run of as many queries as all runs of a rank have."""
    own, of_one = num_queries // num_ranks, num_queries // num_heads
    run = gcd(own, of_one)
    return [[first // of_one for first in range(rank * own, (rank + 1) * own, run)] for rank in range(num_ranks)]


def _some(tensor: Tensor, heads: list[int]) -> Tensor:
    """Returns some heads, a view where they follow each other."""
    if heads == [*range(heads[0], heads[0] + len(heads))]:
        return tensor.narrow(1, heads[0], len(heads))
    # An index tensor would have to come from the host.
    return torch.cat([tensor.narrow(1, head, 1) for head in heads], 1)


def _joined(pieces: Sequence[Tensor], heads: _Heads) -> Tensor:
    """Returns all heads (B,H,T,D), stored as (B,T,H,D), of each rank's; a head that came several times is a sum."""
    order = [head for group in heads for head in group]
    batch, _, length, width = pieces[0].shape
    if order == [*range(len(order))]:
        result = pieces[0].new_empty(batch, length, len(order), width).transpose(1, 2)
        return torch.cat(list(pieces), 1, out=result) if length else result
    wide = torch.promote_types(pieces[0].dtype, torch.float32)
    total = pieces[0].new_zeros(batch, length, order[-1] + 1, width, dtype=wide).transpose(1, 2)
    for piece, group in zip(pieces, heads, strict=True):
        if len({*group}) == len(group):
            total.narrow(1, group[0], len(group)).add_(piece)
            continue
        for index, head in enumerate(group):
            total.select(1, head).add_(piece.select(1, index))
    return total.to(pieces[0].dtype)


def _as_long(tensor: Tensor, length: int) -> Tensor:
    # A rank without tokens computes one for nothing, which gets zeros.
    return tensor if tensor.shape[2] == length else tensor.new_zeros(*tensor.shape[:2], length, tensor.shape[3])
