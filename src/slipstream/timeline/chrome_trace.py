"""Saves timelines as a Chrome trace, for ui.perfetto.dev and chrome://tracing, and loads them from it exactly."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from slipstream.errors import SlipstreamError
from slipstream.foreign_text import parse_json, read_text
from slipstream.schedule import Action, Op, predecessors
from slipstream.timeline.spans import Span, Timeline, Wait, find_waits

_FORMAT = "slipstream timeline 1"
_Event = dict[str, Any]


def save_trace(path: str | Path, *timelines: Timeline) -> None:
    """Writes the timelines as a Chrome trace for ui.perfetto.dev or chrome://tracing.

    `load_trace` reads the file back exactly. Several timelines become several groups of processes.
    """
    Path(path).write_text(json.dumps(chrome_trace(*timelines)), encoding="utf-8")


def chrome_trace(*timelines: Timeline) -> dict[str, Any]:
    """Returns the trace: a process per rank, threads for computing, messages and waits, memory as a counter.

    Arrows lead from a SEND to its RECV, or from action to action where the timeline has no messages. `ts` and
    `dur` are microseconds from the timeline's first start; an action's args hold its start and end in seconds
    and its index among the spans. Several timelines are several groups of processes, which begin at the same time.
    """
    events: list[_Event] = []
    described: list[dict[str, Any]] = []
    first = 0
    for timeline in timelines:
        prefix = f"{timeline.title}: " if len(timelines) > 1 else ""
        events += _Group(timeline, first, prefix).events()
        first += timeline.num_ranks
        about = {"name": timeline.name, "measured": timeline.measured, "num_ranks": timeline.num_ranks}
        held = {"memory": _written_steps(timeline.memory), "host_memory": _written_steps(timeline.host_memory)}
        described.append(about | held)
    other = {"format": _FORMAT, "timelines": described}
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": other}


class _Group:
    """Makes the events of one timeline, whose rank r is process `first` + r."""

    def __init__(self, timeline: Timeline, first: int, prefix: str) -> None:
        self._timeline = timeline
        self._first = first
        self._prefix = prefix
        self._waits = find_waits(timeline)
        self._threads: dict[Action, int] = {}
        self._numbers = {span.action: index for index, span in enumerate(timeline.spans)}

    def events(self) -> Iterator[_Event]:
        for rank in range(self._timeline.num_ranks):
            yield from self._rank(rank)
        yield from self._arrows()
        for name, memory in (("activations", self._timeline.memory), ("on the host", self._timeline.host_memory)):
            for rank, steps in enumerate(memory):
                for time, size in steps:
                    yield self._event("C", rank, name=name, ts=self._at(time), args={"bytes": float(size)})

    def _event(self, phase: str, rank: int, **fields: Any) -> _Event:
        return {"ph": phase, "pid": self._first + rank, **fields}

    def _at(self, time: float) -> float:
        return float(time - self._timeline.start) * 1e6

    def _rank(self, rank: int) -> Iterator[_Event]:
        lanes = self._lanes(rank)
        waits = [wait for wait in self._waits if wait.rank == rank]
        names = ["compute", *["messages"] * (len(lanes) - 1), *(["waits"] if waits else [])]
        yield self._event("M", rank, tid=0, name="process_name", args={"name": f"{self._prefix}rank {rank}"})
        yield self._event("M", rank, tid=0, name="process_sort_index", args={"sort_index": self._first + rank})
        for thread, name in enumerate(names):
            yield self._event("M", rank, tid=thread, name="thread_name", args={"name": name})
        for thread, lane in enumerate(lanes):
            for span in lane:
                self._threads[span.action] = thread
                yield self._span(span, thread)
        for wait in waits:
            yield self._wait(wait, len(lanes))

    def _box(self, interval: Span | Wait, thread: int, **fields: Any) -> _Event:
        ts = self._at(interval.start)
        dur = float(interval.seconds) * 1e6
        return self._event("X", interval.rank, tid=thread, ts=ts, dur=dur, **fields)

    def _span(self, span: Span, thread: int) -> _Event:
        op, stage, microbatch, index, peer = span.action
        args: dict[str, Any] = {"stage": stage, "microbatch": microbatch, "slice": index}
        args |= {"peer": peer} if peer >= 0 else {}
        args |= {"start": float(span.start), "end": float(span.end), "number": self._numbers[span.action]}
        return self._box(span, thread, name=self._timeline.schedule.text(span.action), cat=str(op), args=args)

    def _wait(self, wait: Wait, thread: int) -> _Event:
        awaited = {"next": wait.action, "awaits": wait.before}
        args = {key: self._timeline.schedule.text(action) for key, action in awaited.items() if action is not None}
        source = {} if wait.source is None else {"of rank": wait.source}
        cause = str(wait.cause)
        return self._box(wait, thread, name=cause, cat="wait", args={"cause": cause, **args, **source})

    def _lanes(self, rank: int) -> list[list[Span]]:
        """Returns the spans by lane: lane 0 is computing; messages and copies that overlap in time get other lanes."""
        lanes = [[span for span in self._timeline.compute_spans if span.rank == rank]]
        overlapping = [span for span in self._timeline.spans if span.rank == rank and not span.computes]
        for span in sorted(overlapping, key=lambda span: span.start):
            free = next((lane for lane in lanes[1:] if lane[-1].end <= span.start), None)
            if free is None:
                lanes.append(free := [])
            free.append(span)
        return lanes

    def _arrows(self) -> Iterator[_Event]:
        spans, schedule = self._timeline.span_of, self._timeline.schedule
        pairs = ((spans.get(before), span) for span in spans.values() for before in predecessors(span.action, schedule))
        between_ranks = ((tail, head) for tail, head in pairs if tail is not None and tail.rank != head.rank)
        for index, (tail, head) in enumerate(between_ranks, start=1):
            arrow = {"name": "message", "cat": "message", "id": f"{self._first}.{index}", "bp": "e"}
            for phase, span, time in (("s", tail, tail.start), ("f", head, max(tail.start, head.start))):
                yield self._event(phase, span.rank, tid=self._threads[span.action], ts=self._at(time), **arrow)


def load_trace(path: str | Path) -> tuple[Timeline, ...]:
    """Returns the timelines that `save_trace` wrote, exactly as they were.

    Raises:
        SlipstreamError: the file can't be read, is no such trace, or is damaged.
    """
    try:
        trace = parse_json(read_text(Path(path)))
    except (OSError, UnicodeDecodeError) as error:
        raise SlipstreamError(f"can't read the timeline {path}: {error}") from None
    except ValueError as error:
        raise SlipstreamError(f"{path} is not a timeline: it is not JSON ({error})") from None
    other = trace.get("otherData") if isinstance(trace, dict) else None
    if not isinstance(other, dict) or other.get("format") != _FORMAT:
        raise SlipstreamError(
            f"{path} is not a timeline: it lacks otherData.format = {_FORMAT!r}. Give the timeline.json of a "
            "training run, or what slipstream.save_trace or `slipstream timeline ... --output=x.json` wrote."
        )
    try:
        return _timelines(trace, other)
    except (KeyError, TypeError, ValueError, AttributeError, StopIteration) as error:
        raise SlipstreamError(f"{path} is a damaged timeline: {type(error).__name__}: {error}") from None


def _timelines(trace: dict[str, Any], other: dict[str, Any]) -> tuple[Timeline, ...]:
    described = other["timelines"]
    homes = dict(enumerate((i, rank) for i, timeline in enumerate(described) for rank in range(timeline["num_ranks"])))
    spans: list[list[Span]] = [[] for _ in described]
    boxes = [event for event in trace["traceEvents"] if event["ph"] == "X" and event["cat"] != "wait"]
    for event in sorted(boxes, key=lambda event: int(event["args"]["number"])):
        index, rank = homes[event["pid"]]
        spans[index].append(_read_span(event, rank))
    return tuple(_timeline(record, part) for record, part in zip(described, spans, strict=True))


def _read_span(event: _Event, rank: int) -> Span:
    args = event["args"]
    action = Action(
        op=Op(event["cat"]),
        stage=int(args["stage"]),
        microbatch=int(args["microbatch"]),
        slice=int(args["slice"]),
        peer=int(args.get("peer", -1)),
    )
    span = Span(rank, action, float(args["start"]), float(args["end"]))
    if not span.start <= span.end:
        raise ValueError(f"{action} ends at {span.end}, before it starts at {span.start}")
    return span


def _timeline(described: dict[str, Any], spans: list[Span]) -> Timeline:
    return Timeline(
        spans=tuple(spans),
        num_ranks=described["num_ranks"],
        memory=_read_steps(described["memory"]),
        name=described["name"],
        measured=described["measured"],
        host_memory=_read_steps(described.get("host_memory", ())),
    )


_Memory = Sequence[Sequence[Sequence[float]]]  # per rank, (time, bytes) steps


def _written_steps(memory: _Memory) -> list[list[list[float]]]:
    return [[[float(time), float(size)] for time, size in steps] for steps in memory]


def _read_steps(memory: _Memory) -> tuple[tuple[tuple[float, float], ...], ...]:
    return tuple(tuple((float(time), float(size)) for time, size in steps) for steps in memory)
