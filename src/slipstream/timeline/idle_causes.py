"""Why a rank does not compute: every idle interval of a timeline with its cause and what was awaited."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum

from slipstream.schedule import COMMUNICATION, RECEIVES, Action, predecessors
from slipstream.timeline.spans import Span, Timeline
from slipstream.timeline.window import TimelineWindow


class Cause(StrEnum):
    """What keeps a rank from computing."""

    FILL = "fill"  # its first action awaits what other ranks hand down: the pipeline fills
    COMPUTE = "compute"  # another rank has not finished the awaited action, or not yet sent it
    MESSAGE = "message"  # the awaited result is on its way
    COPY = "copy"  # activations travel to or from host memory
    OVERHEAD = "overhead"  # nothing is awaited: what the executor does between actions
    DRAIN = "drain"  # nothing is left to do


@dataclass(frozen=True, slots=True)
class Wait:
    """A rank idle from `start` to `end` in seconds.

    `action` is what it runs next (None: nothing more), `before` what that awaits: the action computed on rank
    `source`, or the copy. Both are None where nothing is awaited.
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


@dataclass(frozen=True, slots=True)
class _Hindrance:
    """What keeps an action from starting before `until`."""

    until: float
    cause: Cause
    before: Action | None
    source: int | None


def find_waits(timeline: Timeline) -> tuple[Wait, ...]:
    """Rank by rank and in order of time, what lies between the compute actions.

    A gap is cut where its cause changes: first another rank computes what is awaited, then its message travels,
    then the executor gets to it. A rank's busy seconds and its waits add up to the makespan. Clocks of several
    processes may disagree: nothing ends after the action that awaited it has started.
    """
    if isinstance(timeline, TimelineWindow):
        return _clip(find_waits(timeline.whole), timeline)
    lane = {rank: _Lane(timeline, rank) for rank in range(timeline.num_ranks)}
    return tuple(wait for rank in lane for wait in lane[rank].waits())


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
    """One rank of a timeline."""

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
        """The waits from `start` until the span's action begins."""
        for hindrance in self._hindrances(span, start):
            cause, end = hindrance.cause, min(hindrance.until, span.start)
            if is_first and hindrance.source is not None:
                if cause is Cause.COMPUTE:
                    continue  # the message's hindrance covers it: the fill is one wait
                cause = Cause.FILL
            if end > start:
                yield Wait(self._rank, start, end, cause, span.action, hindrance.before, hindrance.source)
                start = end
        if span.start > start:
            yield Wait(self._rank, start, span.start, Cause.OVERHEAD, span.action)

    def _hindrances(self, span: Span, start: float) -> Iterator[_Hindrance]:
        for before in predecessors(span.action, self._timeline.schedule):
            yield from self._arrival(before, span, start)
        ended = (copy for copy in self._copies if copy.end <= span.start)
        for copy in sorted(ended, key=lambda copy: copy.end):
            yield _Hindrance(copy.end, Cause.COPY, copy.action, None)

    def _arrival(self, before: Action, span: Span, start: float) -> Iterator[_Hindrance]:
        """A result of another rank is computed, then travels; one of this rank is there already."""
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
        yield _Hindrance(min(done, arrival), Cause.COMPUTE, producer, source)
        yield _Hindrance(arrival, Cause.MESSAGE, producer, source)
