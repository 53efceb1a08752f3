"""The charts of a run's page: lines over steps, and the timeline of a step, which the page's script draws."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from math import isfinite
from typing import Any

from slipstream.html_parts import NUM_COLORS, NumberText, round_numbers
from slipstream.schedule import OPERATIONS, RECEIVES, Action, Lane
from slipstream.timeline import Cause, Span, Timeline, Wait, find_waits
from slipstream.timeline.picture import IDLE, ink_on
from slipstream.timeline.picture import action_color as color
from slipstream.units import seconds_text

MOST_POINTS = 1200  # drawn points of a curve; more than a screen has columns
_WIDTH, _HEIGHT = 1000, 200  # size of the picture, which the page stretches
Point = tuple[float, float | None]  # (step, value); None for an unknown value


@dataclass(frozen=True)
class Curve:
    """A value over steps. With `dots`, each point is shown."""

    name: str
    points: Sequence[Point]
    dots: bool = False


@dataclass(frozen=True)
class Mark:
    """An event at a step; `kind` is one of the page's style: restart, bad, straggler, failure."""

    step: float
    kind: str
    text: str


def line_chart(title: str, unit: str, curves: Sequence[Curve], text: NumberText, marks: Sequence[Mark] = ()) -> str:
    """Returns a chart with the range of its values on the left, or "" where no value is known.

    Of a long curve the first, last, lowest and highest point of each part are drawn, so that no peak is lost.
    """
    known = [(step, value) for curve in curves for step, value in curve.points if value is not None]
    if not known:
        return ""
    first, last = min(step for step, _ in known), max(step for step, _ in known)
    ticks = round_numbers(min(value for _, value in known), max(value for _, value in known), num_parts=5)
    scale = _Scale(first, last, ticks[0], ticks[-1])
    shown = [Curve(curve.name, thinned(curve.points), curve.dots) for curve in curves]
    grid = "".join(f'<line class="grid" x1="0" x2="{_WIDTH}" y1="{scale.y(t):g}" y2="{scale.y(t):g}"/>' for t in ticks)
    lines = "".join(_curve(curve, index % NUM_COLORS, scale) for index, curve in enumerate(shown))
    at_steps = "".join(_mark(mark, scale) for mark in marks if first <= mark.step <= last)
    numbers = "".join(f'<text x="100%" y="{scale.y(t) / _HEIGHT:.2%}">{escape(text(t))}</text>' for t in ticks)
    # A slider: the arrow keys move along the steps, and its value is the step's text.
    return (
        f'<figure class="curves" tabindex="0" role="slider" aria-label="{escape(title)} over steps" '
        f'aria-valuemin="{first:g}" aria-valuemax="{last:g}" aria-valuenow="{last:g}" '
        f'aria-valuetext="{escape(_ends(shown, text))}">\n'
        f"<figcaption><b>{escape(title)}</b> <small>{escape(unit)}</small> <output></output></figcaption>\n"
        f'{_legend(shown)}<div class="plot"><svg class="values" aria-hidden="true">{numbers}</svg>'
        f'<svg class="lines" viewBox="0 0 {_WIDTH} {_HEIGHT}" preserveAspectRatio="none" aria-hidden="true">{grid}'
        f'{at_steps}{lines}<line class="cursor" y1="0" y2="{_HEIGHT}"/></svg>'
        f'<svg class="steps" aria-hidden="true">{_step_numbers(first, last, scale)}</svg></div>\n'
        f'<script type="application/json">{_points(shown, scale, text)}</script></figure>\n'
    )


def thinned(points: Sequence[Point]) -> list[Point]:
    """Returns at most about MOST_POINTS of the points: of each part the first, last, lowest and highest."""
    if len(points) <= MOST_POINTS:
        return list(points)
    size = -(-len(points) * 4 // MOST_POINTS)
    thin: list[Point] = []
    for begin in range(0, len(points), size):
        part = points[begin : begin + size]
        by_value = sorted((value, place) for place, (_, value) in enumerate(part) if value is not None)
        gaps = [place for place, (_, value) in enumerate(part) if value is None][:1]
        ends = [by_value[0][1], by_value[-1][1]] if by_value else []
        thin += [part[place] for place in sorted({0, len(part) - 1, *ends, *gaps})]
    return thin


@dataclass(frozen=True)
class _Scale:
    first: float
    last: float
    least: float
    most: float

    def x(self, step: float) -> float:
        return _WIDTH * ((step - self.first) / (self.last - self.first) if self.last > self.first else 0.5)

    def y(self, value: float) -> float:
        return _HEIGHT * (1 - (value - self.least) / (self.most - self.least))


def _curve(curve: Curve, color: int, scale: _Scale) -> str:
    """Returns the line, with a gap where a value isn't known, and a dot where a point is alone."""
    path, dots = "", ""
    for run in _known_runs(curve.points):
        places = [f"{scale.x(step):.1f} {scale.y(value):.2f}" for step, value in run]
        path += f"M{'L'.join(places)}"
        if curve.dots or len(places) == 1:
            dots += "".join(f"M{place}h0" for place in places)
    dotted = f'<path class="dot s{color}" d="{dots}"/>' if dots else ""
    return f'<path class="s{color}" d="{path}"/>{dotted}'


def _known_runs(points: Sequence[Point]) -> Iterator[list[tuple[float, float]]]:
    run: list[tuple[float, float]] = []
    for step, value in [*points, (0.0, None)]:
        if value is not None:
            run.append((step, value))
        elif run:
            yield run
            run = []


def _mark(mark: Mark, scale: _Scale) -> str:
    x = f"{scale.x(mark.step):.1f}"
    title = f"<title>{escape(mark.text)}</title>"
    return f'<line class="mark {mark.kind}" x1="{x}" x2="{x}" y1="0" y2="{_HEIGHT}">{title}</line>'


def _legend(curves: Sequence[Curve]) -> str:
    """Returns the names of the curves that have points, where there are several curves."""
    if len(curves) < 2:
        return ""
    shown = [(index % NUM_COLORS, curve.name) for index, curve in enumerate(curves) if curve.points]
    items = (f'<li><i class="c{color}"></i>{escape(name)}</li>' for color, name in shown)
    return f'<ul class="legend">{"".join(items)}</ul>'


def _step_numbers(first: float, last: float, scale: _Scale) -> str:
    """Returns the first and the last step, and round ones between that leave room for these."""
    room = (last - first) * 0.08
    between = round_numbers(first, last, num_parts=5, whole=True)
    inner = [step for step in between if first + room < step < last - room]
    ends = [(first, "start"), (last, "end")] if last > first else [(first, "middle")]
    places = [*ends, *((step, "middle") for step in inner)]
    return "".join(
        f'<text x="{scale.x(step) / _WIDTH:.2%}" y="14" text-anchor="{anchor}">{step:,.0f}</text>'
        for step, anchor in places
    )


def _ends(curves: Sequence[Curve], text: NumberText) -> str:
    parts = []
    for curve in curves:
        known = [(step, value) for step, value in curve.points if value is not None]
        if known:
            (first, begin) = known[0]
            (last, end) = known[-1]
            parts.append(f"{curve.name} from {text(begin)} at step {first:g} to {text(end)} at step {last:g}")
    return "; ".join(parts)


def _points(curves: Sequence[Curve], scale: _Scale, text: NumberText) -> str:
    """Returns the points of each curve as JSON: place from left in thousandths, step, value as text."""
    rows = [
        {
            "name": curve.name,
            "points": [
                [round(scale.x(step), 1), step, "not finite" if value is None else text(value)]
                for step, value in curve.points
            ],
        }
        for curve in curves
    ]
    return script_json(rows)


def script_json(value: object) -> str:
    """Returns JSON that can stand inside of a script element."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def finite(value: object) -> float | None:
    """Returns a number of a record; None where it isn't known or isn't finite."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return float(value) if is_number and isfinite(value) else None  # type: ignore[arg-type]


MOST_RANKS = 64  # ranks shown
_NANOSECONDS = 1e9  # unit of the script's times, which are whole numbers: short, and exact enough


def step_timeline(timeline: Timeline) -> str:
    """Returns the element with the data of a timeline, its legend, its buttons and, for those who see no pictures, the
    timeline as text."""
    num_ranks = min(timeline.num_ranks, MOST_RANKS)
    left_out = f"<p class='soft'>Ranks 0 to {num_ranks - 1} of {timeline.num_ranks:,}.</p>"
    return (
        f"{_timeline_legend(timeline)}\n<div class='step-timeline' tabindex='0' role='application' "
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
    """Returns the script's data: kinds of boxes, and for each rank its boxes in the order of time and its messages.

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
        if OPERATIONS[action.op].lane is not Lane.RANK:
            return {"style": "message"}
        background = color(action, self._num_slices)
        return {"fill": _hex(background), "ink": ink_on(background)}


def _span(span: Span, timeline: Timeline, kinds: _Kinds) -> list[Any]:
    op, stage, microbatch, index, _ = span.action
    name = OPERATIONS[op].label if OPERATIONS[op].lane is Lane.RANK else "message"
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


def _timeline_legend(timeline: Timeline) -> str:
    """Returns the operations and the causes of waits that there are."""
    ops = dict.fromkeys(span.action.op for span in timeline.compute_spans)
    work = [(OPERATIONS[op].label, f"background:{_hex(color(Action(op, 0, 0, 0), 1))}", "") for op in ops]
    causes = {wait.cause for wait in find_waits(timeline)}
    idle = [(IDLE[cause][0], "", f"idle {cause}") for cause in Cause if cause in causes]
    items = (f"<li><i class='box {kind}' style='{style}'></i>{escape(name)}</li>" for name, style, kind in work + idle)
    return f"<ul class='legend'>{''.join(items)}</ul>"


def _hex(background: Iterable[float]) -> str:
    return "#" + "".join(f"{round(255 * share):02x}" for share in background)
