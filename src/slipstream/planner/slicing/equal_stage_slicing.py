"""Slices for equal stages: in closed form, and the exact optimum of TeraPipe's Eq. 5 for sequences and for batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from math import inf, nextafter, sqrt
from typing import Any

from slipstream.errors import SlipstreamError
from slipstream.planner.slicing.time_table import (
    CutPath,
    Limits,
    SliceTime,
    Solution,
    TimeTable,
    minimize,
    shortest_path,
    time_table,
)
from slipstream.schedule import SlicedMicrobatch


def equal_time_cuts(num_slices: int, attention_share: float) -> list[float]:
    """Returns where slices 1, 2, ... begin, as fractions of the sequence, so that all take equal time.

    If attention takes a share A of the whole sequence's time, the first fraction x of it takes (1-A)x + Ax²; the i-th
    of s cuts solves this for i/s. With A = 0 the slices have equal lengths.
    """
    if not 0 <= attention_share <= 1:
        raise SlipstreamError(f"attention_share={attention_share}: give a fraction of the time, 0 to 1.")
    linear, square = 1 - attention_share, attention_share
    shares = [i / num_slices for i in range(1, num_slices)]
    # with the root in the denominator nothing cancels, and A = 0 isn't a special case
    return [2 * share / (linear + sqrt(linear**2 + 4 * square * share)) for share in shares]


def equal_time_slices(length: int, num_slices: int, attention_share: float, granularity: int = 1) -> tuple[int, ...]:
    """Returns slice lengths in tokens that take equal time, cut at multiples of `granularity`, none of them empty.

    Raises:
        SlipstreamError: if there are fewer multiples than slices.
    """
    units = -(-length // granularity)
    if not 1 <= num_slices <= units:
        raise SlipstreamError(
            f"num_slices={num_slices} for {length} tokens at granularity {granularity}: use 1 to {units} slices."
        )
    cuts = [0]
    for i, fraction in enumerate(equal_time_cuts(num_slices, attention_share), start=1):
        nearest = round(fraction * length / granularity)
        cuts.append(min(max(nearest, cuts[-1] + 1), units - num_slices + i))
    bounds = [cut * granularity for cut in cuts] + [length]
    return tuple(b - a for a, b in pairwise(bounds))


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
    table = time_table([t] if backward is None else [t, backward], length, granularity, min_slice)
    weight = (num_stages - 1) / num_microbatches
    path = minimize(lambda limits: shortest_path(table, limits), table.least, weight)
    check_allowed(path, length)
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
    table = time_table([t], length, granularity, min_slice)
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
    tables = [time_table([time], length, granularity, min_slice) for time in _times(t, batch, max_sequences)]
    lower = min(table.least for table in tables)
    found = minimize(lambda limits: _split_within(tables, batch, limits), lower, num_stages - 1)
    if found.total == inf:
        raise SlipstreamError(
            f"No way to cut a batch of {batch} sequences of {length} tokens has finite times only. Allow smaller "
            "slices or microbatches."
        )
    return BatchSlicing(found.choice, found.total + (num_stages - 1) * found.maxima[0])


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
