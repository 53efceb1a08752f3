"""Line charts over steps as SVG: curves on one axis, marks at steps, and the points that the page's script shows."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from math import floor, isfinite, log10

from slipstream.html_parts import NUM_COLORS, NumberText

MOST_POINTS = 1200  # of a curve that are drawn: more than a screen has columns
_WIDTH, _HEIGHT = 1000, 200  # of the picture, which the page stretches
Point = tuple[float, float | None]  # a step, and a value where it is known


@dataclass(frozen=True)
class Curve:
    """A value over steps. With `dots`, each point is shown."""

    name: str
    points: Sequence[Point]
    dots: bool = False


@dataclass(frozen=True)
class Mark:
    """What happened at a step; `kind` is one of the page's style: restart, bad, straggler, failure."""

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
    ticks = value_ticks(min(value for _, value in known), max(value for _, value in known))
    scale = _Scale(first, last, ticks[0], ticks[-1])
    shown = [Curve(each.name, thinned(each.points), each.dots) for each in curves]
    grid = "".join(f'<line class="grid" x1="0" x2="{_WIDTH}" y1="{scale.y(t):g}" y2="{scale.y(t):g}"/>' for t in ticks)
    lines = "".join(_curve(each, number % NUM_COLORS, scale) for number, each in enumerate(shown))
    at_steps = "".join(_mark(each, scale) for each in marks if first <= each.step <= last)
    numbers = "".join(f'<text x="100%" y="{scale.y(t) / _HEIGHT:.2%}">{escape(text(t))}</text>' for t in ticks)
    # A slider: the arrow keys move along the steps, and what is there is its value.
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


def value_ticks(least: float, most: float) -> list[float]:
    """Returns two to seven round numbers, the first at most `least` and the last at least `most`."""
    if most <= least:
        least, most = least - (abs(least) / 2 or 1), most + (abs(most) / 2 or 1)
    rough = (most - least) / 4
    power = 10.0 ** floor(log10(rough))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= rough * 0.999)
    start = floor(least / step + 1e-9)
    ticks = [start * step]
    while ticks[-1] < most - step * 1e-9:
        ticks.append((start + len(ticks)) * step)
    return ticks


def thinned(points: Sequence[Point]) -> list[Point]:
    """Returns at most about MOST_POINTS of the points: of each part the first, last, lowest and highest."""
    if len(points) <= MOST_POINTS:
        return list(points)
    size = -(-len(points) * 4 // MOST_POINTS)
    kept: list[Point] = []
    for begin in range(0, len(points), size):
        part = points[begin : begin + size]
        by_value = sorted((value, place) for place, (_, value) in enumerate(part) if value is not None)
        gaps = [place for place, (_, value) in enumerate(part) if value is None][:1]
        ends = [by_value[0][1], by_value[-1][1]] if by_value else []
        kept += [part[place] for place in sorted({0, len(part) - 1, *ends, *gaps})]
    return kept


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
    x, title = f"{scale.x(mark.step):.1f}", f"<title>{escape(mark.text)}</title>"
    return f'<line class="mark {mark.kind}" x1="{x}" x2="{x}" y1="0" y2="{_HEIGHT}">{title}</line>'


def _legend(curves: Sequence[Curve]) -> str:
    """Returns the names of the curves that have points, where there are several curves."""
    if len(curves) < 2:
        return ""
    shown = [(number % NUM_COLORS, curve.name) for number, curve in enumerate(curves) if curve.points]
    items = (f'<li><i class="c{color}"></i>{escape(name)}</li>' for color, name in shown)
    return f'<ul class="legend">{"".join(items)}</ul>'


def _step_numbers(first: float, last: float, scale: _Scale) -> str:
    """Returns the first and the last step, and round ones between that leave room for these."""
    rough = (last - first) / 5
    between = []
    if rough > 0:
        power = 10 ** max(0, floor(log10(rough)))
        step = next(m * power for m in (1, 2, 5, 10) if m * power >= rough)
        between = [n * step for n in range(int(first // step) + 1, int(last // step) + 1)]
    room = (last - first) * 0.08
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
            (first, begin), (last, end) = known[0], known[-1]
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
