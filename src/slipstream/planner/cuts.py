"""Where rows may be cut into slices: every search asks this, and has no rule of its own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Self

import numpy as np

from slipstream.array_types import Flags, Ints
from slipstream.errors import SlipstreamError
from slipstream.schedule import slice_lengths

_GRANULARITY = 64  # tokens: matrix products like multiples of it
_LEAST_GRANULES = 16  # places in the longest row
# More slices seldom make a step shorter, and take long to order.
_MOST_SLICES = 32


@dataclass(frozen=True)
class Cuts:
    """The places where rows may be cut, and the slices that are allowed between them.

    A search takes places, first slices and changes of slices from here. It must not take two neighbouring places to be
    as far apart as others, unless it reads `granularity`.

    Args:
        granularity: slices begin at multiples of this many tokens.
        longest_slice: tokens of the longest slice, of which whole granules count. None: the row.
        shortest_slice: tokens of the shortest slice, the last one of a row included.
        most_slices: the largest number of slices of a row, unless `longest_slice` asks for more. None: any number.

    Raises:
        SlipstreamError: for a number below 1.
    """

    granularity: int = _GRANULARITY
    longest_slice: int | None = None
    shortest_slice: int = 1
    most_slices: int | None = _MOST_SLICES

    def __post_init__(self) -> None:
        for name in ("granularity", "longest_slice", "shortest_slice", "most_slices"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise SlipstreamError(f"{name}={value}: give 1 or more.")

    @classmethod
    def of_rows(cls, length: int, num_slices: int = _LEAST_GRANULES) -> Self:
        """Returns the usual places in rows of up to `length` tokens: at least 16 in the longest, and enough for so many
        slices, as far as there are tokens."""
        return cls(min(_GRANULARITY, max(1, length // max(_LEAST_GRANULES, num_slices))))

    # --- places ------------------------------------------------------------------------------------------------------

    def num_places(self, length: int) -> int:
        """Returns the number of places where slices of a row may begin, the row's own begin included."""
        if length < 1:
            raise SlipstreamError(f"length={length}: a row has 1 token or more.")
        return -(-length // self.granularity)

    def places(self, length: int) -> Ints:
        """Returns where slices of a row may begin, in tokens, and the row's end, (places + 1,)."""
        return np.append(np.arange(self.num_places(length)) * self.granularity, length)

    def places_of_rows(self, lengths: Ints) -> tuple[Ints, Ints]:
        """Returns where slices of several rows may begin, each from its own row's begin, (places,), and the number of
        each row's first place, with that of all places at the end, (rows + 1,)."""
        counts = -(-lengths // self.granularity)
        firsts = np.cumsum([0, *counts])
        return (np.arange(firsts[-1]) - np.repeat(firsts[:-1], counts)) * self.granularity, firsts

    def place_from(self, tokens: Ints) -> Ints:
        """Returns the number of the first place of a row at or after so many tokens."""
        return -(-tokens // self.granularity)

    def every(self, number: int) -> Self:
        """Returns cuts at every `number`th of these places alone, or at as few as the longest slice lets be."""
        if self.longest_slice is not None:
            number = min(number, self.longest_slice // self.granularity)
        return replace(self, granularity=max(1, number) * self.granularity)

    def with_few_places(self, length: int, most: int) -> Self:
        """Returns cuts at some of these places alone, about `most` in a row of `length` tokens."""
        return self.every(-(-(length // most) // self.granularity))

    def with_long_ends(self, length: int) -> Self:
        """Returns cuts at the nearest places at which the shortest slice is also kept to by a row's last one."""
        least = max(self.shortest_slice, self.granularity)
        fitting = (
            step for step in range(least, length + 1) if length % step == 0 or length % step >= self.shortest_slice
        )
        return replace(self, granularity=next(fitting, length))

    # --- slices ------------------------------------------------------------------------------------------------------

    def longest(self, length: int) -> int:
        """Returns the tokens of the longest slice that is allowed in a row. Raises SlipstreamError where none is."""
        longest = length
        if self.longest_slice is not None and self.longest_slice < length:
            longest = self.longest_slice // self.granularity * self.granularity
        if longest < 1:
            raise SlipstreamError(
                f"longest_slice={self.longest_slice}, but slices begin at multiples of granularity={self.granularity} "
                "tokens: give a longest slice of at least as many, or a smaller granularity."
            )
        if longest < self.shortest_slice:
            raise SlipstreamError(
                f"shortest_slice={self.shortest_slice}, but slices of a row of {length} have at most {longest} tokens: "
                "give a shortest slice of at most as many."
            )
        return longest

    def counts(self, length: int) -> range:
        """Returns the numbers of slices that a row may have."""
        fewest, most = -(-length // self.longest(length)), self.num_places(length)
        return range(fewest, max(fewest, most if self.most_slices is None else min(self.most_slices, most)) + 1)

    def allows(self, slices: Sequence[int]) -> bool:
        """Returns whether slices of a row may have these lengths, whatever their number."""
        if min(slices) < self.shortest_slice or max(slices) > self.longest(sum(slices)):
            return False
        return all(tokens % self.granularity == 0 for tokens in slices[:-1])

    def allowed_lengths(self, tokens: Ints, length: int) -> Flags:
        """Returns which slices of so many tokens, between places of a row, are allowed."""
        return (tokens >= self.shortest_slice) & (tokens <= self.longest(length))

    def check(self, slices: Sequence[int], length: int) -> None:
        """Raises SlipstreamError where a row can't be cut so. Slices that are given may begin anywhere."""
        slice_lengths(slices, length)
        longest, shortest = self.longest(length), self.shortest_slice
        for place, tokens in enumerate(slices):
            if not shortest <= tokens <= longest:
                raise SlipstreamError(
                    f"slices={[*slices]}: slice {place} has {tokens} tokens, but slices of a row of {length} have "
                    f"{shortest} to {longest} here. Give others, or leave the slices open."
                )

    def fewest(self, length: int) -> tuple[int, ...]:
        """Returns the slicing of a row with the fewest slices, each as long as the longest."""
        full, rest = divmod(length, longest := self.longest(length))
        return (longest,) * full + (rest,) * (rest > 0)

    def nearest(self, length: int, fractions: Sequence[float]) -> tuple[int, ...]:
        """Returns the slices of a row that begin, after the first, at the places nearest to these fractions of it. None
        is empty.

        Raises:
            SlipstreamError: where there are fewer places than slices.
        """
        count, places = len(fractions) + 1, self.num_places(length)
        if count > places:
            raise SlipstreamError(
                f"num_slices={count} for {length} tokens at granularity {self.granularity}: use 1 to {places} slices."
            )
        cuts = [0]
        for i, fraction in enumerate(fractions, start=1):
            place = round(fraction * length / self.granularity)
            cuts.append(min(max(place, cuts[-1] + 1), places - count + i))
        return tuple(b - a for a, b in pairwise([*(cut * self.granularity for cut in cuts), length]))

    def even(self, length: int, count: int) -> tuple[int, ...]:
        """Returns slices of nearly equal length, `count` of them, or as many as there are places."""
        count = min(count, self.num_places(length))
        return self.nearest(length, [i / count for i in range(1, count)])

    # --- changes of slices -------------------------------------------------------------------------------------------

    def moved(
        self, slices: tuple[int, ...], granules: int, pairs: Iterable[tuple[int, int]]
    ) -> Iterator[tuple[int, ...]]:
        """Yields the slices with so many granules moved from one to another, for each pair of a giver and a taker."""
        tokens = granules * self.granularity
        for giver, taker in pairs:
            if slices[giver] > tokens:
                changed = [*slices]
                changed[giver] -= tokens
                changed[taker] += tokens
                yield from self._allowed(tuple(changed))

    def halved(self, slices: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        """Yields the slices with one of them cut at the last place in its first half."""
        if len(slices) + 1 not in self.counts(sum(slices)):
            return
        for i, tokens in enumerate(slices):
            half = tokens // 2 // self.granularity * self.granularity
            if half:
                yield from self._allowed((*slices[:i], half, tokens - half, *slices[i + 1 :]))

    def joined(self, slices: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        """Yields the slices with two neighbours joined."""
        for i in range(len(slices) - 1):
            yield from self._allowed((*slices[:i], slices[i] + slices[i + 1], *slices[i + 2 :]))

    def _allowed(self, slices: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        if self.allows(slices):
            yield slices


USUAL_CUTS = Cuts()
"""Those of a row of which nothing is known."""
ANY_NUMBER = Cuts(most_slices=None)
"""The usual places, and any number of slices between them."""
