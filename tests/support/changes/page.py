"""Writes the tables of docs/own-models.md from the changes: `PYTHONPATH=tests python -m support.changes.page`."""

from __future__ import annotations

from collections.abc import Iterator

from support.changes import CHANGES, GROUPS, REFUSED, Change
from support.paths import ROOT

PAGE = ROOT / "docs" / "own-models.md"
BEGIN, END = "<!-- the tables: from tests/support/changes -->\n", "<!-- the end of the tables -->\n"
COLUMNS = {"sliced": "one rank, slices", "stages": "several ranks, slices", "microbatches": "several ranks, `slices=1`"}
BESIDES = {"halves": "stages that end inside that layer", "spread": "a spread vocabulary"}


def tables() -> str:
    """Returns a table of each group of changes."""
    return "\n".join(line for title in GROUPS.values() for line in _table(title))


def page() -> str:
    """Returns the page as the changes are now; what is written around the tables stays."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    return before + BEGIN + tables() + "\n" + END + rest.partition(END)[2]


def _table(title: str) -> Iterator[str]:
    yield from (f"### {title}", "", f"| what you do | {' | '.join(COLUMNS.values())} | refused besides with |")
    yield "| --- " * (len(COLUMNS) + 2) + "|"
    for change in CHANGES.values():
        if change.group == title:
            yield f"| {change.does} | {' | '.join(change.outcome(use) for use in COLUMNS)} | {_besides(change)} |"
    yield ""


def _besides(change: Change) -> str:
    """What is refused although several ranks with slices are exact."""
    if change.outcome("stages") == REFUSED:
        return ""
    return ", ".join(text for use, text in BESIDES.items() if change.outcome(use) == REFUSED)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
