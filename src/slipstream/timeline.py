"""What ran when, simulated or measured: spans and memory per rank, as text, picture or Perfetto trace."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from slipstream.errors import SlipstreamError
from slipstream.schedule.action import COMMUNICATION, SENDS, Action, Schedule
from slipstream.schedule.dependencies import predecessors


@dataclass(frozen=True, slots=True)
class Span:
    """One action on one rank, from `start` to `end` in seconds.

    A compute action's span is the computing alone. A SEND's runs from posting to done, a RECV's from
    posting to the message's arrival; both lie beside the rank's computing.
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
        return self.action.op not in COMMUNICATION


@dataclass(frozen=True, slots=True)
class Message:
    """Both ends of one message."""

    send: Span
    receive: Span

    @property
    def start(self) -> float:
        """When both ends were posted."""
        return max(self.send.start, self.receive.start)

    @property
    def seconds(self) -> float:
        return self.receive.end - self.start


@dataclass(frozen=True)
class Timeline:
    """One step: its spans, and per rank the (time, bytes) steps of activation memory (empty if not known)."""

    spans: tuple[Span, ...]
    num_ranks: int
    memory: tuple[tuple[tuple[float, float], ...], ...] = ()
    name: str = ""

    @cached_property
    def start(self) -> float:
        return min((span.start for span in self.spans), default=0)

    @cached_property
    def makespan(self) -> float:
        """Seconds from the first start to the last end."""
        return max((span.end for span in self.spans), default=0) - self.start

    def busy(self, rank: int) -> float:
        """Seconds the rank computes."""
        return sum(span.seconds for span in self.compute_spans if span.rank == rank)

    @cached_property
    def idle_fraction(self) -> float:
        """The share of all ranks' time in which they don't compute: the bubble fraction of the step."""
        if not self.makespan:
            return 0
        return 1 - sum(span.seconds for span in self.compute_spans) / (self.num_ranks * self.makespan)

    @property
    def peak_memory(self) -> tuple[float, ...]:
        """Most bytes of activations at once, per rank; empty if memory is not known."""
        return tuple(max((size for _, size in steps), default=0) for steps in self.memory)

    @cached_property
    def compute_spans(self) -> tuple[Span, ...]:
        return tuple(span for span in self.spans if span.computes)

    @cached_property
    def messages(self) -> tuple[Message, ...]:
        """The messages of which both ends are on the timeline."""
        ends = {span.action: span for span in self.spans if not span.computes}
        return tuple(
            Message(span, ends[action.other_end])
            for action, span in ends.items()
            if action.op in SENDS and action.other_end in ends
        )

    @cached_property
    def schedule(self) -> Schedule:
        """The schedule that ran: each rank's actions by start. Stages that did not run count as rank 0's."""
        rows: list[list[Span]] = [[] for _ in range(self.num_ranks)]
        ranks: defaultdict[int, int] = defaultdict(int)
        for span in self.spans:
            rows[span.rank].append(span)
            ranks[span.action.stage] = span.rank
        return Schedule(
            name="timeline",
            actions=tuple(tuple(s.action for s in sorted(row, key=lambda span: span.start)) for row in rows),
            placement=tuple(ranks[stage] for stage in range(1 + max(ranks, default=0))),
            num_microbatches=1 + max((span.action.microbatch for span in self.spans), default=0),
            num_slices=1 + max((span.action.slice for span in self.spans), default=0),
        )

    def label(self, action: Action) -> str:
        """The action's text, without the stage where every rank holds one."""
        placement = self.schedule.placement
        text = self.schedule.text(action)
        return text.lstrip("0123456789") if len(set(placement)) == len(placement) else text

    def to_text(self, width: int | None = None) -> str:
        """One line a rank. Times in equal steps get one column a step:

            rank 0  F0.0 F0.1           B0.1 B0.0
            rank 1       F0.0 F0.1 B0.1 B0.0

        Others are scaled to `width` characters (100 if not given). Blank is idle; `-` fills what goes on.
        """
        cell = 1 + max((len(self.label(span.action)) for span in self.compute_spans), default=0)
        unit = self._unit() if width is None else 0
        scale = cell / unit if unit else (width or 100) / (self.makespan or 1)
        lines = [f"rank {rank}".ljust(6 + len(str(self.num_ranks - 1))) for rank in range(self.num_ranks)]
        margin = len(lines[0]) + 1
        for span in sorted(self.compute_spans, key=lambda span: span.start):
            first, last = (round((time - self.start) * scale) for time in (span.start, span.end))
            lines[span.rank] = lines[span.rank].ljust(margin + first) + self._cell(span.action, last - first)
        return "\n".join(line.rstrip() for line in lines)

    def _cell(self, action: Action, width: int) -> str:
        label = self.label(action)
        if width <= len(label):
            return action.op[0] * width
        return label.ljust(width - 1, "-") + " "

    def _unit(self) -> float:
        """The step all starts and ends fall on, if it is the shortest span; else 0."""
        unit = min((span.seconds for span in self.compute_spans if span.seconds), default=0)
        steps = [(t - self.start) / unit for span in self.compute_spans for t in (span.start, span.end) if unit]
        return unit if all(abs(step - round(step)) < 1e-6 for step in steps) else 0

    def draw(self, path: str | Path) -> None:
        """Draw ranks as lanes over time, memory beneath; the path's suffix says whether PNG, SVG or PDF."""
        if Path(path).suffix not in (".png", ".svg", ".pdf"):
            raise SlipstreamError(f"Can't draw to {path}: give a path that ends in .png, .svg or .pdf.")
        from slipstream.picture import draw

        draw(self, Path(path))

    def save_perfetto(self, path: str | Path) -> None:
        """Write the trace for ui.perfetto.dev or chrome://tracing."""
        Path(path).write_text(json.dumps(self.to_perfetto()), encoding="utf-8")

    def to_perfetto(self) -> dict[str, Any]:
        """The Chrome trace: a process a rank, threads for computing and messages, memory as a counter.

        Arrows lead from a SEND to its RECV, or from action to action where the timeline has no messages.
        `ts` and `dur` are microseconds from the first start.
        """
        events: list[dict[str, Any]] = []
        threads: dict[Action, int] = {}
        for rank in range(self.num_ranks):
            lanes = self._lanes(rank)
            events += _names(rank, len(lanes))
            for thread, lane in enumerate(lanes):
                threads |= {span.action: thread for span in lane}
                events += [{**self._event(span), "ph": "X", "tid": thread} for span in lane]
        events += self._arrows(threads)
        for rank, steps in enumerate(self.memory):
            counter = {"ph": "C", "pid": rank, "name": "activations"}
            events += [{**counter, "ts": self._microseconds(t), "args": {"bytes": float(b)}} for t, b in steps]
        return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"name": self.name}}

    def _microseconds(self, time: float) -> float:
        return float(time - self.start) * 1e6

    def _event(self, span: Span) -> dict[str, Any]:
        action = span.action
        return {
            "name": self.schedule.text(action),
            "cat": str(action.op),
            "pid": span.rank,
            "ts": self._microseconds(span.start),
            "dur": float(span.seconds) * 1e6,
            "args": {"stage": action.stage, "microbatch": action.microbatch, "slice": action.slice},
        }

    def _lanes(self, rank: int) -> list[list[Span]]:
        """Lane 0 is computing; messages that overlap in time get lanes of their own."""
        lanes: list[list[Span]] = [[span for span in self.compute_spans if span.rank == rank]]
        messages = [span for span in self.spans if span.rank == rank and not span.computes]
        for span in sorted(messages, key=lambda span: span.start):
            free = next((lane for lane in lanes[1:] if lane[-1].end <= span.start), None)
            if free is None:
                lanes.append([span])
            else:
                free.append(span)
        return lanes

    def _arrows(self, threads: dict[Action, int]) -> Iterable[dict[str, Any]]:
        spans = {span.action: span for span in self.spans}
        number = 0
        for action, span in spans.items():
            for before in predecessors(action, self.schedule):
                source = spans.get(before)
                if source is None or source.rank == span.rank:
                    continue
                number += 1
                arrow = {"name": "message", "cat": "message", "id": number}
                start, end = (
                    self._microseconds(source.start),
                    self._microseconds(max(source.start, span.start)),
                )
                yield {**arrow, "ph": "s", "pid": source.rank, "tid": threads[before], "ts": start}
                yield {**arrow, "ph": "f", "bp": "e", "pid": span.rank, "tid": threads[action], "ts": end}


def _names(rank: int, num_threads: int) -> Iterable[dict[str, Any]]:
    yield {"ph": "M", "pid": rank, "tid": 0, "name": "process_name", "args": {"name": f"rank {rank}"}}
    yield {"ph": "M", "pid": rank, "tid": 0, "name": "process_sort_index", "args": {"sort_index": rank}}
    for thread in range(num_threads):
        name = "messages" if thread else "compute"
        yield {"ph": "M", "pid": rank, "tid": thread, "name": "thread_name", "args": {"name": name}}
