"""A timeline, simulated or measured: which action ran on which rank and when, and the memory each rank held."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property

from slipstream.schedule import COMMUNICATION, RECEIVES, SENDS, Action, Op, Schedule

_BESIDE = COMMUNICATION | {Op.OFFLOAD, Op.RELOAD}  # what goes on while the rank computes


@dataclass(frozen=True, slots=True)
class Span:
    """One action on one rank, from `start` to `end` in seconds.

    A compute action's span is the computing alone. A SEND's runs from posting to done, a RECV's from
    posting to the message's arrival, an OFFLOAD's or RELOAD's is the copy; they lie beside the rank's computing.
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
        return self.action.op not in _BESIDE


def _place(span: Span) -> tuple[float, int]:
    """The order of one rank's spans: by start, then receives, actions that take no time, sends, and the rest."""
    if span.action.op in RECEIVES:
        return span.start, 0
    if not span.computes:
        return span.start, 2
    return span.start, 3 if span.seconds else 1


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
    """One step: its spans, and per rank the (time, bytes) steps of activation memory (empty if not known).

    `measured` tells a run from a simulation.
    """

    spans: tuple[Span, ...]
    num_ranks: int
    memory: tuple[tuple[tuple[float, float], ...], ...] = ()
    name: str = ""
    measured: bool = False

    @property
    def title(self) -> str:
        """The name, and whether it was measured."""
        return f"{self.name or 'timeline'}, {'measured' if self.measured else 'simulated'}"

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
    def span_of(self) -> dict[Action, Span]:
        """When and where each action ran."""
        return {span.action: span for span in self.spans}

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
        """The schedule that ran: each rank's actions by start. Stages that did not run count as rank 0's.

        Where several start at one time, receives are posted first, then what takes no time and its sends.
        """
        rows: list[list[Span]] = [[] for _ in range(self.num_ranks)]
        ranks: defaultdict[int, int] = defaultdict(int)
        for span in self.spans:
            rows[span.rank].append(span)
            ranks[span.action.stage] = span.rank
        return Schedule(
            name=" ".join(self.name.split()) or "timeline",
            actions=tuple(tuple(s.action for s in sorted(row, key=_place)) for row in rows),
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
