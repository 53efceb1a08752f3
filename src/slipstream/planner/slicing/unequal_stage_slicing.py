"""Slices for stages that differ, as with a heavy head: the best by the recurrence, with a proven bound."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf, nextafter

import numpy as np

from slipstream.array_types import Flags, Floats, Ints
from slipstream.planner.slicing.equal_stage_slicing import (
    SliceTime,
    Slicing,
    TimeTable,
    check_allowed,
    minimize,
    shortest_path,
    time_table,
)

_Labels = tuple[Floats, Floats, Ints]  # when each stage is done, the bound, and (the cut before, the label there)
_WORK = 15_000_000  # stage times added up in one search: a second or two


@dataclass(frozen=True)
class SlicingWithBound(Slicing):
    """A slicing, and a lower bound of every slicing's latency in seconds."""

    lower_bound: float

    @property
    def optimal(self) -> bool:
        """True where it is proven that no slicing is faster."""
        return self.latency <= self.lower_bound


def slice_for_stages(
    times: Sequence[SliceTime], length: int, granularity: int = 1, min_slice: int | None = None
) -> SlicingWithBound:
    """Returns the slices with the least latency on stages whose times differ.

    Slice i leaves stage k at C(k,i) = max(C(k-1,i), C(k,i-1)) + t_k(i); the latency is the last of these, which is
    TeraPipe's Eq. 5 where stages are equal. All ways to cut are followed from the left. Of two that reach the same cut,
    the one that leaves every stage earlier wins; one whose remaining work on any stage exceeds the best known latency
    is dropped. If too many are left, only the most promising are followed at every cut, and `lower_bound` says how far
    from the optimum the result may be. With up to 64 possible cuts on four stages that is rare.

    Args:
        times: one for each stage, like `t` of `slice_tokens`.
        length: tokens of the sequence.
        granularity: slices begin at multiples of this many tokens.
        min_slice: tokens every slice has at least.
    """
    table = time_table(times, length, granularity, min_slice)
    num_cuts = len(table.bounds) - 1
    start = _good_cuts(table, length)
    search = _LabelSearch(table, _latency(table, start), width=max(16, _WORK // (num_cuts**2 * len(times))))
    latency, cuts = min((_latency(table, start), start), search.run())
    return SlicingWithBound(table.lengths(cuts), latency, min(latency, max(search.dropped, _bound_of_fastest(table))))


def _latency(table: TimeTable, cuts: Sequence[int]) -> float:
    done = np.zeros(len(table.times))
    for start, end in pairwise(cuts):
        done = _after_slice(done, table.times[:, end, start])
    return float(done[-1])


def _bound_of_fastest(table: TimeTable) -> float:
    """Returns the latency by Eq. 5 with every slice as fast as on the stage where it is fastest."""
    fastest = TimeTable(table.bounds, table.times.min(axis=0)[None])
    others = len(table.times) - 1
    path = minimize(lambda limits: shortest_path(fastest, limits), fastest.least, others)
    return path.total + others * path.maxima[0]


def _after_slice(done: Floats, seconds: Floats) -> Floats:
    """Returns when each stage (last axis) is done with one more slice, by the recurrence."""
    out: Floats = np.empty(np.broadcast_shapes(done.shape, seconds.shape))
    arrival: Floats = np.zeros(())
    for stage in range(done.shape[-1]):
        arrival = np.maximum(arrival, done[..., stage]) + seconds[..., stage]
        out[..., stage] = arrival
    return out


def _good_cuts(table: TimeTable, length: int) -> tuple[int, ...]:
    """Returns the best cuts of those that are optimal for some number of equal stages, each as slow as the slowest."""
    slowest = TimeTable(table.bounds, table.times.max(axis=0)[None])
    limit = inf
    best: tuple[float, tuple[int, ...]] = (inf, ())
    while (path := shortest_path(slowest, (limit,))).total < inf:
        best = min(best, (_latency(table, path.choice), path.choice))
        limit = min(path.maxima[0] * 0.95, nextafter(path.maxima[0], -inf))
    check_allowed(shortest_path(slowest, (inf,)), length)
    return best[1]


class _LabelSearch:
    """A search with labels at every cut: when each stage is done with everything to the left of it."""

    def __init__(self, table: TimeTable, best: float, width: int) -> None:
        self.times, self.width, self.best = np.moveaxis(table.times, 0, -1), width, best  # [end, start, stage]
        self.dropped = inf  # the least bound of the labels that were dropped because there were too many
        self.n = len(table.bounds) - 1
        self.rest = self._remaining()

    def _remaining(self) -> Floats:
        """Returns the least time of what is right of a cut on stage k, plus the last slice's on later ones: (n, K)."""
        rest = np.zeros((self.n + 1, self.times.shape[-1]))
        tail = np.cumsum(self.times[self.n, :, ::-1], axis=-1)[:, ::-1]  # [start, k]: the last slice on stages k...
        for start in range(self.n - 1, -1, -1):
            inner = self.times[start + 1 : self.n, start] + rest[start + 1 : self.n]
            rest[start] = np.minimum(tail[start], inner.min(axis=0, initial=inf))
        return rest

    def run(self) -> tuple[float, tuple[int, ...]]:
        stages = self.times.shape[-1]
        none: _Labels = np.zeros((0, stages)), np.zeros(0), np.zeros((0, 2), np.int64)
        waiting = [[none] for _ in range(self.n + 1)]
        waiting[0] = [(np.zeros((1, stages)), np.zeros(1), np.full((1, 2), -1))]
        parents: list[Ints] = []  # per cut and label: the cut before, and the label there
        for cut in range(self.n):
            labels, parent = self._select(waiting[cut])
            waiting[cut] = []
            parents.append(parent)
            ends = np.arange(cut + 1, self.n + 1)
            reached = _after_slice(labels[None], self.times[ends, cut][:, None])  # (ends, labels, stages)
            bounds = (reached + self.rest[ends][:, None]).max(axis=-1)
            for end, after, bound in zip(ends, reached, bounds, strict=True):
                keep = np.flatnonzero(bound < self.best)
                if len(keep):
                    origin = np.stack([np.full(len(keep), cut), keep], axis=1)
                    waiting[end].append((after[keep], bound[keep], origin))
            self.best = min(self.best, *(float(after[:, -1].min(initial=inf)) for after, _, _ in waiting[self.n]))
        return self._best_cuts(waiting[self.n], parents)

    def _best_cuts(self, arrived: list[_Labels], parents: list[Ints]) -> tuple[float, tuple[int, ...]]:
        labels, _, origins = (np.concatenate(parts) for parts in zip(*arrived, strict=True))
        if not len(labels):
            return inf, ()
        index = int(labels[:, -1].argmin())
        cut, label = origins[index]
        cuts = [self.n]
        while cut >= 0:
            cuts.append(int(cut))
            cut, label = parents[cut][label]
        return float(labels[index, -1]), tuple(reversed(cuts))

    def _select(self, waiting: list[_Labels]) -> tuple[Floats, Ints]:
        """Returns the labels at a cut that may lead to the best slicing: at most `width`, the lowest bounds first."""
        labels, bounds, origins = (np.concatenate(parts) for parts in zip(*waiting, strict=True))
        order = np.lexsort((labels.sum(axis=-1), bounds))
        order = order[bounds[order] < self.best]
        kept = np.zeros(0, np.int64)
        for first in range(0, len(order), 256):
            group = order[first : first + 256]
            group = group[~_dominated(labels[group], labels[kept])]
            earlier = _dominated_within(labels[group])
            kept = np.concatenate([kept, group[~earlier]])
            if len(kept) > self.width:
                rest = np.concatenate([kept[self.width :], order[first + 256 :]])
                self.dropped = min(self.dropped, float(bounds[rest].min()))
                kept = kept[: self.width]
                break
        return labels[kept], origins[kept]


def _dominated(labels: Floats, others: Floats) -> Flags:
    """Marks the labels that leave no stage earlier than some other label does."""
    no_later: Flags = np.all(others[None] <= labels[:, None], axis=-1)
    return np.array(no_later.any(axis=1), bool)


def _dominated_within(labels: Floats) -> Flags:
    """Marks the dominated labels within one set; of equal labels the first stays."""
    below: Flags = np.all(labels[None] <= labels[:, None], axis=-1)
    below &= ~(below.T & np.triu(np.ones_like(below)))
    return np.array(below.any(axis=1), bool)
