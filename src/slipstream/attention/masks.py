"""Describes which keys each query of a slice sees, and the tiles that cover exactly those scores."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from slipstream.errors import SlipstreamError

# A shorter run of queries with one first key costs more to launch than to mask.
SHORTEST_RUN = 32
# A masked tile reads window + 192 keys, and kernels slow down below 192 queries.
MASKED_ROWS = 192
# Kernels compute a causal square of this many queries whole, so larger ones would waste half.
SQUARE = 256


@dataclass(frozen=True)
class ScoreRectangle:
    """A rectangle of a tile's scores, relative to the tile's first query and first key."""

    queries: slice
    keys: slice
    diagonal: bool = False  # True for queries whose own keys are among `keys`
    # Under the tile's mask. Otherwise the rectangle is causal on the diagonal, and wholly visible off it.
    masked: bool = False

    @property
    def causal(self) -> bool:
        """Whether it is a square whose query t sees the keys 0 .. t."""
        return self.diagonal and not self.masked


class RegularMask(NamedTuple):
    """The scores of T queries, each of which sees the keys up to itself: all from `first` on, or a window's."""

    first: int  # first key visible to any query
    past: int  # number of keys from `first` on before the first query
    window: int | None = None  # number of keys visible to a query, its own included
    has_own: bool = True  # whether the queries' own keys follow the past ones


@dataclass(frozen=True, eq=False)
class ScoreTile:
    """Queries [start, end) of some batch rows, which together read the keys [first, keys_end).

    Without `first_keys` each query sees the keys from `first` up to itself, so no mask is needed. With `first_keys`
    query start+t sees the keys from first_keys[t] up to itself. Keys that end before the queries begin (`keys_end` <=
    `start`) are seen to their last.
    """

    index: int  # within the KeyRanges; part of dropout's seed
    rows: slice  # rows of the batch
    start: int
    end: int
    first: int
    keys_end: int
    first_keys: Tensor | None = None  # (end - start,)

    @property
    def past(self) -> int:
        """The number of the tile's keys that come before its first query."""
        return min(self.start, self.keys_end) - self.first

    @property
    def has_own(self) -> bool:
        """Whether the keys include the queries' own."""
        return self.keys_end > self.start

    @cached_property
    def parts(self) -> tuple[ScoreRectangle, ...]:
        r"""The scores as rectangles; those on the diagonal, which cover every query once, before the others.

             first     start     end          first      start  end
               |---------|----|----|            |---|------|----|
               |         | \  |    |            |\  |      | \  |    masked on the left, where the
               |  past   |____|____|            |  \| past |  \ |    window's first key moves
               |         |    | \  |            |---|------|----|
               |---------|----|----|

        A square of at most 256 queries is causal, all else is seen whole. Parts of a query are merged later.
        """
        num_queries = self.end - self.start
        queries = slice(0, num_queries)
        past = self.past
        # All queries see the keys from this one on.
        last = 0 if self.first_keys is None else int(self.first_keys.max()) + 1 - self.first
        if last > past:
            return (ScoreRectangle(queries, slice(0, past + num_queries), diagonal=True, masked=True),)
        own = _triangle(0, num_queries, past) if self.keys_end > self.start else ()
        moving = [ScoreRectangle(queries, slice(0, last), masked=True)] if last else []
        whole = [ScoreRectangle(queries, slice(last, past))] if last < past else []
        return (*own, *whole, *moving)

    @cached_property
    def window(self) -> int | None:
        """The number of keys that every query sees, if it is the same for all: a sliding window."""
        if self.first_keys is None or not self.has_own or not bool((self.first_keys.diff() == 1).all()):
            return None
        return self.past + 1

    @property
    def irregular(self) -> bool:
        """Whether the tile is neither causal nor a sliding window, but has several documents, or a window's edge."""
        return self.first_keys is not None and self.window is None

    @property
    def regular(self) -> RegularMask:
        """The mask of a tile that isn't irregular."""
        return RegularMask(self.first, self.past, self.window, self.has_own)

    def mask(self, part: ScoreRectangle, device: torch.device) -> Tensor:
        """Returns whether a query of a rectangle sees a key of it, (queries, keys)."""
        rows, keys = part.queries, part.keys
        query = torch.arange(self.start + rows.start, self.start + rows.stop, device=device)[:, None]
        key = torch.arange(self.first + keys.start, self.first + keys.stop, device=device)
        if self.first_keys is None:
            return key <= query
        return (key <= query) & (key >= self._first_keys_on(device)[rows, None])

    def _first_keys_on(self, device: torch.device) -> Tensor:
        """Returns the first keys, copied once to a GPU, which else would wait for each copy."""
        assert self.first_keys is not None
        if device not in self._copies:
            self._copies[device] = self.first_keys.to(device)
        return self._copies[device]

    @cached_property
    def _copies(self) -> dict[torch.device, Tensor]:
        return {}


def _triangle(begin: int, end: int, past: int) -> Iterator[ScoreRectangle]:
    """Yields the causal scores of the queries [begin, end) with their own keys, which lie `past` keys later."""
    num_squares = -(-(end - begin) // SQUARE)
    if num_squares == 1:
        yield ScoreRectangle(slice(begin, end), slice(past + begin, past + end), diagonal=True)
        return
    middle = begin + SQUARE * -(-num_squares // 2)
    yield from _triangle(begin, middle, past)
    yield from _triangle(middle, end, past)
    yield ScoreRectangle(slice(middle, end), slice(past + begin, past + middle))


class KeyRanges:
    r"""Query start+t of batch row r sees the keys first_key[r, t] .. start+t. All layers share one.

    Every mask of a causal model has this form: plain causal attention (first_key = 0), packed documents (the
    document's first token), chunked attention (the chunk's), sliding windows (the query's position - w + 1).

        keys        0          start     end
                    |------------|--------|
        queries     | all        | \      |   a long run of queries with one first key: one unmasked tile
                    |       \    |   \    |   first keys that move: masked tiles of 192 queries, which
                    |         \  |     \  |   read the window and 192 keys more

    Args:
        first_key: (rows, length) int64; rows is 1 (all batch rows alike) or the batch size.
        start: the position of the slice's first query.
        keys_end: the end of the keys, at most `start`: of earlier keys alone, of which some queries may see none. None:
            each query's own key is the last that it sees.

    Raises:
        SlipstreamError: where a first key is negative or comes after its own query.
    """

    def __init__(self, first_key: Tensor, start: int, keys_end: int | None = None) -> None:
        if first_key.ndim != 2 or first_key.numel() == 0 or first_key.dtype != torch.int64:
            raise SlipstreamError(
                f"first_key has shape {tuple(first_key.shape)} and dtype {first_key.dtype}; give the "
                "first key of each query as int64, (1, length) or (batch, length)"
            )
        if start < 0:
            raise SlipstreamError(f"a slice starts at {start}; positions begin at 0")
        self.start = start
        self.end = start + first_key.shape[1]
        self.keys_end = self.end if keys_end is None else keys_end
        self.has_own = self.keys_end > start  # whether the keys include the queries' own
        first_key = first_key.cpu()
        self.first_key = first_key[:1] if bool((first_key == first_key[:1]).all()) else first_key
        self._check()
        self.first = int(first_key.min())
        self._last_first = int(first_key.max())
        self.tiles = tuple(self._tiles())
        self._parts: dict[tuple[int, int], KeyRanges] = {}

    @classmethod
    @lru_cache(maxsize=256)
    def causal(cls, start: int, end: int) -> KeyRanges:
        """Returns the ranges of plain causal attention: each query of [start, end) sees every key up to itself."""
        return cls(_same_first(end - start), start)

    @property
    def num_rows(self) -> int:
        """1 where all batch rows are alike, else the batch size."""
        return self.first_key.shape[0]

    def part(self, begin: int, end: int) -> KeyRanges:
        """Returns the ranges of the slice's queries [begin, end), counted within the slice."""
        if (begin, end) not in self._parts:
            self._parts[begin, end] = KeyRanges(self.first_key[:, begin:end], self.start + begin)
        return self._parts[begin, end]

    def among(self, begin: int, end: int) -> KeyRanges | None:
        """Returns which of the keys [begin, end) each query sees, all places counted from `begin`; None where no query
        sees any. Pairs of queries and keys that lie alike share one, of which most see all.

        Args:
            begin: the first of the keys.
            end: the end of the keys: at most the first query's position, or that of the last query's own key.
        """
        if self.first >= end:
            return None
        start = self.start - begin
        num_keys = None if end == self.end else end - begin
        if self._last_first <= begin:
            return _seen_whole(start, start + self.end - self.start, num_keys)
        first_key = (self.first_key - begin).clamp_(min=0, max=num_keys)
        return _placed(first_key.numpy().tobytes(), self.num_rows, start, num_keys)

    def own(self, each: Tensor, begin: int = 0) -> Tensor:
        """Returns the slice's part of a buffer of the sequence from the token `begin` on, (B, heads, L - begin, D)."""
        return each.narrow(2, self.start - begin, self.end - self.start)

    def seen(self, each: Tensor) -> Tensor:
        """Returns the part of such a buffer that any query sees."""
        return each.narrow(2, self.first, self.keys_end - self.first)

    @cached_property
    def irregular(self) -> bool:
        """Whether a tile is neither causal nor a sliding window."""
        return any(tile.irregular for tile in self.tiles)

    @cached_property
    def regular(self) -> RegularMask | None:
        """The mask, where it is causal or a sliding window, and the same in all rows."""
        if self.num_rows > 1:
            return None
        (first_key,) = self.first_key
        past = min(self.start, self.keys_end) - self.first
        if int(first_key.max()) == self.first:
            return RegularMask(self.first, past, has_own=self.has_own)
        if not self.has_own:
            return None
        window = self.end - int(first_key[-1])
        is_window = bool((first_key == (torch.arange(self.start, self.end) + 1 - window).clamp(min=0)).all())
        return RegularMask(self.first, past, window) if is_window else None

    def __repr__(self) -> str:
        return f"KeyRanges([{self.start}, {self.end}), first={self.first}, {len(self.tiles)} tiles)"

    def _cuts_of(self, first_key: Tensor) -> Iterator[tuple[int, int]]:
        """Cuts one row's queries, without those that see none of the keys."""
        if self.keys_end == self.end:
            yield from _cuts(first_key)
            return
        for begin, end in _runs(first_key < self.keys_end):
            yield from ((begin + start, begin + stop) for start, stop in _cuts(first_key[begin:end]))

    def _check(self) -> None:
        positions = torch.arange(self.start, self.end)
        wrong = ((self.first_key < 0) | (self.first_key > positions)).nonzero()
        if len(wrong):
            row, query = wrong[0].tolist()
            raise SlipstreamError(
                f"the query at position {self.start + query} of batch row {row} has the first key "
                f"{int(self.first_key[row, query])}; give one from 0 to the query's own position"
            )

    def _tiles(self) -> Iterator[ScoreTile]:
        index = 0
        for row, first_key in enumerate(self.first_key):
            rows = slice(None) if self.num_rows == 1 else slice(row, row + 1)
            for begin, end in self._cuts_of(first_key):
                first_keys = first_key[begin:end]
                first = int(first_keys.min())
                moves = None if bool((first_keys == first).all()) else first_keys
                start, stop = self.start + begin, self.start + end
                yield ScoreTile(index, rows, start, stop, first, min(stop, self.keys_end), moves)
                index += 1


def _same_first(length: int) -> Tensor:
    """Returns the first keys (1, length) of queries that see all keys, which take the memory of one."""
    return torch.zeros(1, 1, dtype=torch.int64).expand(1, length)


# As many as pairs of slices that lie apart by different numbers of tokens, or are different parts of documents.
_MOST_PLACES = 2048


@lru_cache(maxsize=_MOST_PLACES)
def _seen_whole(start: int, end: int, num_keys: int | None) -> KeyRanges:
    return KeyRanges(_same_first(end - start), start, num_keys)


@lru_cache(maxsize=_MOST_PLACES // 8)
def _placed(first_key: bytes, num_rows: int, start: int, num_keys: int | None) -> KeyRanges:
    return KeyRanges(torch.frombuffer(bytearray(first_key), dtype=torch.int64).view(num_rows, -1), start, num_keys)


def _runs(flags: Tensor) -> Iterator[tuple[int, int]]:
    """Yields where flags are set: the begin and end of each run."""
    edges = torch.nn.functional.pad(flags.to(torch.int8), (1, 1)).diff().nonzero().flatten().tolist()
    yield from zip(edges[::2], edges[1::2], strict=True)


def _cuts(first_key: Tensor) -> Iterator[tuple[int, int]]:
    """Cuts one row's queries into long runs with one first key, and blocks of the queries between them."""
    counts = torch.unique_consecutive(first_key, return_counts=True)[1]
    done = position = 0
    for count in counts.tolist():
        if count >= SHORTEST_RUN:
            yield from _blocks(done, position)
            yield position, position + count
            done = position + count
        position += count
    yield from _blocks(done, position)


def _blocks(begin: int, end: int) -> Iterator[tuple[int, int]]:
    for start in range(begin, end, MASKED_ROWS):
        yield start, min(start + MASKED_ROWS, end)
