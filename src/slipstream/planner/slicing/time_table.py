"""The times of all slices into which a sequence can be cut, and the cuts with the least sum of them under limits."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import count
from math import inf
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import ArrayLike

from slipstream.array_types import Floats, Ints
from slipstream.errors import SlipstreamError

Choice = TypeVar("Choice")
Limits = tuple[float, ...]


class Solution(NamedTuple, Generic[Choice]):
    """The best solution under some limits on its maxima."""

    total: float  # the least sum; infinite if nothing keeps to the limits
    maxima: Limits  # of this solution, at most the limits
    above: Limits  # the smallest values over the limits: limits below these allow no other solution
    choice: Choice


def minimize(solve: Callable[[Limits], Solution[Choice]], lower: Limits, weight: float) -> Solution[Choice]:
    """Returns the solution with the least total + weight · (sum of its maxima).

    A box of solutions, with maxima of at least `lower` and at most `limits`, costs solve(limits).total + weight ·
    sum(lower) or more. The solution found there costs more than that only by the gap between `lower` and its own
    maxima. So the box with the least bound is cut in two inside its widest gap: the lower part is solved again, the
    upper part keeps its solution and its `lower` rises to the next value there is. It ends when no bound is below the
    best cost. No maximum is skipped, so there is no ε (TeraPipe, section 3.3).

    Args:
        solve: limits -> the solution with the least total that keeps to them.
        lower: no solution has maxima below these.
        weight: K-1 for K stages.
    """
    numbers = count()  # boxes with equal bounds are cut in the order in which they were added
    best, best_cost = solve((inf,) * len(lower)), inf
    boxes: list[tuple[float, int, Limits, Limits, Solution[Choice]]] = []  # (bound, number, lower, limits, solution)

    def add(lower: Limits, limits: Limits, solution: Solution[Choice]) -> None:
        nonlocal best, best_cost
        cost = solution.total + weight * sum(solution.maxima)
        if cost < best_cost:
            best, best_cost = solution, cost
        bound = solution.total + weight * sum(lower)
        if bound < best_cost and any(low < high for low, high in zip(lower, solution.maxima, strict=True)):
            heapq.heappush(boxes, (bound, next(numbers), lower, limits, solution))

    add(lower, (inf,) * len(lower), best)
    while boxes and boxes[0][0] < best_cost:
        bound, _, lower, limits, solution = heapq.heappop(boxes)
        slack = (best_cost - bound) / weight  # maxima further over `lower` cost too much
        gaps = [min(slack, high - low) for low, high in zip(lower, solution.maxima, strict=True)]
        axis = max(range(len(gaps)), key=gaps.__getitem__)
        share = 0.8 if gaps[axis] >= slack else 0.6  # halves take a quarter more solves
        middle = lower[axis] + share * gaps[axis]
        if middle >= solution.maxima[axis]:  # neighbouring numbers
            middle = lower[axis]
        below = tuple(middle if i == axis else limit for i, limit in enumerate(limits))
        found = solve(below)
        add(lower, below, found)
        add(tuple(found.above[i] if i == axis else low for i, low in enumerate(lower)), limits, solution)
    return best


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


def between_cuts(
    length: int, granularity: int, seconds: Callable[[Ints, Ints], Floats], otherwise: float = 0.0
) -> Floats:
    """Returns the seconds of the slice between any two places to cut, (..., ends, starts), and elsewhere `otherwise`.

    `seconds` are those of slices of some lengths after some contexts, (..., slices).
    """
    bounds = cut_positions(length, granularity)
    ends, starts = np.tril_indices(len(bounds), -1)
    found = seconds(bounds[ends] - bounds[starts], bounds[starts])
    table = np.full((*found.shape[:-1], len(bounds), len(bounds)), otherwise)
    table[..., ends, starts] = found
    return table


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


NUMBA_PAYS_FROM = 200  # cuts; with fewer, NumPy is done before Numba is imported

CutPath = Solution[tuple[int, ...]]  # the cuts 0, ..., n; none where the limits allow none
# (times, floors, weight, limits) -> least sum and previous cut of each cut, and `above`
PathSearch = Callable[[Floats, Floats, Floats, Floats], tuple[Floats, Ints, Floats]]


def shortest_path(table: TimeTable, limits: Limits, search: PathSearch | None = None) -> CutPath:
    """Returns the cuts with the least sum of times whose slices keep to the limits, one for each time.

    Among equal sums, each cut takes the longest slice before it, so that both searches give the same cuts.
    """
    if search is None and len(table.bounds) > NUMBA_PAYS_FROM:
        search = search_compiled()
    best, previous, above = (search or search_numpy)(table.times, table.floors, table.weight, np.array(limits, float))
    cuts = [len(best) - 1] if best[-1] < inf else []
    while cuts and cuts[-1] > 0:
        cuts.append(int(previous[cuts[-1]]))
    maxima = table.times[:, cuts[:-1], cuts[1:]].max(axis=1, initial=0)
    return CutPath(float(best[-1]), tuple(maxima.tolist()), tuple(above.tolist()), tuple(cuts[::-1]))


def search_numpy(times: Floats, floors: Floats, weight: Floats, limits: Floats) -> tuple[Floats, Ints, Floats]:
    """Searches with NumPy, for every cut over all earlier ones together: the inner line of the paper's Algorithm 1."""
    over = times > limits[:, None, None]
    above = np.where(over, times, inf).min(axis=(1, 2))
    allowed = np.where(over.any(axis=0), inf, weight)
    best = np.full(len(weight), inf)
    best[0] = 0
    previous = np.zeros(len(weight), np.int64)
    for end in range(1, len(weight)):
        sums = best[:end] + allowed[end, :end]
        previous[end] = start = sums.argmin()
        best[end] = sums[start]
    return best, previous, above


def search_loops(times: Floats, floors: Floats, weight: Floats, limits: Floats) -> tuple[Floats, Ints, Floats]:
    """Searches as `search_numpy` does, but only slices that start late enough to keep to the limits; for Numba."""
    n = len(weight) - 1
    best = np.full(n + 1, np.inf)
    best[0] = 0
    previous = np.zeros(n + 1, np.int64)
    above = np.full(len(times), np.inf)
    within = np.zeros(len(times), np.int64)  # the first start that keeps to each limit
    for end in range(1, n + 1):
        first = 0  # all slices that start before it are over a limit
        for d in range(len(times)):
            own = within[d]  # usually near the previous one; `floors` falls, so a step or two finds it
            while own < end and floors[d, end, own] > limits[d]:
                own += 1
            while own > 0 and floors[d, end, own - 1] <= limits[d]:
                own -= 1
            within[d] = own
            if own > 0:
                above[d] = min(above[d], floors[d, end, own - 1])
            for start in range(own, end):
                if times[d, end, start] > limits[d]:
                    above[d] = min(above[d], times[d, end, start])
            first = max(first, own)
        for start in range(first, end):
            total = best[start] + weight[end, start]
            if total < best[end]:
                for d in range(len(times)):
                    if times[d, end, start] > limits[d]:
                        break
                else:
                    best[end], previous[end] = total, start
    return best, previous, above


@cache
def search_compiled() -> PathSearch:
    """Returns `search_loops` compiled by Numba, whose import takes a while: loaded only where it pays."""
    from slipstream.simulator.numba_jit import compiled

    return compiled(search_loops)
