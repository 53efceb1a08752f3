"""Slices for equal stages: in closed form, and the exact optimum of TeraPipe's Eq. 5 for sequences and for batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial
from math import inf, nextafter, sqrt
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import ArrayLike

from slipstream.array_types import Floats, Ints
from slipstream.errors import SlipstreamError
from slipstream.planner.best_first import BestFirst
from slipstream.planner.cuts import Cuts
from slipstream.schedule import SlicedMicrobatch


def equal_time_cuts(num_slices: int, attention_share: float) -> list[float]:
    """Returns where slices 1, 2, ... begin, as fractions of the sequence, so that all take equal time.

    If attention takes a share A of the whole sequence's time, the first fraction x of it takes (1-A)x + Ax²; the i-th
    of s cuts solves this for i/s. With A = 0 the slices have equal lengths.
    """
    if not 0 <= attention_share <= 1:
        raise SlipstreamError(f"attention_share={attention_share}: give a fraction of the time, 0 to 1.")
    linear = 1 - attention_share
    square = attention_share
    shares = [i / num_slices for i in range(1, num_slices)]
    # with the root in the denominator nothing cancels, and A = 0 isn't a special case
    return [2 * share / (linear + sqrt(linear**2 + 4 * square * share)) for share in shares]


_ANYWHERE = Cuts(1, most_slices=None)


def equal_time_slices(length: int, num_slices: int, attention_share: float, cuts: Cuts = _ANYWHERE) -> tuple[int, ...]:
    """Returns slice lengths in tokens that take equal time, as nearly as there are places to cut; none is empty.

    Raises:
        SlipstreamError: where there are fewer places than slices.
    """
    return cuts.nearest(length, equal_time_cuts(num_slices, attention_share))


@dataclass(frozen=True)
class Slicing:
    """Slice lengths in tokens, first to last, and the seconds that they are predicted to take."""

    slices: tuple[int, ...]
    latency: float


@dataclass(frozen=True)
class SlicingTradeoff:
    """A slicing: no other one has both a smaller sum of times and a faster slowest slice."""

    slices: tuple[int, ...]
    total: float
    slowest: float

    def latency(self, num_stages: int, num_microbatches: int = 1) -> float:
        """Returns the seconds of so many equal microbatches that follow each other."""
        return num_microbatches * self.total + (num_stages - 1) * self.slowest


def slice_tokens(
    t: SliceTime,
    length: int,
    num_stages: int,
    granularity: int = 1,
    min_slice: int | None = None,
    *,
    backward: SliceTime | None = None,
    num_microbatches: int = 1,
) -> Slicing:
    """Returns the slices with the least latency on equal stages: TeraPipe's Eq. 5, exactly, without its ε.

    The latency is sum(t) + (K-1)·max(t) for K stages. With `backward` = b it is that of all forwards, then all
    backwards: sum(t) + sum(b) + (K-1)·(max(t) + max(b)), where the slowest slices may be different ones; the paper's
    t = forward + backward never exceeds that. For M equal microbatches that follow each other, the sums count M
    times and the maxima once.

    Args:
        t: the time of a slice on one stage, its message included: a function (slice_length, context_length) ->
            seconds, called with integer arrays if it takes them, or a table whose entry [i, j] is for i·granularity
            tokens after j·granularity. Infinite where a slice is not allowed.
        length: tokens of the sequence.
        num_stages: K.
        granularity: slices begin at multiples of this many tokens.
        min_slice: tokens every slice has at least, the last one too.
        backward: the time of a backward, like t, if it is to count with a separate maximum.
        num_microbatches: M.

    Raises:
        SlipstreamError: for numbers or times that are impossible, or if no slicing is allowed.
    """
    check_counts(num_stages, num_microbatches)
    times = [t] if backward is None else [t, backward]
    table = time_table(times, length, cuts_of(length, granularity, min_slice))
    return best_slicing(table, num_stages, num_microbatches)


def best_slicing(table: TimeTable, num_stages: int, num_microbatches: int = 1, tolerance: float = 0.0) -> Slicing:
    """Returns what `slice_tokens` does for these times, or slices whose latency is longer by less than a share of it,
    `tolerance`, in fewer solves."""
    weight = (num_stages - 1) / num_microbatches
    path = minimize(lambda limits: shortest_path(table, limits), table.least, weight, tolerance)
    check_allowed(path, int(table.bounds[-1]))
    return Slicing(table.lengths(path.choice), num_microbatches * path.total + (num_stages - 1) * sum(path.maxima))


def check_counts(num_stages: int, num_microbatches: int = 1) -> None:
    if num_stages < 1 or num_microbatches < 1:
        raise SlipstreamError(f"num_stages={num_stages}, num_microbatches={num_microbatches}: both are 1 or more.")


def check_allowed(path: CutPath, length: int) -> None:
    if path.total == inf:
        raise SlipstreamError(
            f"No way to cut {length} tokens has finite times only. Allow other slices: a smaller granularity or "
            "min_slice, or finite times."
        )


def slicing_frontier(
    t: SliceTime, length: int, granularity: int = 1, min_slice: int | None = None, *, slowest: float = inf
) -> list[SlicingTradeoff]:
    """Returns all slicings that no other beats in both the sum of times and the slowest slice, the least sum first.

    The best slicing for any number of stages and microbatches is among them: min(f.latency(K, M) for f in frontier).
    The arguments are those of `slice_tokens`; only slicings whose slices take at most `slowest` seconds are returned.
    """
    table = time_table([t], length, cuts_of(length, granularity, min_slice))
    check_allowed(shortest_path(table, (inf,)), length)
    frontier: list[SlicingTradeoff] = []
    while (path := shortest_path(table, (slowest,))).total < inf:
        if frontier and frontier[-1].total == path.total:
            frontier.pop()  # an equal sum, and a faster slowest slice
        frontier.append(SlicingTradeoff(table.lengths(path.choice), path.total, path.maxima[0]))
        slowest = nextafter(path.maxima[0], -inf)
    return frontier


BatchTime = Callable[[int, Any, Any], Any]  # (num_sequences, slice_length, context_length) -> seconds


@dataclass(frozen=True)
class BatchSlicing:
    """The microbatches, largest first, and the seconds that they are predicted to take."""

    microbatches: tuple[SlicedMicrobatch, ...]
    latency: float


def split_batch(latencies: Sequence[float], batch: int) -> list[int]:
    """Returns b_1 + ... + b_D = B with the least sum of latencies, largest first: TeraPipe's knapsack (section 3.4).

    Args:
        latencies: seconds of microbatches of 1, 2, ... sequences; infinite where one is not allowed.
        batch: B sequences.
    """
    if batch < 1 or not latencies:
        raise SlipstreamError(f"batch={batch} with {len(latencies)} latencies: both are 1 or more.")
    best = [(0.0, 0)]  # the least sum, and the size of the last microbatch below 0: of equal sums the largest
    for sequences in range(1, batch + 1):
        sizes = range(1, min(sequences, len(latencies)) + 1)
        best.append(min((best[sequences - size][0] + latencies[size - 1], -size) for size in sizes))
    if best[batch][0] == inf:
        raise SlipstreamError(f"A batch of {batch} has no division into microbatches with finite latencies.")
    sizes_used = []
    while batch > 0:
        sizes_used.append(-best[batch][1])
        batch += best[batch][1]
    return sorted(sizes_used, reverse=True)


def slice_batch(
    t: BatchTime,
    batch: int,
    length: int,
    num_stages: int,
    granularity: int = 1,
    min_slice: int | None = None,
    *,
    max_sequences: int | None = None,
) -> BatchSlicing:
    """Returns the microbatches and slices with the least latency, exactly, for microbatches that follow each other.

    The pipeline fills once, so the latency is the sum of all slice times plus (K-1) times the slowest of all. For
    every limit on the slowest, a knapsack combines the least sums, and the limits are searched as in `slice_tokens`.

    Args:
        t: the time of a slice on one stage, (num_sequences, slice_length, context_length) -> seconds, called with
            integer arrays of lengths if it takes them.
        batch: B sequences, each of `length` tokens.
        num_stages: K.
        granularity: slices begin at multiples of this many tokens.
        min_slice: tokens every slice has at least.
        max_sequences: sequences per microbatch, at most. Default: `batch`.
    """
    check_counts(num_stages)
    cuts = cuts_of(length, granularity, min_slice)
    tables = [time_table([time], length, cuts) for time in _times(t, batch, max_sequences)]
    lower = min(table.least for table in tables)
    best = minimize(lambda limits: _split_within(tables, batch, limits), lower, num_stages - 1)
    if best.total == inf:
        raise SlipstreamError(
            f"No way to cut a batch of {batch} sequences of {length} tokens has finite times only. Allow smaller "
            "slices or microbatches."
        )
    return BatchSlicing(best.choice, best.total + (num_stages - 1) * best.maxima[0])


def slice_batch_with_flushes(
    t: BatchTime,
    batch: int,
    length: int,
    num_stages: int,
    granularity: int = 1,
    min_slice: int | None = None,
    *,
    max_sequences: int | None = None,
) -> BatchSlicing:
    """Slices like `slice_batch`, but drains before the next microbatch: TeraPipe's sum of T_b, section 3.4.

    Memory for only one microbatch at a time forces this (appendix A). It is an upper bound of `slice_batch`.
    """
    times = _times(t, batch, max_sequences)
    slicings = [slice_tokens(time, length, num_stages, granularity, min_slice) for time in times]
    sizes = split_batch([slicing.latency for slicing in slicings], batch)
    microbatches = tuple(SlicedMicrobatch(b, slicings[b - 1].slices) for b in sizes)
    return BatchSlicing(microbatches, sum(slicings[b - 1].latency for b in sizes))


def _times(t: BatchTime, batch: int, max_sequences: int | None) -> list[SliceTime]:
    """Returns the time function of each size of microbatch, from one sequence up."""
    largest = batch if max_sequences is None else min(max_sequences, batch)
    if batch < 1 or largest < 1:
        raise SlipstreamError(f"batch={batch}, max_sequences={max_sequences}: both are 1 or more.")
    return [partial(t, num_sequences) for num_sequences in range(1, largest + 1)]


def _split_within(tables: list[TimeTable], batch: int, limits: Limits) -> Solution[tuple[SlicedMicrobatch, ...]]:
    """Returns the best division of the batch when no slice may be slower than a limit."""
    paths = [shortest_path(table, limits) for table in tables]
    above = min(path.above for path in paths)
    try:
        sizes = split_batch([path.total for path in paths], batch)
    except SlipstreamError:
        return Solution(inf, (0.0,), above, ())
    used = [paths[b - 1] for b in sizes]
    microbatches = tuple(SlicedMicrobatch(b, tables[b - 1].lengths(paths[b - 1].choice)) for b in sizes)
    return Solution(sum(path.total for path in used), max(path.maxima for path in used), above, microbatches)


Choice = TypeVar("Choice")
Limits = tuple[float, ...]


class Solution(NamedTuple, Generic[Choice]):
    """The best solution under some limits on its maxima."""

    total: float  # the least sum; infinite if nothing satisfies the limits
    maxima: Limits  # maxima of this solution, within the limits
    above: Limits  # the smallest values over the limits: limits below these allow no other solution
    choice: Choice


def minimize(
    solve: Callable[[Limits], Solution[Choice]], lower: Limits, weight: float, tolerance: float = 0.0
) -> Solution[Choice]:
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
        tolerance: the share of its cost by which the solution may cost more than the least.
    """
    best = solve((inf,) * len(lower))
    best_cost = inf
    boxes = BestFirst[tuple[Limits, Limits, Solution[Choice]]]()  # (lower, limits, solution)

    def add(lower: Limits, limits: Limits, solution: Solution[Choice]) -> None:
        nonlocal best, best_cost
        cost = solution.total + weight * sum(solution.maxima)
        if cost < best_cost:
            best, best_cost = solution, cost
        bound = solution.total + weight * sum(lower)
        if bound < best_cost and any(low < high for low, high in zip(lower, solution.maxima, strict=True)):
            boxes.add(bound, (lower, limits, solution))

    add(lower, (inf,) * len(lower), best)
    while found := boxes.next_below(best_cost * (1 - tolerance)):
        bound, (lower, limits, solution) = found
        # Maxima further above `lower` cost more than the best solution.
        slack = (best_cost - bound) / weight
        gaps = [min(slack, high - low) for low, high in zip(lower, solution.maxima, strict=True)]
        axis = max(range(len(gaps)), key=gaps.__getitem__)
        # Halves would take a quarter more solves.
        share = 0.8 if gaps[axis] >= slack else 0.6
        middle = lower[axis] + share * gaps[axis]
        if middle >= solution.maxima[axis]:  # neighbouring numbers
            middle = lower[axis]
        below = tuple(middle if i == axis else limit for i, limit in enumerate(limits))
        cell = solve(below)
        add(lower, below, cell)
        add(tuple(cell.above[i] if i == axis else low for i, low in enumerate(lower)), limits, solution)
    return best


SliceTime = Callable[[Any, Any], Any] | ArrayLike

MAX_CUTS = 8192  # places to cut; more would need a table above 0.5 GiB, which the search reads a hundred times
_BLOCK = 64  # cuts timed per call: few enough for the cache, and enough for few calls


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
        first = self.times[:, :, 0].min(axis=1)
        last = self.times[:, -1].min(axis=1)
        return tuple(np.maximum(first, last).tolist())

    def lengths(self, cuts: Sequence[int]) -> tuple[int, ...]:
        """Returns the tokens of the slices between cuts."""
        return tuple(int(tokens) for tokens in np.diff(self.bounds[list(cuts)]))


def cuts_of(length: int, granularity: int, min_slice: int | None) -> Cuts:
    """Returns the cuts that the arguments of `slice_tokens` describe. Raises SlipstreamError where they are wrong."""
    if length < 1 or granularity < 1:
        raise SlipstreamError(f"length={length}, granularity={granularity}: both are tokens, 1 or more.")
    if min_slice is not None and not 1 <= min_slice <= length:
        raise SlipstreamError(f"min_slice={min_slice}: a slice has 1 to {length} tokens.")
    return Cuts(granularity, shortest_slice=min_slice or 1, most_slices=None)


def between_cuts(length: int, cuts: Cuts, seconds: Callable[[Ints, Ints], Floats]) -> Floats:
    """Returns the seconds of the slice between any two places to cut, (..., ends, starts), infinite where there is no
    slice, or none that is allowed.

    `seconds` are those of slices of some lengths after some contexts, (..., slices).

    Raises:
        SlipstreamError: where there are too many places.
    """
    if (num_places := cuts.num_places(length)) > MAX_CUTS:
        raise SlipstreamError(
            f"{length} tokens at granularity {cuts.granularity} have {num_places} possible cuts; at most {MAX_CUTS} "
            f"are searched. Use granularity={-(-length // MAX_CUTS)} or more."
        )
    bounds = cuts.places(length)
    tables = []
    for first in range(0, len(bounds), _BLOCK):
        lengths = bounds[first : first + _BLOCK, None] - bounds
        ends, starts = np.nonzero((lengths > 0) & cuts.allowed_lengths(lengths, length))
        times = seconds(lengths[ends, starts], bounds[starts])
        rows = np.full((*times.shape[:-1], *lengths.shape), inf)
        rows[..., ends, starts] = times
        tables.append(rows)
    return np.concatenate(tables, axis=-2)


def time_table(times: Sequence[SliceTime], length: int, cuts: Cuts) -> TimeTable:
    """Returns the times of all slices that are allowed.

    Args:
        times: each a function (slice_length, context_length) -> seconds, called with integer arrays if it takes
            them, or an array whose entry [i, j] is for i·granularity tokens after j·granularity (row 0 is not used).
            Infinite: such a slice is not allowed.
    """
    bounds = cuts.places(length)
    callables = [time if callable(time) else _lookup(time, bounds, cuts.granularity) for time in times]
    tables = np.stack([between_cuts(length, cuts, partial(_seconds, time)) for time in callables])
    wrong = np.isnan(tables) | (tables < 0)
    if wrong.any():
        d, end, start = np.argwhere(wrong)[0]
        raise SlipstreamError(
            f"t({bounds[end] - bounds[start]}, {bounds[start]}) is {tables[d, end, start]}: a slice takes 0 seconds or "
            "more (infinite where it is not allowed)."
        )
    return TimeTable(bounds, tables)


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


# NumPy finishes fewer cuts than these before Numba is imported.
NUMBA_PAYS_FROM = 200

CutPath = Solution[tuple[int, ...]]  # the cuts 0, ..., n; none where the limits allow none
# (times, floors, weight, limits) -> least sum and previous cut of each cut, and `above`
PathSearch = Callable[[Floats, Floats, Floats, Floats], tuple[Floats, Ints, Floats]]


def shortest_path(table: TimeTable, limits: Limits, search: PathSearch | None = None) -> CutPath:
    """Returns the cuts with the least sum of times whose slices keep to the limits, one for each time.

    Among equal sums, each cut takes the longest slice before it, so that both searches give the same cuts.
    """
    if search is None and (len(table.bounds) > NUMBA_PAYS_FROM or search_compiled.cache_info().currsize):
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
    within = np.zeros(len(times), np.int64)  # the first start within each limit
    for end in range(1, n + 1):
        # All slices that start before this one exceed a limit.
        first = 0
        for d in range(len(times)):
            limit_start = within[d]  # usually near the previous one; `floors` falls, so a step or two finds it
            while limit_start < end and floors[d, end, limit_start] > limits[d]:
                limit_start += 1
            while limit_start > 0 and floors[d, end, limit_start - 1] <= limits[d]:
                limit_start -= 1
            within[d] = limit_start
            if limit_start > 0:
                above[d] = min(above[d], floors[d, end, limit_start - 1])
            for start in range(limit_start, end):
                if times[d, end, start] > limits[d]:
                    above[d] = min(above[d], times[d, end, start])
            first = max(first, limit_start)
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
    from slipstream.numba_jit import compiled

    return compiled(search_loops)
