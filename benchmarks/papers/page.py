"""The tables of docs/papers.md, from the recorded results: `python -m benchmarks.papers.page` writes them in place."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterable
from itertools import groupby
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "papers.md"
MARK = "<!-- {} -->\n"


def table(header: str, rows: Iterable[Iterable[object]]) -> str:
    names = header.split(" | ")
    lines = [f"| {header} |", "|" + " --- |" * len(names)]
    return "\n".join([*lines, *(f"| {' | '.join(map(str, row))} |" for row in rows)]) + "\n"


def slices(lengths: list[int]) -> str:
    """Writes slice lengths in runs: 64x26 + 56x6 + 48."""
    runs = [(length, len(list(group))) for length, group in groupby(lengths)]
    return " + ".join(f"{length}x{count}" if count > 1 else str(length) for length, count in runs)


def role(row: dict[str, Any]) -> str:
    return "fitted" if row["fitted"] else "**predicted**"


def terapipe_rows(rows: list[dict[str, Any]]) -> str:
    return table(
        "setting | slices | paper, s | model, s | error | row | our slices | model, s",
        (
            [
                f"({row['setting']})",
                slices(row["slices"]),
                f"{row['paper']:.3f}",
                f"{row['predicted']:.3f}",
                f"{row['error']:+.1%}",
                role(row),
                slices(row["our slices"]),
                f"{row['ours']:.3f}",
            ]
            for row in rows
        ),
    )


def megatron_rows(rows: list[dict[str, Any]]) -> str:
    return table(
        "parameters | paper, TFLOP/s | model | error | row | microbatch | stages a rank",
        (
            [
                f"{row['parameters'] / 1e9:.1f} B",
                f"{row['paper']:.0f}",
                f"{row['predicted']:.1f}",
                f"{row['error']:+.1%}",
                role(row),
                row["microbatch size"],
                row["stages a rank"],
            ]
            for row in rows
        ),
    )


def study_rows(studies: dict[str, dict[str, Any]]) -> str:
    def numbers(values: dict[str, Any]) -> str:
        return "; ".join(f"{name}: {number(value)}" for name, value in values.items())

    def number(value: Any) -> str:
        if isinstance(value, dict):
            return "(" + numbers(value) + ")"
        return ", ".join(map(number, value)) if isinstance(value, list) else f"{value:.3g}"

    rows = (
        (name, s["the paper says"], numbers(s["predicted"]), "yes" if s["holds"] else "**no**")
        for name, s in studies.items()
    )
    return table("study | the paper | predicted | agrees", rows)


def gpipe_rows(rows: list[dict[str, Any]]) -> str:
    base = {(row["model"], row["M"]): row for row in rows if row["K"] == 2}

    def scaled(row: dict[str, Any], key: str) -> str:
        return f"{row[key] / base[row['model'], row['M']][key]:.2f}"

    return table(
        "model | K | M | paper | model | error | paper, over K = 2 | model, over K = 2",
        (
            [
                row["model"],
                row["K"],
                row["M"],
                f"{row['paper']:.2f}",
                f"{row['predicted']:.2f}",
                f"{row['error']:+.1%}",
                scaled(row, "paper"),
                scaled(row, "predicted"),
            ]
            for row in rows
        ),
    )


def tables(report: dict[str, Any]) -> dict[str, str]:
    both = report["terapipe tables 2 and 3"]
    constants = {name: f"{value:.3g}" for name, value in both["constants"].items()}
    return {
        "terapipe constants": table(" | ".join(constants), [constants.values()]),
        "terapipe table 2": terapipe_rows([row for row in both["rows"] if row["table"] == 2]),
        "terapipe table 3": terapipe_rows([row for row in both["rows"] if row["table"] == 3]),
        "terapipe table 3 alone": terapipe_rows(report["terapipe table 3 alone"]),
        "megatron table 1": megatron_rows(report["megatron table 1"]["rows"]),
        "megatron studies": study_rows(report["megatron studies"]),
        "gpipe table 2": gpipe_rows(report["gpipe table 2"]["rows"]),
    }


def main() -> None:
    argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0]).parse_args()
    report = json.loads((ROOT / "benchmarks" / "results" / "papers.json").read_text())
    text = PAGE.read_text(encoding="utf-8")
    for name, content in tables(report).items():
        mark = MARK.format(name)
        text, found = re.subn(re.escape(mark) + r"(\|.*\n)*", lambda _, new=mark + content: new, text)
        assert found == 1, f"{PAGE} has no mark {mark!r}"
    PAGE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
