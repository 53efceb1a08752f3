"""The time of a slice by its length and context, fitted to the few slicings that the first steps of a run measure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from slipstream.pipeline.tuning.trials import SampleKey, Samples
from slipstream.schedule import Op
from slipstream.simulator import TableCost


class SliceTimes:
    """Times fitted per stage and op: t(i, j) = a0 + a1 i + a2 (i j + i^2/2) for a slice of i tokens after j others.

    `planner.fit.TimeFit` can't serve here. Its times without context are a table over measured lengths, between which
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
