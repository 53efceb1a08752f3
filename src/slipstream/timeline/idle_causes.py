"""The idle intervals of a timeline's ranks, each with its cause and what was awaited."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum

from slipstream.schedule import COMMUNICATION, RECEIVES, Action, predecessors
from slipstream.timeline.spans import Span, Timeline, TimelineWindow


class Cause(StrEnum):
    """The reasons why a rank does not compute."""

    FILL = "fill"  # its first action waits for other ranks: the pipeline fills
    COMPUTE = "compute"  # another rank has not finished the awaited action, or not yet sent it
    MESSAGE = "message"  # the awaited result is on its way
    COPY = "copy"  # activations travel to or from host memory
    OVERHEAD = "overhead"  # nothing is awaited: the executor works between actions
    DRAIN = "drain"  # nothing is left to do


@dataclass(frozen=True, slots=True)
class Wait:
    """An interval in which a rank is idle.

    Args:
        rank: the idle rank.
        start: in seconds, on the clock of the timeline.
        end: in seconds.
        cause: what keeps the rank from computing.
        action: what it runs next; None if it has nothing left to run.
        before: what that action waits for: the action of rank `source`, or the copy; None if nothing is awaited.
        source: the rank that computes `before`; None if no other rank does.
    """

    rank: int
    start: float
    end: float
    cause: Cause
    action: Action | None = None
    before: Action | None = None
    source: int | None = None

    @property
    def seconds(self) -> float:
        return self.end - self.start


def find_waits(timeline: Timeline) -> tuple[Wait, ...]:
    """Returns the idle intervals, rank by rank and in order of time.

    A gap between compute actions is cut where its cause changes: first another rank computes what is awaited, then its
    message travels, then the executor takes it. A rank's busy seconds and its waits add up to the makespan. The clocks
    of several processes may disagree, so a wait ends at the latest when the action that waited starts.
    """
    if isinstance(timeline, TimelineWindow):
        return _clip(find_waits(timeline.whole), timeline)
    return tuple(wait for rank in range(timeline.num_ranks) for wait in _Lane(timeline, rank).waits())


def _clip(waits: tuple[Wait, ...], window: TimelineWindow) -> tuple[Wait, ...]:
    clipped = (
        replace(wait, start=max(wait.start, window.since), end=min(wait.end, window.until))
        for wait in waits
        if wait.rank < window.num_ranks
    )
    return tuple(wait for wait in clipped if wait.end > wait.start)


def idle_by_cause(timeline: Timeline) -> tuple[dict[Cause, float], ...]:
    """Returns, per rank, the seconds that it waits for each cause.

    Causes that do not occur on a rank are left out. With the rank's busy seconds they add up to the makespan.
    """
    totals: list[Counter[Cause]] = [Counter() for _ in range(timeline.num_ranks)]
    for wait in find_waits(timeline):
        totals[wait.rank][wait.cause] += wait.seconds  # type: ignore[assignment]  # Counter is typed for int
    return tuple({cause: total[cause] for cause in Cause if total[cause]} for total in totals)


class _Lane:
    """One rank of a timeline, and its idle intervals."""

    def __init__(self, timeline: Timeline, rank: int) -> None:
        self._timeline, self._rank = timeline, rank
        own = [span for span in timeline.spans if span.rank == rank]
        self._computing = sorted((s for s in own if s.computes), key=lambda span: (span.start, span.end))
        self._copies = [s for s in own if not s.computes and s.action.op not in COMMUNICATION]

    def waits(self) -> Iterator[Wait]:
        start = free = self._timeline.start
        for index, span in enumerate(self._computing):
            if span.start > free:
                yield from self._gap(span, free, is_first=index == 0)
            free = max(free, span.end)
        end = start + self._timeline.makespan
        if end > free:
            yield Wait(self._rank, free, end, Cause.DRAIN)

    def _gap(self, span: Span, start: float, is_first: bool) -> Iterator[Wait]:
        """Yields the waits from `start` until the span's action begins."""
        for wait in self._obstacles(span, start):
            cause, end = wait.cause, min(wait.end, span.start)
            if is_first and wait.source is not None:
                if cause is Cause.COMPUTE:
                    continue  # the message's obstacle includes it: the fill is one wait
                cause = Cause.FILL
            if end > start:
                yield replace(wait, start=start, end=end, cause=cause)
                start = end
        if span.start > start:
            yield Wait(self._rank, start, span.start, Cause.OVERHEAD, span.action)

    def _obstacles(self, span: Span, start: float) -> Iterator[Wait]:
        """Yields all that keeps the span's action from starting at `start`, each as a wait until it is gone."""
        for before in predecessors(span.action, self._timeline.schedule):
            yield from self._arrival(before, span, start)
        ended = (copy for copy in self._copies if copy.end <= span.start)
        for copy in sorted(ended, key=lambda copy: copy.end):
            yield Wait(self._rank, start, copy.end, Cause.COPY, span.action, copy.action)

    def _arrival(self, before: Action, span: Span, start: float) -> Iterator[Wait]:
        """Yields the obstacles of one result: another rank computes it, then it travels. This rank's own is there."""
        timeline, spans = self._timeline, self._timeline.span_of
        if before.op in RECEIVES:
            (producer,) = predecessors(before.other_end, timeline.schedule)
            arrival = spans[before].end if before in spans else span.start
            sent = spans.get(before.other_end)
        else:
            producer, arrival, sent = before, span.start, None
        source = timeline.schedule.placement[producer.stage]
        if source == self._rank:
            return
        done = spans[producer].end if producer in spans else start
        if sent is not None:
            done = max(done, sent.start)
        elif any(copy.end == span.start for copy in self._copies):
            arrival = min(done, arrival)  # the copy came last, not the message
        for end, cause in ((min(done, arrival), Cause.COMPUTE), (arrival, Cause.MESSAGE)):
            yield Wait(self._rank, start, end, cause, span.action, producer, source)
