"""The page of a report, its elements and bar charts. Text is escaped; arguments called `inner` are HTML."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib import resources
from math import inf, isfinite

GENERATOR = '<meta name="generator" content="{}"/>'  # by which a program knows a page as its own


def html_page(title: str, body: str, generator: str, style: str = "", script: str = "") -> str:
    """Returns a whole page that needs no network: one file with its style and, if any, its script.

    Args:
        title: of the window.
        body: HTML.
        generator: the command that wrote the page.
        style: rules that the page has besides those of every report.
        script: JavaScript that runs when the page is there.
    """
    rules = resources.files("slipstream.html_parts").joinpath("style.css").read_text(encoding="utf-8") + style
    program = f"<script>\n//<![CDATA[\n{script}//]]>\n</script>\n" if script else ""  # XML, too, can be read
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8"/>\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1"/>\n'
        f"{GENERATOR.format(escape(generator))}\n<title>{escape(title)}</title>\n<style>\n{rules}</style>\n</head>\n"
        f"<body>\n{body}\n{program}</body>\n</html>\n"
    )


def section(title: str, inner: str) -> str:
    """Returns a heading and a card beneath it."""
    return f"<section>\n<h2>{escape(title)}</h2>\n<div class='card'>{inner}</div>\n</section>"


def fact_tiles(facts: Iterable[tuple[str, str, str]]) -> str:
    """Returns tiles in a row: a name, a value in large print, and a note."""
    tiles = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}<small>{escape(what)}</small></dd></div>"
        for name, value, what in facts
    )
    return f"<dl class='headline'>{tiles}</dl>"


def html_list(items: Iterable[str]) -> str:
    """Returns the items with a dot each; an item's lines are below each other."""
    texts = ("<br/>".join(map(escape, item.splitlines())) for item in items)
    return f"<ul class='plain'>{''.join(f'<li>{text}</li>' for text in texts)}</ul>"


def details(title: str, inner: str) -> str:
    """Returns an element that opens when its title is chosen."""
    return f"<details><summary>{escape(title)}</summary>{inner}</details>"


def table(headings: Sequence[str], rows: Iterable[Sequence[str]], best: int | None = None) -> str:
    """Returns a table that scrolls where it is too wide; the row `best`, from 0, is marked."""
    head = "".join(f"<th>{escape(heading)}</th>" for heading in headings)
    lines = ["".join(f"<td>{escape(cell)}</td>" for cell in row) for row in rows]
    starts = ["<tr class='best'>" if index == best else "<tr>" for index in range(len(lines))]
    body = "".join(f"{start}{line}</tr>" for start, line in zip(starts, lines, strict=True))
    return f"<div class='scroll'><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"


_ZEROS = re.compile(r"(\.\d*?)0+(?= )")  # on an axis 20.0 GB is 20 GB, 2.50 s is 2.5 s
NUM_COLORS = 10  # --color-0 ... of the page's style
NumberText = Callable[[float], str]  # how a number is printed


@dataclass(frozen=True)
class Bar:
    """One bar of a chart: its name, and its parts from left to right."""

    name: str
    parts: Mapping[str, float]

    @property
    def total(self) -> float:
        return sum(self.parts.values())


def bar_chart(bars: Sequence[Bar], axis: str, text: NumberText, limit: float = inf, limit_name: str = "") -> str:
    """Returns horizontal stacked bars on one axis, with totals next to them, a legend above and a line at `limit`."""
    names = list(dict.fromkeys(name for bar in bars for name, value in bar.parts.items() if value > 0))
    most = max([*(bar.total for bar in bars), limit if isfinite(limit) else 0.0]) or 1.0
    ticks = axis_ticks(most)
    end = max(most * 1.02, ticks[-1])
    color = {name: index % NUM_COLORS for index, name in enumerate(names)}
    rows = "".join(_row(bar, color, end, ticks, text, limit) for bar in bars)
    legend = "".join(f'<li><i class="c{color[name]}"></i>{escape(name)}</li>' for name in names)
    if isfinite(limit):
        legend += f'<li><i class="limit"></i>{escape(limit_name)}: {escape(text(limit))}</li>'
    return (
        f'<ul class="legend">{legend}</ul>\n<div class="chart{" dense" if len(bars) > 16 else ""}">\n{rows}'
        f"{_axis(ticks, end, text, axis)}</div>\n"
    )


def round_numbers(least: float, most: float, num_parts: int, whole: bool = False) -> list[float]:
    """Returns round numbers, the first at most `least` and the last at least `most`, which make at most so many parts
    of what is between them."""
    from matplotlib.ticker import MaxNLocator

    if most <= least:
        least, most = least - (abs(least) / 2 or 1), most + (abs(most) / 2 or 1)
    return [*map(float, MaxNLocator(num_parts, steps=[1, 2, 2.5, 5, 10], integer=whole).tick_values(least, most))]


def axis_ticks(most: float) -> list[float]:
    """Returns four to seven round numbers from 0 to at most `most`."""
    return [tick for tick in round_numbers(0, most, 6) if tick <= most * 1.0001]


def _row(bar: Bar, color: Mapping[str, int], end: float, ticks: Sequence[float], text: NumberText, limit: float) -> str:
    pieces = [_line(tick / end, "grid") for tick in ticks]
    start = 0.0
    for name, value in bar.parts.items():
        if value > 0:
            place = f'x="{start / end:.4%}" y="10%" width="{value / end:.4%}" height="80%"'
            title = escape(f"{bar.name}, {name}: {text(value)}")
            pieces.append(f'<rect class="c{color[name]}" {place}><title>{title}</title></rect>')
            start += value
    if isfinite(limit):
        pieces.append(_line(limit / end, "limit"))
    over = " over" if bar.total > limit else ""
    parts = ", ".join(f"{name} {text(value)}" for name, value in bar.parts.items() if value > 0)
    label = escape(f"{bar.name}: {text(bar.total)}; {parts}")
    return (
        f'<div class="name">{escape(bar.name)}</div><svg class="bar" role="img" aria-label="{label}">'
        f'{"".join(pieces)}</svg><div class="total{over}">{escape(text(bar.total))}</div>\n'
    )


def _line(share: float, kind: str) -> str:
    return f'<line class="{kind}" x1="{share:.4%}" x2="{share:.4%}" y1="0" y2="100%"/>'


def _axis(ticks: Sequence[float], end: float, text: NumberText, title: str) -> str:
    """Returns the numbers under the grid's lines, and the axis' title."""
    numbers = [_ZEROS.sub(r"\1", text(tick)).replace(". ", " ") for tick in ticks]
    places = zip(ticks, numbers, strict=True)
    labels = "".join(f'<text x="{tick / end:.4%}" y="14">{escape(label)}</text>' for tick, label in places)
    rows = (f'<svg class="axis">{labels}</svg>', f'<p class="axis">{escape(title)}</p>')
    return "".join(f"<div></div>{row}<div></div>\n" for row in rows)
