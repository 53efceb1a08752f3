"""Slices for equal stages: the exact optimum of TeraPipe's Eq. 5, for any number of stages and microbatches."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf, nextafter

from slipstream.errors import SlipstreamError
from slipstream.planner.slicing.branch_and_bound import minimize
from slipstream.planner.slicing.shortest_path import CutPath, shortest_path
from slipstream.planner.slicing.time_table import SliceTime, time_table


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
