"""A part of a timeline: its first ranks, from one moment to another."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from slipstream.schedule import Schedule
from slipstream.timeline.spans import Timeline


@dataclass(frozen=True, kw_only=True)
class TimelineWindow(Timeline):
    """The first ranks of the timeline `whole`, from `since` to `until` in seconds.

    Which action waits for which follows from the whole timeline.
    """

    whole: Timeline
    since: float
    until: float

    @classmethod
    def cut(cls, whole: Timeline, num_ranks: int, since: float, until: float, title: str) -> TimelineWindow:
        """Cuts the first `num_ranks` ranks from `since` to `until` out of a timeline."""
        spans = tuple(
            replace(span, start=max(span.start, since), end=min(span.end, until))
            for span in whole.spans
            if span.rank < num_ranks and span.end > since and span.start < until
        )
        memory = tuple(tuple(_steps_between(steps, since, until)) for steps in whole.memory[:num_ranks])
        return cls(spans, num_ranks, memory, title, whole=whole, since=since, until=until)

    @cached_property
    def start(self) -> float:
        return self.since

    @cached_property
    def makespan(self) -> float:
        return self.until - self.since

    @cached_property
    def schedule(self) -> Schedule:
        return self.whole.schedule

    @property
    def title(self) -> str:
        return self.name


def _steps_between(steps: tuple[tuple[float, float], ...], since: float, until: float) -> Iterator[tuple[float, float]]:
    """Yields the memory steps inside the window, after what was held when it began."""
    times = [time for time, _ in steps]
    first, last = bisect_right(times, since), bisect_left(times, until)
    if first:
        yield since, steps[first - 1][1]
    yield from steps[first:last]
