"""The tables of docs/models.md and docs/architectures.md, written from the record."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.papers.page import MARK, ROOT, table
from benchmarks.records import RESULTS
from benchmarks.zoo.outcomes import DEFAULTS, VARIANTS, Kind, Verdict

PAGES = {"counts": ROOT / "docs" / "models.md", "architectures": ROOT / "docs" / "architectures.md"}
PATHS = {"attention": "context store", "own attention": "own attention"}  # others are carried states
_REASON = re.compile(r"can't be (?:trained in token slices|cut into stages): (.*?)(?:\. Give .*)?$", re.S)
_MOST = 200  # characters of a reason
Row = dict[str, Any]


def write_pages(name: str) -> list[Path]:
    """Writes the tables of the pages from the record `name`; returns the pages' paths."""
    rows = json.loads((RESULTS / f"{name}.json").read_text())["rows"]
    for table_name, path in PAGES.items():
        path.write_text(with_table(table_name, path.read_text(encoding="utf-8"), rows), encoding="utf-8")
    return [*PAGES.values()]


def with_table(name: str, text: str, rows: Mapping[str, Row]) -> str:
    """Returns a page's text with its table as the record has it."""
    mark = MARK.format(name)
    new = mark + (counts(rows.values()) if name == "counts" else architectures(rows))
    text, found = re.subn(re.escape(mark) + r"(\|.*\n)*", lambda _: new, text)
    assert found == 1, f"{PAGES[name]} has no mark {mark!r}"
    return text


def counts(rows: Iterable[Row]) -> str:
    """Returns the numbers of architectures by kind and by the verdict about their default configuration."""
    rows = list(rows)
    columns = [each for each in Verdict if any(row[DEFAULTS]["verdict"] == each.value for row in rows)]
    latest = Counter(row["sources"] for row in rows).most_common(1)[0][0]
    groups = {kind.value: [row for row in rows if row["kind"] == kind.value] for kind in Kind}
    groups |= {"all": rows, "all that other sources were tried with": [r for r in rows if r["sources"] != latest]}
    return table(
        f"architectures | {' | '.join(each.value for each in columns)} | all",
        ([name, *_numbers(group, columns), len(group)] for name, group in groups.items() if group),
    )


def architectures(rows: Mapping[str, Row]) -> str:
    """Returns a line for every architecture, with its variants where they differ from the default configuration."""
    return table("architecture | in slices | variants", ([f"`{name}`", *_cells(row)] for name, row in rows.items()))


def short_reason(message: str) -> str:
    """Returns a refusal's reason in one line, without the model's name and what to type."""
    found = _REASON.search(message)
    line = " ".join((found.group(1) if found else message).split()).replace("|", "\\|").rstrip(".")
    return line if len(line) <= _MOST else f"{line[:_MOST].rsplit(' ', 1)[0]} ..."


def _cells(row: Row) -> list[str]:
    found, others = row[DEFAULTS], row.get(VARIANTS, [])
    same = [each["variant"] for each in others if each["verdict"] == found["verdict"] == Verdict.EXACT.value]
    different = [f"{each['variant']}: {_cell(each)}" for each in others if each["verdict"] != found["verdict"]]
    return [_cell(found), "; ".join([*([f"exact: {', '.join(same)}"] if same else []), *different])]


def _cell(outcome: dict[str, Any]) -> str:
    if outcome["verdict"] == Verdict.EXACT.value:
        paths = dict.fromkeys(PATHS.get(each, "carried state") for each in outcome["paths"])
        return f"exact: {' and '.join(paths) or 'every token alone'}"
    return f"{outcome['verdict']}: {short_reason(outcome['reason'])}"


def _numbers(rows: Iterable[Row], columns: Iterable[Verdict]) -> list[int]:
    found = Counter(row[DEFAULTS]["verdict"] for row in rows)
    return [found[each.value] for each in columns]
