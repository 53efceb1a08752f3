"""The tables of docs/zero3.md, written from the records `zero3` and `papers`: `python -m benchmarks.zero3 --page`."""

from __future__ import annotations

import json
import re
from typing import Any

from benchmarks.papers.page import MARK, ROOT, table

PAGE = ROOT / "docs" / "zero3.md"
NAMES = {"zero3": "ZeRO-3", "ptdp": "PTD-P"}


def measured(rows: list[dict[str, Any]]) -> str:
    return table(
        "processes | sequences | system | MB a step, counted | by formula | seconds",
        (
            [
                row["processes"],
                f"{row['sequences']} x {row['tokens']}",
                name,
                f"{found['bytes'] / 1e6:.1f}",
                f"{found['formula'] / 1e6:.1f}",
                "more processes than cores" if row["more processes than cores"] else f"{row['medians'][name]:.3f}",
            ]
            for row in rows
            for name, found in row["bytes"].items()
        ),
    )


def throughputs(rows: list[dict[str, Any]]) -> str:
    return table(
        "system | parameters | GPUs | batch | microbatch | paper, TFLOP/s | model | error | GB out of a node",
        (
            [
                NAMES[row["scheme"]],
                f"{row['parameters'] / 1e9:.1f} B",
                row["gpus"],
                row["batch"],
                row["microbatch"],
                f"{row['paper']:.0f}",
                f"{row['predicted']:.1f}",
                f"{row['error']:+.1%}",
                f"{row['out of a node'] / 1e9:.0f}",
            ]
            for row in rows
        ),
    )


def seconds(rows: list[dict[str, Any]]) -> str:
    return table(
        "parameters | GPUs | compute, s | network, s | all overlaps | paper, s | nothing overlaps | all cards",
        (
            [
                f"{row['parameters'] / 1e9:.1f} B",
                row["gpus"],
                f"{row['compute']:.1f}",
                f"{row['network']:.1f}",
                f"{row['seconds']:.1f}",
                f"{row['paper seconds']:.1f}",
                f"{row['seconds without overlap']:.1f}",
                f"{row['seconds with all cards']:.1f}",
            ]
            for row in rows
            if row["scheme"] == "zero3"
        ),
    )


def tables(report: dict[str, Any]) -> dict[str, str]:
    """Returns the tables by their marks on the page."""
    rows = json.loads((ROOT / "benchmarks/results/papers.json").read_text())["megatron table 2"]["rows"]
    return {"measured": measured(report["rows"]), "table 2": throughputs(rows), "zero3 seconds": seconds(rows)}


def write_page(report: dict[str, Any]) -> None:
    text = PAGE.read_text(encoding="utf-8")
    for name, content in tables(report).items():
        mark = MARK.format(name)
        text, found = re.subn(re.escape(mark) + r"(\|.*\n)*", lambda _, new=mark + content: new, text)
        assert found == 1, f"{PAGE} has no mark {mark!r}"
    PAGE.write_text(text, encoding="utf-8")
