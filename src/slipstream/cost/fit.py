"""TeraPipe's model of a slice's time, t(i, j) for i tokens after a context of j tokens, its fit, and sums of fits."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from slipstream.array_types import Flags, Floats
from slipstream.errors import SlipstreamError

_TOLERANCE = 1e-12  # relative to the largest gradient at the start


def fit_nonnegative(columns: Floats, wanted: Floats) -> Floats:
    """Returns the coefficients of the columns, none below 0, with the least squared error.

    Args:
        columns: (values, columns).
        wanted: (values,).
    """
    scale = np.linalg.norm(columns, axis=0)
    scale[scale == 0] = 1
    scaled = columns / scale
    solution, free = np.zeros(scaled.shape[1]), np.zeros(scaled.shape[1], np.bool_)
    least = _TOLERANCE * float(np.abs(scaled.T @ wanted).max(initial=0.0))
    for _ in range(3 * scaled.shape[1]):  # each column enters once or twice; never seen to end here
        gradient = np.where(free, -np.inf, scaled.T @ (wanted - scaled @ solution))
        if not (gradient > least).any():
            break
        free[gradient.argmax()] = True
        solution = _feasible(scaled, wanted, solution, free)
    coefficients: Floats = solution / scale
    return coefficients


def fit_relative(columns: Floats, wanted: Floats, least: float = 0.0) -> Floats:
    """Returns the coefficients of the columns, none below 0, with the least squared relative error.

    Args:
        columns: (values, columns).
        wanted: (values,), of 0 or more.
        least: the error of a smaller value is relative to this.
    """
    if not wanted.any():
        return np.zeros(columns.shape[1])
    return fit_nonnegative(columns / np.maximum(wanted, least)[:, None], np.ones(len(wanted)))


def _feasible(columns: Floats, wanted: Floats, found: Floats, free: Flags) -> Floats:
    """Returns the best coefficients of the free columns, from which it takes those that would be below 0."""
    while True:
        best = np.zeros_like(found)
        best[free] = np.linalg.lstsq(columns[:, free], wanted, rcond=None)[0]
        below = free & (best <= 0)
        if not below.any():
            return best
        # The share of the way at which the first of them is 0.
        way = (found[below] / (found[below] - best[below])).min()
        found = found + way * (best - found)
        free &= found > _TOLERANCE * found.max(initial=0.0)
        found[~free] = 0.0


SlicePoint = tuple[int, int]  # slice length i, context j, in tokens


@dataclass(frozen=True)
class AttentionWindow:
    """The keys that a query attends to. Full attention sees all before it, and its `width` is None.

    Query q sees q + 1 keys under full attention, min(q + 1, width) under a sliding window, and q mod width + 1 where
    attention stays within blocks.
    """

    kind: Literal["full", "sliding", "blockwise"] = "full"
    width: int | None = None

    def first(self, query: int) -> int:
        """Returns the first key that a query sees."""
        if self.kind == "full" or self.width is None:
            return 0
        return max(0, query - self.width + 1) if self.kind == "sliding" else query - query % self.width

    def context_keys(self, context: Any) -> Any:
        """Returns how many of `context` tokens the first query after them reads; ints or integer arrays."""
        if self.width is None:
            return context
        return np.minimum(context, self.width - 1) if self.kind == "sliding" else context % self.width

    def context_scores(self, length: Any, context: Any) -> Any:
        """Returns the scores of a slice beyond those of an equal one without context: i j under full attention."""
        return self.scores(context + length) - self.scores(context) - self.scores(length)

    def scores(self, num_queries: Any) -> Any:
        """Returns the number of scores of the first `num_queries` queries: the area under the mask."""
        if self.width is None:
            return num_queries * (num_queries + 1) / 2
        width = self.width
        if self.kind == "sliding":
            rising = np.minimum(num_queries, width)
            return rising * (rising + 1) / 2 + (num_queries - rising) * width
        blocks, rest = num_queries // width, num_queries % width
        return blocks * (width * (width + 1) / 2) + rest * (rest + 1) / 2


def find_window(first_keys: Mapping[int, int]) -> AttentionWindow:
    """Returns the window under which the query at each position sees the given first key.

    Raises:
        SlipstreamError: where the window is neither full, sliding nor blockwise.
    """
    lengths = {position - first + 1 for position, first in first_keys.items() if first > 0}
    if not lengths:
        return AttentionWindow()
    block = math.gcd(*first_keys.values())
    for window in (AttentionWindow("sliding", max(lengths)), AttentionWindow("blockwise", block)):
        if all(window.first(position) == first for position, first in first_keys.items()):
            return window
    raise SlipstreamError(
        f"attention's first keys by position are {dict(first_keys)}, which is neither full attention, a sliding window "
        "nor blocks; its time over the context can't be predicted."
    )


def find_windows(first_keys: Callable[[int], Sequence[int]], seq_len: int) -> list[AttentionWindow]:
    """Returns the window of every attention call, given the first key of queries at some positions in each of them."""
    last = seq_len - 1
    probes = {position: first_keys(position) for position in (last, max(0, last - 1), last // 2, last // 3)}
    probes |= {first - 1: first_keys(first - 1) for first in probes[last] if first > 0}
    return [find_window(dict(zip(probes, firsts, strict=True))) for firsts in zip(*probes.values(), strict=True)]


@dataclass(frozen=True)
class TimeFit:
    """t(i, j) = t(i, 0) + [j > 0] (a0 + a1 i + a2 j + a3 i j), seconds (TeraPipe section 3.3, equation 9).

    t(i, 0) is interpolated in the table `base` over `lengths`: linearly, but for a slice's own scores, i (i + 1) / 2 of
    them under full attention, at a3 each. A straight line is above a function that grows with the square, so that a
    search would choose just the lengths that were measured.

    Where attention has a window, j and i j count only the keys and scores within it; each of several windows has its
    own a2 and a3. None is below 0.
    """

    lengths: tuple[int, ...]
    base: tuple[float, ...]
    windows: tuple[AttentionWindow, ...]
    coefficients: tuple[float, ...]  # a0, a1, then a2, a3 of every window

    def __call__(self, length: Any, context: Any) -> Any:
        """Returns seconds: ints give a float, integer arrays are broadcast.

        Raises:
            SlipstreamError: beyond the measured lengths.
        """
        i, j = np.asarray(length), np.asarray(context)
        if i.size and not (self.lengths[0] <= i.min() and i.max() <= self.lengths[-1]):
            raise SlipstreamError(
                f"slices of {i.min()} to {i.max()} tokens have no known times: {self.lengths[0]} to {self.lengths[-1]} "
                "were measured. Profile again with a larger --longest-slice."
            )
        seconds = np.interp(i, self.lengths, self.base) - self._sag(i)
        extra = sum(a * x for a, x in zip(self.coefficients, _features(i, j, self.windows), strict=True))
        seconds = seconds + np.where(j > 0, extra, 0.0)
        return float(seconds) if seconds.ndim == 0 else seconds

    def _sag(self, length: np.ndarray[Any, Any]) -> Any:
        """Returns by how much the seconds of the slices' own scores lie below straight lines between the lengths."""
        ends = np.array(self.lengths)
        return sum(
            coefficient * (np.interp(length, ends, window.scores(ends)) - window.scores(length))
            for coefficient, window in zip(self.coefficients[3::2], self.windows, strict=True)
        )


def fit_times(
    seconds: Mapping[SlicePoint, float], windows: Sequence[AttentionWindow] = (AttentionWindow(),)
) -> TimeFit:
    """Returns the fit to measured points with the least squared relative error, table and coefficients together.

    All are at least 0, as a context only adds work. Noise would make some negative, and lengths and contexts that were
    not measured together would seem to take less time the farther they are: a search would choose just these.

    Raises:
        SlipstreamError: without any point of context 0.
    """
    lengths = sorted(i for i, j in seconds if j == 0)
    if not lengths:
        raise SlipstreamError("no slice was measured without context: add points (length, 0).")
    i, j = np.array([*seconds]).T
    t = np.array([*seconds.values()])
    table = [np.interp(i, lengths, row) for row in np.eye(len(lengths))]
    extra = [np.where(j > 0, x, 0.0) for x in _features(i, j, windows)]
    fitted = fit_relative(np.stack([*table, *extra], axis=1), t)
    base, coefficients = fitted[: len(lengths)], fitted[len(lengths) :]
    return TimeFit(tuple(lengths), tuple(map(float, base)), tuple(windows), tuple(map(float, coefficients)))


def _features(i: np.ndarray[Any, Any], j: np.ndarray[Any, Any], windows: Sequence[AttentionWindow]) -> list[Any]:
    columns: list[Any] = [1.0 + 0 * i, i]
    for window in windows:
        columns += [window.context_keys(j), window.context_scores(i, j)]
    return columns


@dataclass(frozen=True)
class FittedTime:
    """The time of one op, t(slice_length, context_length) in seconds, of any number of parts of each kind.

    Takes ints or integer arrays. A part's time is a weighted sum of measured stages' fits. Weights may be negative, as
    parts are differences of stages, so that noise may bring it below 0: then it counts as 0.
    """

    fits: tuple[TimeFit, ...]  # the measured stages' fits
    weights: tuple[tuple[float, ...], ...]  # the fits' weights in every kind of part
    numbers: tuple[float, ...]  # the number of parts of every kind

    def __call__(self, length: Any, context: Any) -> Any:
        measured = [fit(length, context) for fit in self.fits]
        total = sum(n * _positive(row, measured) for n, row in zip(self.numbers, self.weights, strict=True) if n)
        return total if isinstance(total, np.ndarray) else float(total)


def _positive(weights: Sequence[float], values: Sequence[Any]) -> Any:
    return np.maximum(sum(weight * value for weight, value in zip(weights, values, strict=True) if weight), 0.0)
