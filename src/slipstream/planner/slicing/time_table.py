"""The times of all slices into which a sequence can be cut, from a function or a table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from slipstream.array_types import Floats, Ints
from slipstream.errors import SlipstreamError

SliceTime = Callable[[Any, Any], Any] | ArrayLike

MAX_CUTS = 8192  # a table of 0.5 GiB; the search reads it a hundred times
_BLOCK = 64  # cuts whose slices are timed in one call: small enough for the cache, large enough for few calls


@dataclass(frozen=True)
class TimeTable:
    """The seconds of the slice between any two cuts: one or more times (forward, backward) with separate maxima.

    `times[d, end, start]` is the d-th time of the slice of tokens bounds[start]..bounds[end], infinite where there is
    no such slice.
    """

    bounds: Ints  # (n+1,) tokens, from 0 to the sequence's length
    times: Floats  # (D, n+1, n+1)

    @cached_property
    def weight(self) -> Floats:
        """The time that is summed over the slices, (n+1, n+1)."""
        total: Floats = self.times[0] if len(self.times) == 1 else self.times.sum(axis=0)
        return total

    @cached_property
    def floors(self) -> Floats:
        """The least time among the slices that end where this one does and start no later.

        Where it is over a limit, so are all of these slices, and the search skips them.
        """
        return np.minimum.accumulate(self.times, axis=-1)

    @cached_property
    def least(self) -> tuple[float, ...]:
        """Lower bounds of a slicing's maxima: it has a first slice and a last one."""
        first, last = self.times[:, :, 0].min(axis=1), self.times[:, -1].min(axis=1)
        return tuple(np.maximum(first, last).tolist())

    def lengths(self, cuts: Sequence[int]) -> tuple[int, ...]:
        """Returns the tokens of the slices between cuts."""
        return tuple(int(tokens) for tokens in np.diff(self.bounds[list(cuts)]))


def cut_positions(length: int, granularity: int) -> Ints:
    """Returns 0, granularity, 2·granularity, ... and the length, where a shorter slice may end."""
    if length < 1 or granularity < 1:
        raise SlipstreamError(f"length={length}, granularity={granularity}: both are tokens, 1 or more.")
    num_cuts = -(-length // granularity)
    if num_cuts > MAX_CUTS:
        raise SlipstreamError(
            f"{length} tokens at granularity {granularity} have {num_cuts} possible cuts; at most {MAX_CUTS} are "
            f"searched. Use granularity={-(-length // MAX_CUTS)} or more."
        )
    return np.append(np.arange(num_cuts) * granularity, length)


def time_table(times: Sequence[SliceTime], length: int, granularity: int, min_slice: int | None) -> TimeTable:
    """Returns the times of all slices of at least `min_slice` tokens.

    Args:
        times: each a function (slice_length, context_length) -> seconds, called with integer arrays if it takes
            them, or an array whose entry [i, j] is for i·granularity tokens after j·granularity (row 0 is not used).
            Infinite: such a slice is not allowed.
    """
    bounds = cut_positions(length, granularity)
    if min_slice is not None and not 1 <= min_slice <= length:
        raise SlipstreamError(f"min_slice={min_slice}: a slice has 1 to {length} tokens.")
    tables = np.stack([_evaluate(time, bounds, granularity) for time in times])
    wrong = np.isnan(tables) | (tables < 0)
    if wrong.any():
        d, end, start = np.argwhere(wrong)[0]
        raise SlipstreamError(
            f"t({bounds[end] - bounds[start]}, {bounds[start]}) is {tables[d, end, start]}: a slice takes 0 seconds or "
            "more (infinite where it is not allowed)."
        )
    if min_slice is not None:
        tables[:, bounds[:, None] - bounds[None, :] < min_slice] = np.inf
    return TimeTable(bounds, tables)


def _evaluate(time: SliceTime, bounds: Ints, granularity: int) -> Floats:
    if not callable(time):
        time = _lookup(time, bounds, granularity)
    n = len(bounds) - 1
    table = np.full((n + 1, n + 1), np.inf)
    for first in range(0, n, _BLOCK):
        ends = bounds[first + 1 : first + 1 + _BLOCK, None]
        last = first + len(ends)
        starts = bounds[None, :last]
        contexts = np.minimum(
            starts, bounds[first:last, None]
        )  # any time will do for slices that end before they start
        seconds = _seconds(time, ends - contexts, contexts)
        table[first + 1 : last + 1, :last] = np.where(starts < ends, seconds, np.inf)
    return table


def _seconds(time: Callable[[Any, Any], Any], lengths: Ints, contexts: Ints) -> Floats:
    """Returns the times of these slices, computed one by one if the function doesn't take arrays."""
    try:
        seconds = time(lengths, contexts)
    except (TypeError, ValueError):
        seconds = None
    if np.shape(seconds) != lengths.shape:
        seconds = np.vectorize(time, otypes=[float])(lengths, contexts)
    return np.asarray(seconds, float)


def _lookup(values: ArrayLike, bounds: Ints, granularity: int) -> Callable[[Any, Any], Any]:
    array = np.asarray(values, float)
    n = len(bounds) - 1
    if array.ndim != 2 or min(array.shape) < n or len(array) < n + 1 or bounds[-1] != n * granularity:
        raise SlipstreamError(
            f"A table of shape {array.shape} for {bounds[-1]} tokens at granularity {granularity}: it needs shape "
            f"({n + 1}, {n}) or more, entry [i, j] for i·{granularity} tokens after j·{granularity}, and a length "
            f"that is a multiple of {granularity}."
        )
    return lambda tokens, context: array[tokens // granularity, context // granularity]
