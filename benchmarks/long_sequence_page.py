"""The picture and the table of docs/benchmarks.md that the record `long_sequence` has."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

PICTURE = Path(__file__).parents[1] / "docs" / "images" / "long-sequence.png"
MEMORY, HOST = "Slipstream", "Slipstream, context on the host"
COLOURS = {
    "transformers": "#999999",
    "transformers, checkpointing": "#c4473a",
    "transformers, save_on_cpu": "#d99a2b",
    MEMORY: "#2f6db5",
    HOST: "#3f8f4f",
}
_SIZES = [digit * 10**power for power in range(5) for digit in (1, 2, 5)]  # MB
Row = dict[str, Any]


def megabytes(size: float) -> str:
    return f"{size / 1e6:,.0f} MB"


def of_contenders(rows: Sequence[Row]) -> dict[str, dict[int, Row]]:
    """Returns the rows by contender and tokens."""
    found: dict[str, dict[int, Row]] = {}
    for row in rows:
        found.setdefault(row["contender"], {})[row["tokens"]] = row
    return found


def table(record: Row) -> str:
    """Returns the memory and seconds of a step, by contender and length, as Markdown."""
    lengths = sorted({row["tokens"] for row in record["rows"]})
    lines = [
        " | ".join(["| tokens", *(f"{length:,}" for length in lengths)]) + " |",
        "| --- " * (1 + len(lengths)) + "|",
    ]
    for name, found in of_contenders(record["rows"]).items():
        lines.append(" | ".join([f"| {name}", *(cell(found.get(length)) for length in lengths)]) + " |")
    return "\n".join(lines) + "\n"


def text(record: Row) -> str:
    """Returns the picture and the table, as Markdown."""
    return f"![Memory over the length of the sequence](images/{PICTURE.name})\n\n{table(record)}"


def cell(row: Row | None) -> str:
    if row is None:
        return ""
    return str(row["not run"]) if "not run" in row else f"{megabytes(row['bytes'])}, {row['seconds']:.1f} s"


def draw(record: Row, path: Path) -> None:
    """Draws memory over length."""
    # heavy, and the records are listed without it
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import NullLocator

    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    lengths = sorted({row["tokens"] for row in record["rows"]})
    for name, found in of_contenders(record["rows"]).items():
        points = [(length, row["bytes"] / 1e6) for length, row in found.items() if "bytes" in row]
        if points:
            axes.plot(*zip(*points, strict=True), label=name, color=COLOURS[name], marker="o", markersize=4)
    axes.set(xscale="log", yscale="log", xlabel="tokens of the sequence", ylabel="MB that a step takes")
    axes.set_xticks(lengths, [f"{length:,}" for length in lengths])
    lowest, highest = axes.get_ylim()
    sizes = [each for each in _SIZES if lowest <= each <= highest]
    axes.set_yticks(sizes, [f"{each:,}" for each in sizes])
    axes.yaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_minor_locator(NullLocator())
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=150)
