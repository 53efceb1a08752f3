"""Chooses the slicings of a sequence that are worth a trial, by simulation with times fitted to a few measured ones."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, pairwise

import numpy as np

from slipstream.pipeline.batch import slice_lengths
from slipstream.pipeline.tuning.trials import SampleKey, Samples
from slipstream.schedule import Op, Schedule
from slipstream.simulator import TableCost, simulate

GRANULARITY = 64  # tokens: matrix products like multiples of it
_MOST_SLICES = (16, 10, 7, 5)  # for each, the best slicing of at most this many is searched for
_GROWTHS = (1.0, 2.0, 3.0, 5.0)  # of the longest slice over the first
_LASTS = (1.0, 0.5)  # of the last slice over the longest
_WANTED = 4

Slices = tuple[int, ...]
Costs = Callable[[Slices], TableCost]
OrderOfSlices = Callable[[Slices], Schedule]


class SliceTimes:
    """Times fitted per stage and op: t(i, j) = a0 + a1 i + a2 (i j + i^2/2) for a slice of i tokens after j others.

    `planner.costs.TimeFit` can't serve here. Its times without context are a table over measured lengths, between which
    it draws lines, and beyond which it refuses; the steps of a run measure a slice without context once per slicing,
    so two lengths, and the slices asked for are shorter and longer than those.
    """

    def __init__(self) -> None:
        self._points: defaultdict[tuple[int, Op], list[tuple[int, int, float]]] = defaultdict(list)
        self._latency = float("inf")

    def add(self, samples: Samples, slices: Sequence[int]) -> None:
        contexts = list(accumulate(slices, initial=0))
        for (stage, index, op), seconds in samples.actions.items():
            self._points[stage, op].append((slices[index], contexts[index], min(seconds)))
        self._latency = min(self._latency, samples.latency)

    def cost(self, slices: Sequence[int]) -> TableCost:
        times: dict[SampleKey, float] = {}
        contexts = list(accumulate(slices, initial=0))[:-1]
        for (stage, op), points in self._points.items():
            length, context, seconds = np.array(points, float).T
            features = _features(length, context) / seconds[:, None]  # relative errors count alike
            solution = np.linalg.lstsq(features, np.ones(len(points)), rcond=None)[0]
            predicted = _features(np.array(slices, float), np.array(contexts, float)) @ solution
            times |= {(stage, i, op): max(float(t), 1e-6) for i, t in enumerate(predicted)}
        return TableCost(times, latency=self._latency)


def _features(length: np.ndarray, context: np.ndarray) -> np.ndarray:
    return np.stack([np.ones_like(length), length, length * context + length**2 / 2], axis=1)


def granularity_for(length: int) -> int:
    return min(GRANULARITY, max(1, length // max(_MOST_SLICES)))


def nearly_equal(length: int, count: int, granularity: int) -> Slices:
    """Returns nearly equal slices that begin at multiples of the granularity."""
    slices = [units * granularity for units in slice_lengths(count, length // granularity)]
    slices[-1] += length % granularity
    return tuple(slices)


def promising(start: OrderOfSlices, best: OrderOfSlices, cost: Costs, length: int, granularity: int) -> list[Slices]:
    """Returns the slicings with the shortest simulated steps, each with a different number of slices, best first.

    For each number the search and the growing slicings are compared in the order `start`. The numbers are compared in
    the order `best`, which is what will run: it may hide a longer fill, and so want fewer slices.
    """
    found: dict[int, tuple[float, Slices]] = {}
    for slices in {*_searched(start, cost, length, granularity), *growing(length, granularity)}:
        seconds = simulate(start(slices), cost(slices)).makespan
        count = len(slices)
        found[count] = min(found.get(count, (seconds, slices)), (seconds, slices))
    shortlist = [slices for _, slices in sorted(found.values())[: 2 * _WANTED]]
    shortlist.sort(key=lambda slices: simulate(best(slices), cost(slices)).makespan)
    return shortlist[:_WANTED]


def _searched(start: OrderOfSlices, cost: Costs, length: int, granularity: int) -> Iterator[Slices]:
    # Its compiled code takes a while to load.
    from slipstream.planner.slicing import slice_for_schedule

    def candidate(slices: Slices) -> tuple[Schedule, TableCost]:
        return start(slices), cost(slices)

    for most in _MOST_SLICES:
        yield tuple(slice_for_schedule(candidate, length, granularity=granularity, max_slices=most).slices)


def growing(length: int, granularity: int) -> Iterator[Slices]:
    """Yields slices that grow from a short first one, which is all that the later stages wait for, to a plateau.

    A short last one is what the first stage waits for when its forwards are done.
    """
    for count in range(2, max(_MOST_SLICES) + 1):
        for growth in _GROWTHS:
            for last in _LASTS:
                ramp = [min(growth, 1 + index * 2 * (growth - 1) / count) for index in range(count)]
                if slices := _rounded([*ramp[:-1], ramp[-1] * last], length, granularity):
                    yield slices


def _rounded(weights: list[float], length: int, granularity: int) -> Slices | None:
    """Returns lengths in these proportions, cut at multiples of the granularity; None where a slice would be empty."""
    total = sum(weights)
    cuts = [round(so_far / total * length / granularity) * granularity for so_far in accumulate(weights, initial=0.0)]
    cuts[-1] = length
    slices = tuple(end - begin for begin, end in pairwise(cuts))
    return slices if min(slices) > 0 else None
