"""Fits GPipe's section 2.3 to measured peaks of activations, and draws both."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.ticker import NullLocator

PICTURE = Path(__file__).parents[2] / "docs" / "images" / "gpipe-memory.png"
Row = dict[str, Any]
# The terms whose bytes are fitted. Without re-materialization a rank keeps its layers' activations of all rows, and
# messages in flight; with it what enters it of all rows, and its layers' activations of one microbatch.
TERMS: dict[str, dict[str, Callable[[Row], float]]] = {
    "none": {"N L/K": lambda row: row["N"] * row["L"] / row["K"], "N/M": lambda row: row["N"] / row["M"]},
    "stage": {
        "N": lambda row: row["N"],
        "L/K N/M": lambda row: row["L"] / row["K"] * row["N"] / row["M"],
        "N/M": lambda row: row["N"] / row["M"],
    },
}
COLOURS = {"none": "#c4473a", "stage": "#2f6db5", "segments": "#3f8f4f"}
NAMES = {"none": "nothing recomputed", "stage": "re-materialised", "segments": "in segments (PTD-P 3.5)"}


def peak(row: Row) -> int:
    """Returns the activations of the rank that holds most."""
    return max(row["activations"])


def fit(rows: Sequence[Row]) -> dict[str, Any]:
    """Fits the bytes of each term by least squares of the relative error, over K > 1.

    One rank alone keeps no incoming rows, as the batch belongs to the caller.
    """
    found = {}
    for recompute, terms in TERMS.items():
        chosen = [row for row in rows if row["recompute"] == recompute and row["K"] > 1]
        measured = np.array([peak(row) for row in chosen], float)
        sizes = np.array([[term(row) for term in terms.values()] for row in chosen])
        bytes_each, *_ = np.linalg.lstsq(sizes / measured[:, None], np.ones(len(chosen)), rcond=None)
        errors = np.abs(sizes @ bytes_each / measured - 1)
        found[recompute] = {
            "bytes": dict(zip(terms, map(float, bytes_each), strict=True)),
            "mean error": float(errors.mean()),
            "worst error": float(errors.max()),
            "rows": len(chosen),
        }
    return found


def fitted(row: Row, fits: dict[str, Any]) -> float:
    terms = TERMS[row["recompute"]]
    return sum(size * terms[name](row) for name, size in fits[row["recompute"]]["bytes"].items())


def draw(rows: Sequence[Row], fits: dict[str, Any], path: Path) -> None:
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    _over_microbatches(left, rows, fits)
    _measured_and_fitted(right, rows, fits)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)


def _over_microbatches(axes: Any, rows: Sequence[Row], fits: dict[str, Any]) -> None:
    for recompute, name in NAMES.items():
        chosen = [row for row in rows if row["recompute"] == recompute and row["K"] == 2 and row["L"] == 32]
        style = {"color": COLOURS[recompute], "marker": "o", "markersize": 4}
        axes.plot([row["M"] for row in chosen], [peak(row) / 2**20 for row in chosen], label=name, **style)
    axes.set(xscale="log", yscale="log", xlabel="microbatches M, of the same 64 rows", ylabel="MiB on the fullest rank")
    axes.set_xticks([1, 2, 4, 8, 16], ["1", "2", "4", "8", "16"])
    _label(axes.yaxis)
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_title("32 layers on 2 ranks: peak activations", fontsize=10)
    axes.legend(frameon=False, fontsize=8)


def _measured_and_fitted(axes: Any, rows: Sequence[Row], fits: dict[str, Any]) -> None:
    for recompute, label in (("none", "O(N L/K)"), ("stage", "O(N + L/K N/M)")):
        chosen = [row for row in rows if row["recompute"] == recompute and row["K"] > 1]
        measured = [peak(row) / 2**20 for row in chosen]
        axes.scatter(
            [fitted(row, fits) / 2**20 for row in chosen], measured, s=14, color=COLOURS[recompute], label=label
        )
    ends = axes.get_xlim()
    axes.plot(ends, ends, color="#999999", linewidth=0.8, zorder=0)
    axes.set(xscale="log", yscale="log", xlabel="fitted, MiB", ylabel="measured, MiB")
    _label(axes.xaxis)
    _label(axes.yaxis)
    axes.set_title("K of 2 and 4, M of 1 to 16, L of 8 to 32", fontsize=10)
    axes.legend(frameon=False, fontsize=8)


def _label(axis: Any) -> None:
    sizes = (2, 5, 10, 20, 50)
    axis.set_ticks(sizes, [str(size) for size in sizes])
    axis.set_minor_locator(NullLocator())
