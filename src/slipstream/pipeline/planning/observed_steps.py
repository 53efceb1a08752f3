"""The steps whose actions are timed where costs can't be measured before, and the rates that they show."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import accumulate
from math import inf

import numpy as np

from slipstream.array_types import Floats
from slipstream.cost import OPS
from slipstream.cost.fit import fit_relative
from slipstream.pipeline.planning.step_settings import StepSettings
from slipstream.planner.ragged import StageRates
from slipstream.schedule import Op, Schedule, join_backwards, split_backwards
from slipstream.timeline import Timeline

_OBSERVED = (8, 4)  # numbers of slices per row in the observed steps
_LEAST = 1e-9  # seconds of any action


class ObservedSteps:
    """The steps whose actions are timed where costs can't be measured before.

    They run in two numbers of slices, where slices are open, and with backwards whole and split, where they may be.
    """

    def __init__(self, settings: StepSettings, length: int, is_limited: bool) -> None:
        """`length` are the tokens of a row, and `is_limited` is whether ranks have a memory limit, so that only orders
        that hold least are run."""
        slicings = dict.fromkeys(settings.fixed_slices(length, count) for count in _OBSERVED)
        orders = [(settings.frugal if is_limited else settings.start)(len(slices)) for slices in slicings]
        whole = [join_backwards(order) if settings.reorders or settings.splits else order for order in orders]
        pairs = [*zip(whole, slicings, strict=True)]
        if settings.splits:
            split = [(split_backwards(order, everywhere=True), slices) for order, slices in pairs]
            pairs = [pair for variants in zip(split, pairs, strict=True) for pair in variants]
        self._left = [pairs[0], *pairs]  # the first step warms up
        self._points: defaultdict[tuple[int, Op], list[tuple[int, int, float]]] = defaultdict(list)
        self._latencies: list[float] = []
        self._num_stages = settings.usual.schedule.num_stages
        self._is_warm = False

    @property
    def next(self) -> tuple[Schedule, tuple[int, ...]] | None:
        """The schedule and slices of the next step; None once all have been observed."""
        return self._left[0] if self._left else None

    def add(self, timeline: Timeline) -> None:
        """Notes the seconds of the actions of the step that was next."""
        _, slices = self._left.pop(0)
        if not self._is_warm:
            self._is_warm = True
            return
        contexts = [*accumulate(slices, initial=0)]
        shortest: defaultdict[tuple[int, int, Op], float] = defaultdict(lambda: inf)
        for span in timeline.compute_spans:
            key = span.action.stage, span.action.slice, span.action.op
            shortest[key] = min(shortest[key], span.seconds)
        for (stage, index, op), seconds in shortest.items():
            self._points[stage, op].append((slices[index], contexts[index], seconds))
        self._latencies += [message.seconds for message in timeline.messages]

    def rates(self) -> StageRates:
        """Returns the rates with the least squared relative error to all observed times.

        Where no backward is split, I and W are what a backward would be made of, if it could; where recomputation runs
        as an action of its own, it is part of the backward.
        """
        stages = range(self._num_stages)
        seconds = {op: np.array([fit_slice_times(self._points[stage, op]) for stage in stages]) for op in (*OPS, Op.R)}
        again = seconds.pop(Op.R)
        seconds |= {op: seconds[op] + again for op in (Op.B, Op.I)}
        return StageRates(seconds, np.zeros((self._num_stages, 2)), latency=max(0.0, min(self._latencies, default=0.0)))


def fit_slice_times(points: Sequence[tuple[int, int, float]]) -> Floats:
    """Returns a0, a1 and a2 of t(i, j) = a0 + a1 i + a2 (i j + i (i + 1) / 2), none below 0."""
    if not points:
        return np.zeros(3)
    length, context, seconds = np.array(points, float).T
    features = np.stack([np.ones_like(length), length, length * context + length * (length + 1) / 2], axis=1)
    return fit_relative(features, seconds, _LEAST)
