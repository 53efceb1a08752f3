"""The page of a report and its elements. All text that is passed in is escaped; what is called `inner` is HTML."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from importlib import resources

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
    """Returns tiles in a row: a name, a value in large print, and what it is of."""
    tiles = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}<small>{escape(what)}</small></dd></div>"
        for name, value, what in facts
    )
    return f"<dl class='headline'>{tiles}</dl>"


def html_list(items: Iterable[str]) -> str:
    """Returns the items with a dot each."""
    return f"<ul class='plain'>{''.join(f'<li>{escape(item)}</li>' for item in items)}</ul>"


def details(title: str, inner: str) -> str:
    """Returns what is shown when its title is chosen."""
    return f"<details><summary>{escape(title)}</summary>{inner}</details>"


def table(headings: Sequence[str], rows: Iterable[Sequence[str]], best: int | None = None) -> str:
    """Returns a table that scrolls where it is too wide; the row `best`, from 0, is marked."""
    head = "".join(f"<th>{escape(each)}</th>" for each in headings)
    lines = ["".join(f"<td>{escape(cell)}</td>" for cell in row) for row in rows]
    starts = ["<tr class='best'>" if index == best else "<tr>" for index in range(len(lines))]
    body = "".join(f"{start}{line}</tr>" for start, line in zip(starts, lines, strict=True))
    return f"<div class='scroll'><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
