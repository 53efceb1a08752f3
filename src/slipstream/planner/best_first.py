"""Best-first search: what has the least lower bound is tried first, until no bound beats what was found."""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heappop, heappush
from itertools import count
from math import inf
from typing import Generic, TypeVar

Entry = TypeVar("Entry")


class BestFirst(Generic[Entry]):
    """What a search has yet to try, by lower bounds of its seconds; equal ones come as they were added."""

    def __init__(self) -> None:
        self._number = count()
        self._entries: list[tuple[float, tuple[float, ...], int, Entry]] = []

    def add(self, bound: float, entry: Entry, then: tuple[float, ...] = ()) -> None:
        """Adds an entry; of those with equal bounds the one with less in `then` is tried first."""
        heappush(self._entries, (bound, then, next(self._number), entry))

    def next_below(self, seconds: float = inf) -> tuple[float, Entry] | None:
        """Removes and returns the entry with the least bound, and the bound; None where no bound is below `seconds`."""
        if not self._entries or self._entries[0][0] >= seconds:
            return None
        bound, _, _, entry = heappop(self._entries)
        return bound, entry

    def __iter__(self) -> Iterator[Entry]:
        """Yields what is left, in no order."""
        return (entry for *_, entry in self._entries)
