"""The timeline of a step for the page's script, which draws the part that is looked at: actions, waits and messages."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from typing import Any

from slipstream.run_page.line_charts import script_json
from slipstream.schedule import RECEIVES, Action
from slipstream.timeline import Cause, Span, Timeline, Wait, find_waits
from slipstream.timeline.colors import IDLE, WORK, color, ink_on
from slipstream.units import seconds_text

MOST_RANKS = 64  # that are shown
_NANOSECONDS = 1e9  # the script gets times as whole numbers: short, and exact enough


def step_timeline(timeline: Timeline) -> str:
    """Returns the element with the data of a timeline, its legend, its buttons and, for those who see no pictures, the
    timeline as text."""
    num_ranks = min(timeline.num_ranks, MOST_RANKS)
    left_out = f"<p class='soft'>Ranks 0 to {num_ranks - 1} of {timeline.num_ranks:,}.</p>"
    return (
        f"{_legend(timeline)}\n<div class='step-timeline' tabindex='0' role='application' "
        f"aria-label='timeline of {num_ranks} ranks: arrow keys go from action to action, plus and minus zoom, shift "
        "with an arrow moves the view, 0 shows the whole step'>\n"
        "<p class='tools'><button type='button' data-do='in' aria-label='zoom in'>+</button> "
        "<button type='button' data-do='out' aria-label='zoom out'>\u2212</button> "
        "<button type='button' data-do='earlier' aria-label='earlier'>\u25c0</button> "
        "<button type='button' data-do='later' aria-label='later'>\u25b6</button> "
        "<button type='button' data-do='all'>whole step</button> <output aria-live='polite'></output></p>\n"
        f"<div class='lanes'></div><script type='application/json'>{script_json(_data(timeline, num_ranks))}</script>"
        f"</div>\n{left_out if num_ranks < timeline.num_ranks else ''}"
        "<p class='soft'>Drag to move, hold Ctrl and turn the wheel to zoom; by keyboard: arrows, + and \u2212, 0.</p>"
        "<details><summary>As text</summary>"
        f"<div class='scroll'><pre>{escape(timeline.to_text())}</pre></div></details>"
    )


def _data(timeline: Timeline, num_ranks: int) -> dict[str, Any]:
    """Returns what the script draws: kinds of boxes, and for each rank its boxes in the order of time and its messages.

    A box is [start, duration, kind, label, description], with times in nanoseconds from the step's start.
    """
    kinds = _Kinds(timeline.schedule.num_slices)
    ranks: list[dict[str, Any]] = [{"boxes": [], "messages": []} for _ in range(num_ranks)]
    for span in timeline.spans:
        if span.rank < num_ranks and (span.computes or span.action.op in RECEIVES):
            ranks[span.rank]["boxes" if span.computes else "messages"].append(_span(span, timeline, kinds))
    for wait in find_waits(timeline):
        if wait.rank < num_ranks:
            ranks[wait.rank]["boxes"].append(_wait(wait, timeline, kinds))
    for rank in ranks:
        for boxes in rank.values():
            boxes.sort(key=lambda box: box[:2])
    return {"length": _at(timeline.makespan), "kinds": kinds.found, "ranks": ranks}


class _Kinds:
    """The kinds of boxes so far: each its name and colours, or the class by which the page's style colours it."""

    def __init__(self, num_slices: int) -> None:
        self.found: list[dict[str, str]] = []
        self._numbers: dict[tuple[str, int], int] = {}
        self._num_slices = num_slices

    def of(self, what: Action | Cause) -> int:
        """Returns the number of a kind, which is new or known."""
        key = (str(what), -1) if isinstance(what, Cause) else (str(what.op), what.slice)
        if key not in self._numbers:
            self._numbers[key] = len(self.found)
            self.found.append({"style": f"idle {what}"} if isinstance(what, Cause) else self._colors(what))
        return self._numbers[key]

    def _colors(self, action: Action) -> dict[str, str]:
        if action.op not in WORK:
            return {"style": "message"}
        background = color(action, self._num_slices)
        return {"fill": _hex(background), "ink": ink_on(background)}


def _span(span: Span, timeline: Timeline, kinds: _Kinds) -> list[Any]:
    op, stage, microbatch, index = span.action
    name = WORK[op][0] if op in WORK else "message"
    where = f"{name}, stage {stage}, microbatch {microbatch}, slice {index}"
    return _box(span, kinds.of(span.action), timeline.label(span.action), where, timeline)


def _wait(wait: Wait, timeline: Timeline, kinds: _Kinds) -> list[Any]:
    text = f"waits: {IDLE[wait.cause][0]}"
    if wait.before is not None and wait.source is not None:
        text += f", for {timeline.label(wait.before)} of rank {wait.source}"
    return _box(wait, kinds.of(wait.cause), "", text, timeline)


def _box(interval: Span | Wait, kind: int, label: str, what: str, timeline: Timeline) -> list[Any]:
    after = interval.start - timeline.start
    text = f"{what}; {seconds_text(interval.seconds)}, {seconds_text(after)} after the step's start"
    return [_at(after), _at(interval.seconds), kind, label, text]


def _at(seconds: float) -> int:
    return round(seconds * _NANOSECONDS)


def _legend(timeline: Timeline) -> str:
    """Returns the operations and the causes of waits that there are."""
    ops = dict.fromkeys(span.action.op for span in timeline.compute_spans)
    work = [(WORK[op][0], f"background:{_hex(color(Action(op, 0, 0, 0), 1))}", "") for op in ops if op in WORK]
    causes = {wait.cause for wait in find_waits(timeline)}
    idle = [(IDLE[cause][0], "", f"idle {cause}") for cause in Cause if cause in causes]
    return f"<ul class='legend'>{''.join(_legend_item(*each) for each in [*work, *idle])}</ul>"


def _legend_item(name: str, style: str, kind: str) -> str:
    return f"<li><i class='box {kind}' style='{style}'></i>{escape(name)}</li>"


def _hex(background: Iterable[float]) -> str:
    return "#" + "".join(f"{round(255 * each):02x}" for each in background)
