"""Saves timelines as a Chrome trace, for ui.perfetto.dev and chrome://tracing, and loads them from it exactly."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from slipstream.errors import SlipstreamError
from slipstream.schedule import Action, Op, predecessors
from slipstream.timeline.idle_causes import Wait, find_waits
from slipstream.timeline.spans import Span, Timeline

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
    first = 0
    for timeline in timelines:
        prefix = f"{timeline.title}: " if len(timelines) > 1 else ""
        events += _Group(timeline, first, prefix).events()
        first += timeline.num_ranks
    described = [
        {"name": t.name, "measured": t.measured, "num_ranks": t.num_ranks, "memory": _floats(t)} for t in timelines
    ]
    other = {"format": _FORMAT, "timelines": described}
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": other}


def _floats(timeline: Timeline) -> list[list[list[float]]]:
    return [[[float(time), float(size)] for time, size in steps] for steps in timeline.memory]


class _Group:
    """Makes the events of one timeline, whose rank r is process `first` + r."""

    def __init__(self, timeline: Timeline, first: int, prefix: str) -> None:
        self._timeline, self._first, self._prefix = timeline, first, prefix
        self._waits = find_waits(timeline)
        self._threads: dict[Action, int] = {}
        self._numbers = {span.action: number for number, span in enumerate(timeline.spans)}

    def events(self) -> Iterator[_Event]:
        for rank in range(self._timeline.num_ranks):
            yield from self._rank(rank)
        yield from self._arrows()
        for rank, steps in enumerate(self._timeline.memory):
            counter = {"ph": "C", "pid": self._first + rank, "name": "activations"}
            for time, size in steps:
                yield {**counter, "ts": self._microseconds(time), "args": {"bytes": float(size)}}

    def _rank(self, rank: int) -> Iterator[_Event]:
        lanes = self._lanes(rank)
        waits = [wait for wait in self._waits if wait.rank == rank]
        threads = ["compute", *["messages"] * (len(lanes) - 1), *(["waits"] if waits else [])]
        yield from self._names(rank, threads)
        for thread, lane in enumerate(lanes):
            for span in lane:
                self._threads[span.action] = thread
                yield {**self._span(span), "tid": thread}
        for wait in waits:
            yield {**self._wait(wait), "tid": len(lanes)}

    def _names(self, rank: int, threads: list[str]) -> Iterator[_Event]:
        process = {"ph": "M", "pid": self._first + rank}
        yield {**process, "tid": 0, "name": "process_name", "args": {"name": f"{self._prefix}rank {rank}"}}
        yield {**process, "tid": 0, "name": "process_sort_index", "args": {"sort_index": self._first + rank}}
        for thread, name in enumerate(threads):
            yield {**process, "tid": thread, "name": "thread_name", "args": {"name": name}}

    def _microseconds(self, time: float) -> float:
        return float(time - self._timeline.start) * 1e6

    def _box(self, interval: Span | Wait) -> _Event:
        ts, dur = self._microseconds(interval.start), float(interval.seconds) * 1e6
        return {"ph": "X", "pid": self._first + interval.rank, "ts": ts, "dur": dur}

    def _span(self, span: Span) -> _Event:
        action = span.action
        args = {"stage": action.stage, "microbatch": action.microbatch, "slice": action.slice}
        times = {"start": float(span.start), "end": float(span.end), "number": self._numbers[action]}
        name = self._timeline.schedule.text(action)
        return {**self._box(span), "name": name, "cat": str(action.op), "args": args | times}

    def _wait(self, wait: Wait) -> _Event:
        text = self._timeline.schedule.text
        args: dict[str, Any] = {"cause": str(wait.cause)}
        if wait.action is not None:
            args["next"] = text(wait.action)
        if wait.before is not None:
            args["awaits"] = text(wait.before)
        if wait.source is not None:
            args["of rank"] = wait.source
        return {**self._box(wait), "name": str(wait.cause), "cat": "wait", "args": args}

    def _lanes(self, rank: int) -> list[list[Span]]:
        """Returns the spans by lane: lane 0 is computing; messages and copies that overlap in time get other lanes."""
        lanes: list[list[Span]] = [[span for span in self._timeline.compute_spans if span.rank == rank]]
        overlapping = [span for span in self._timeline.spans if span.rank == rank and not span.computes]
        for span in sorted(overlapping, key=lambda span: span.start):
            free = next((lane for lane in lanes[1:] if lane[-1].end <= span.start), None)
            if free is None:
                lanes.append([span])
            else:
                free.append(span)
        return lanes

    def _arrows(self) -> Iterator[_Event]:
        spans = self._timeline.span_of
        number = 0
        for action, span in spans.items():
            for before in predecessors(action, self._timeline.schedule):
                source = spans.get(before)
                if source is None or source.rank == span.rank:
                    continue
                number += 1
                arrow = {"name": "message", "cat": "message", "id": f"{self._first}.{number}"}
                tail, head = source.start, max(source.start, span.start)
                for phase, of, time in (("s", source, tail), ("f", span, head)):
                    where = {"pid": self._first + of.rank, "tid": self._threads[of.action]}
                    yield {**arrow, "ph": phase, "bp": "e", **where, "ts": self._microseconds(time)}


def load_trace(path: str | Path) -> tuple[Timeline, ...]:
    """Returns the timelines that `save_trace` wrote, exactly as they were.

    Raises:
        SlipstreamError: the file can't be read, is no such trace, or is damaged.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SlipstreamError(f"can't read the timeline {path}: {error}") from None
    try:
        trace = json.loads(text)
    except json.JSONDecodeError as error:
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
    homes = dict(enumerate((i, rank) for i, one in enumerate(described) for rank in range(one["num_ranks"])))
    spans: list[list[Span]] = [[] for _ in described]
    boxes = [event for event in trace["traceEvents"] if event["ph"] == "X" and event["cat"] != "wait"]
    for event in sorted(boxes, key=lambda event: int(event["args"]["number"])):
        index, rank = homes[event["pid"]]
        spans[index].append(_read_span(event, rank))
    return tuple(_timeline(one, own) for one, own in zip(described, spans, strict=True))


def _read_span(event: _Event, rank: int) -> Span:
    args = event["args"]
    action = Action(Op(event["cat"]), int(args["stage"]), int(args["microbatch"]), int(args["slice"]))
    span = Span(rank, action, float(args["start"]), float(args["end"]))
    if not span.start <= span.end:
        raise ValueError(f"{action} ends at {span.end}, before it starts at {span.start}")
    return span


def _timeline(described: dict[str, Any], spans: list[Span]) -> Timeline:
    memory = tuple(tuple((float(time), float(size)) for time, size in steps) for steps in described["memory"])
    return Timeline(tuple(spans), described["num_ranks"], memory, described["name"], described["measured"])
