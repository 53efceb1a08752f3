"""Batch and tokens sliced together: the sequences of each microbatch, and its slices (TeraPipe section 3.4)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import Any

from slipstream.errors import SlipstreamError
from slipstream.planner.slicing.branch_and_bound import Limits, Solution, minimize
from slipstream.planner.slicing.equal_stage_slicing import check_counts, slice_tokens
from slipstream.planner.slicing.shortest_path import shortest_path
from slipstream.planner.slicing.time_table import SliceTime, TimeTable, time_table
from slipstream.schedule import SlicedMicrobatch

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
