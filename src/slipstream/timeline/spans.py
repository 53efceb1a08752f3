"""A timeline, simulated or measured: when actions ran, the memory in use, and why ranks were idle."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property

from slipstream.schedule import OPERATIONS, RECEIVES, SENDS, Action, Lane, Schedule, predecessors


@dataclass(frozen=True, slots=True)
class Span:
    """One action on one rank, from `start` to `end` in seconds.

    A compute action's span is the computing alone. A SEND's runs from posting to done, a RECV's from posting to the
    message's arrival, and an OFFLOAD's or RELOAD's is the copy; these overlap with the rank's computing.
    """

    rank: int
    action: Action
    start: float
    end: float

    @property
    def seconds(self) -> float:
        return self.end - self.start

    @property
    def computes(self) -> bool:
        """Whether the span keeps its rank busy."""
        return OPERATIONS[self.action.op].lane is Lane.RANK


def _start_order(span: Span) -> tuple[float, int]:
    """Returns the sort key of one rank's spans: by start, then receives, actions that take no time, sends, the rest."""
    if span.action.op in RECEIVES:
        return span.start, 0
    if not span.computes:
        return span.start, 2
    return span.start, 3 if span.seconds else 1


@dataclass(frozen=True, slots=True)
class Message:
    """One message, by the spans of its two ends."""

    send: Span
    receive: Span

    @property
    def start(self) -> float:
        """The time at which both ends were posted."""
        return max(self.send.start, self.receive.start)

    @property
    def seconds(self) -> float:
        return self.receive.end - self.start


@dataclass(frozen=True)
class Timeline:
    """The actions of one step, with the times at which they ran in a run or a simulation.

    Args:
        spans: every action that ran, with its rank, start and end in seconds.
        num_ranks: pipeline ranks.
        memory: per rank, (time, bytes) at each change of its memory; empty if unknown.
        name: for titles, such as the schedule's name.
        measured: True for a run, False for a simulation.
        host_memory: the same as `memory` of each rank's host; empty where nothing is there, or it is unknown.
    """

    spans: tuple[Span, ...]
    num_ranks: int
    memory: tuple[tuple[tuple[float, float], ...], ...] = ()
    name: str = ""
    measured: bool = False
    host_memory: tuple[tuple[tuple[float, float], ...], ...] = ()

    @property
    def title(self) -> str:
        """The name, and whether the timeline was measured or simulated."""
        return f"{self.name or 'timeline'}, {'measured' if self.measured else 'simulated'}"

    @cached_property
    def start(self) -> float:
        """The first start in seconds, on the clock of the spans."""
        return min((span.start for span in self.spans), default=0)

    @cached_property
    def makespan(self) -> float:
        """Seconds from the first start to the last end."""
        return max((span.end for span in self.spans), default=0) - self.start

    def busy(self, rank: int) -> float:
        """Returns the seconds that the rank computes."""
        return sum(span.seconds for span in self.compute_spans if span.rank == rank)

    @cached_property
    def idle_fraction(self) -> float:
        """The share of all ranks' time in which they don't compute: the bubble fraction of the step."""
        if not self.makespan:
            return 0
        computing = sum(span.seconds for span in self.compute_spans) / (self.num_ranks * self.makespan)
        # Sums of rounded seconds may exceed the whole.
        return max(1 - computing, 0)

    @property
    def peak_memory(self) -> tuple[float, ...]:
        """The most bytes held at any time, per rank; empty if memory is unknown."""
        return _peaks(self.memory)

    @property
    def peak_host_memory(self) -> tuple[float, ...]:
        """The most bytes on each rank's host at any time; empty where nothing is there, or it is unknown."""
        return _peaks(self.host_memory)

    @cached_property
    def compute_spans(self) -> tuple[Span, ...]:
        """The spans that keep their rank busy."""
        return tuple(span for span in self.spans if span.computes)

    @cached_property
    def span_of(self) -> dict[Action, Span]:
        """The span of each action."""
        return {span.action: span for span in self.spans}

    @cached_property
    def messages(self) -> tuple[Message, ...]:
        """The messages whose two ends are on the timeline."""
        sends = (span for span in self.spans if span.action.op in SENDS and span.action.other_end in self.span_of)
        return tuple(Message(send, self.span_of[send.action.other_end]) for send in sends)

    @cached_property
    def schedule(self) -> Schedule:
        """The schedule that ran: each rank's actions by start. Stages that did not run count as rank 0's.

        Of several that start at one time, receives come first, then actions that take no time, then sends.
        """
        rows: list[list[Action]] = [[] for _ in range(self.num_ranks)]
        for span in sorted(self.spans, key=_start_order):
            rows[span.rank].append(span.action)
        ranks = {span.action.stage: span.rank for span in self.spans}
        counts = [1] * (1 + max((span.action.microbatch for span in self.spans), default=0))
        for span in self.spans:
            counts[span.action.microbatch] = max(counts[span.action.microbatch], 1 + span.action.slice)
        return Schedule(
            name=" ".join(self.name.split()) or "timeline",
            actions=tuple(map(tuple, rows)),
            placement=tuple(ranks.get(stage, 0) for stage in range(1 + max(ranks, default=0))),
            num_microbatches=len(counts),
            num_slices=max(counts),
            slice_counts=tuple(counts),
        )

    def label(self, action: Action) -> str:
        """Returns the action's text, without its stage if every rank holds one."""
        placement = self.schedule.placement
        text = self.schedule.text(action)
        return text.lstrip("0123456789") if len(set(placement)) == len(placement) else text

    def to_text(self, width: int | None = None) -> str:
        """Returns the timeline as text, one line per rank. Times in equal steps get one column per step:

            rank 0  F0.0 F0.1           B0.1 B0.0
            rank 1       F0.0 F0.1 B0.1 B0.0

        Others are scaled to `width` characters (100 if not given). Blank is idle; `-` continues an action.
        """
        column = 1 + max((len(self.label(span.action)) for span in self.compute_spans), default=0)
        unit = self._unit() if width is None else 0
        scale = column / unit if unit else (width or 100) / (self.makespan or 1)
        lines = [f"rank {rank}".ljust(6 + len(str(self.num_ranks - 1))) for rank in range(self.num_ranks)]
        margin = len(lines[0]) + 1
        for span in sorted(self.compute_spans, key=lambda span: span.start):
            first, last = (round((time - self.start) * scale) for time in (span.start, span.end))
            label = self.label(span.action)
            room = last - first
            cell = label.ljust(room - 1, "-") + " " if room > len(label) else span.action.op[0] * room
            lines[span.rank] = lines[span.rank].ljust(margin + first) + cell
        return "\n".join(line.rstrip() for line in lines)

    def _unit(self) -> float:
        """Returns the shortest span if all starts and ends are multiples of it, else 0."""
        unit = min((span.seconds for span in self.compute_spans if span.seconds), default=0)
        steps = [(t - self.start) / unit for span in self.compute_spans for t in (span.start, span.end) if unit]
        return unit if all(abs(step - round(step)) < 1e-6 for step in steps) else 0


def _peaks(memory: Sequence[Sequence[tuple[float, float]]]) -> tuple[float, ...]:
    return tuple(max((size for _, size in steps), default=0) for steps in memory)


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
    """Yields the memory steps inside the window, after the bytes in use when it began."""
    times = [time for time, _ in steps]
    first, last = bisect_right(times, since), bisect_left(times, until)
    if first:
        yield since, steps[first - 1][1]
    yield from steps[first:last]


class Cause(StrEnum):
    """The reasons why a rank does not compute."""

    # The rank's first action waits for other ranks: the pipeline fills.
    FILL = "fill"
    # Another rank has not finished the awaited action, or not yet sent it.
    COMPUTE = "compute"
    # The awaited result is on its way.
    MESSAGE = "message"
    # Activations travel to or from host memory.
    COPY = "copy"
    # Nothing is awaited: the executor works between actions.
    OVERHEAD = "overhead"
    # Nothing is left to do.
    DRAIN = "drain"


@dataclass(frozen=True, slots=True)
class Wait:
    """An interval in which a rank is idle.

    Args:
        rank: the idle rank.
        start: in seconds, on the clock of the timeline.
        end: in seconds.
        cause: the reason why the rank doesn't compute.
        action: its next action; None if it has none left.
        before: the awaited action of rank `source`, or the awaited copy; None if nothing is awaited.
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

    A gap between compute actions is cut where its cause changes: first another rank computes the awaited action, then
    its message travels, then the executor takes it. A rank's busy seconds and its waits add up to the makespan. The
    clocks of several processes may disagree, so a wait ends at the latest when the action that waited starts.
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
        self._timeline = timeline
        self._rank = rank
        spans = [span for span in timeline.spans if span.rank == rank]
        self._computing = sorted((s for s in spans if s.computes), key=lambda span: (span.start, span.end))
        self._copies = [s for s in spans if OPERATIONS[s.action.op].lane is Lane.COPIES]

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
            cause = wait.cause
            end = min(wait.end, span.start)
            if is_first and wait.source is not None:
                if cause is Cause.COMPUTE:
                    # The message's obstacle includes this one: the fill is a single wait.
                    continue
                cause = Cause.FILL
            if end > start:
                yield replace(wait, start=start, end=end, cause=cause)
                start = end
        if span.start > start:
            yield Wait(self._rank, start, span.start, Cause.OVERHEAD, span.action)

    def _obstacles(self, span: Span, start: float) -> Iterator[Wait]:
        """Yields the obstacles to the action's start at `start`, each as a wait until it is gone."""
        for before in predecessors(span.action, self._timeline.schedule):
            yield from self._arrival(before, span, start)
        ended = (copy for copy in self._copies if copy.end <= span.start)
        for copy in sorted(ended, key=lambda copy: copy.end):
            yield Wait(self._rank, start, copy.end, Cause.COPY, span.action, copy.action)

    def _arrival(self, before: Action, span: Span, start: float) -> Iterator[Wait]:
        """Yields the obstacles of one result: another rank computes it, then it travels. This rank's own is there."""
        timeline = self._timeline
        spans = self._timeline.span_of
        if before.op in RECEIVES:
            (producer,) = predecessors(before.other_end, timeline.schedule)
            arrival = spans[before].end if before in spans else span.start
            sent = spans.get(before.other_end)
        else:
            producer = before
            arrival = span.start
            sent = None
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
