"""Decides when a checkpoint is due: every so many steps, or as often as what a save costs and failures suggest."""

from __future__ import annotations

import math
import statistics
from collections import deque
from typing import Literal

from slipstream.parallel import RankGroup

_FIRST = 10  # the step of the first one, before anything is measured
_REMEMBERED = 32  # steps and saves, of whose seconds the median is taken
_SECONDS_OF_A_DAY = 86400.0


def best_interval(save_seconds: float, seconds_between_failures: float) -> float:
    """Returns the seconds of training between two saves that lose the least time.

    Daly 2006, "A higher order estimate of the optimum checkpoint interval for restart dumps", equation 37, whose first
    term is Young's sqrt(2 * save_seconds * seconds_between_failures).
    """
    if save_seconds >= 2 * seconds_between_failures:
        return seconds_between_failures
    ratio = save_seconds / (2 * seconds_between_failures)
    first = math.sqrt(2 * save_seconds * seconds_between_failures)
    return first * (1 + math.sqrt(ratio) / 3 + ratio / 9) - save_seconds


class SaveInterval:
    """Says after which steps a checkpoint is due. Every rank makes one and calls its methods alike.

    Args:
        every: steps, 0 for never, or "auto": from the seconds that training stands still for a save, but never so often
            that a save would wait for the one before.
        failures_per_day: that are expected of the whole run.
        world: all ranks, which follow the first.
    """

    def __init__(self, every: int | Literal["auto"], failures_per_day: float, world: RankGroup) -> None:
        self._every, self._world = every, world
        self._between_failures = _SECONDS_OF_A_DAY / failures_per_day
        self._steps, self._costs, self._writes = (deque[float](maxlen=_REMEMBERED) for _ in range(3))
        self._next = 0

    def note_step(self, seconds: float) -> None:
        """Notes how long a step took."""
        self._steps.append(seconds)

    def note_written(self, seconds: float) -> None:
        """Notes how long it took until a checkpoint was complete, while training went on."""
        self._writes.append(seconds)

    def note_save(self, step: int, cost: float) -> None:
        """Notes for how many seconds training stood still for the last save, and decides about the next. Collective
        where the interval is found here."""
        self._costs.append(cost)
        if self._every == "auto":
            self._next = step + int(self._world.gather(self._best_steps())[0])

    def is_due(self, step: int) -> bool:
        """Returns whether a checkpoint is due after a step."""
        if self._every == "auto":
            return step >= (self._next or _FIRST)
        return self._every > 0 and step % self._every == 0

    def _best_steps(self) -> int:
        seconds = best_interval(statistics.median(self._costs), self._between_failures)
        seconds = max(seconds, statistics.median(self._writes) if self._writes else 0.0)
        return max(1, round(seconds / statistics.median(self._steps))) if self._steps else _FIRST
