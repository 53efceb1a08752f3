"""The tables of docs/gpipe-tables.md, from the recorded results: `python -m benchmarks.gpipe.page` writes them."""

from __future__ import annotations

import argparse
import json
import re
from typing import Any

from benchmarks.gpipe.breakdown import PARTS
from benchmarks.gpipe.memory_fit import NAMES, peak
from benchmarks.harness import RESULTS
from benchmarks.papers.page import MARK, ROOT, table
from benchmarks.papers.tables import read

PAGE = ROOT / "docs" / "gpipe-tables.md"
BEST = "exact, for a flush"
MISSING = "Not recorded yet.\n"
Row = dict[str, Any]


def is_recorded(name: str) -> bool:
    return (RESULTS / f"gpipe_{name}.json").exists()


def load(name: str) -> Row:
    report: Row = json.loads((RESULTS / f"gpipe_{name}.json").read_text())
    return report


def memory_rows(rows: list[Row]) -> str:
    """Returns the table of bytes on the fullest rank, for 32 layers."""
    chosen = [row for row in rows if row["L"] == 32 and row["M"] in (1, 4, 16)]
    grid = dict.fromkeys((row["K"], row["M"]) for row in chosen)
    by = {(row["K"], row["M"], row["recompute"]): peak(row) / 2**20 for row in chosen}
    return table(
        "K | M | " + " | ".join(f"{name}, MiB" for name in NAMES.values()),
        ([k, m, *(f"{by[k, m, recompute]:.1f}" for recompute in NAMES)] for k, m in grid),
    )


def fit_rows(fits: Row) -> str:
    return table(
        "way | fitted bytes | peaks | mean error | worst",
        (
            [
                NAMES[recompute],
                " + ".join(f"{size:,.0f} {name}" for name, size in found["bytes"].items()),
                found["rows"],
                f"{found['mean error']:.1%}",
                f"{found['worst error']:.1%}",
            ]
            for recompute, found in fits.items()
        ),
    )


def millions(text: str) -> float:
    """Parses 82M or 1.05B."""
    return float(text[:-1]) * {"M": 1, "B": 1000}[text[-1]]


def model_size_rows(reports: dict[str, Row]) -> str:
    paper = {(row["model"], row["pipeline"]): row for row in read("gpipe_table1_max_model")}
    lines = []
    for family, report in reports.items():
        first = paper[family, "naive-1"]
        for row in report["rows"]:
            theirs = paper.get((family, row["scenario"].removeprefix("pipeline-")))
            growth = "" if theirs is None else f"{millions(theirs['params']) / millions(first['params']):.1f}"
            lines.append(
                [
                    family,
                    row["scenario"],
                    "" if theirs is None else f"{theirs['config'].removesuffix(' layers')}, {theirs['params']}",
                    growth,
                    f"{row['config']}, {row['parameters'] / 1e6:.1f}M",
                    f"{row['parameters'] / report['rows'][0]['parameters']:.1f}",
                    f"{row['parameter bytes'] / 2**20:.0f}",
                    f"{row['activation bytes'] / 2**20:.0f}",
                    ", ".join(f"{size / 2**20:.0f}" for size in row["peak bytes"]),
                ]
            )
    return table(
        "family | scenario | paper: largest | over naive-1 | here: largest | over naive-1 | parameters, MiB | "
        "activations, MiB | peak of every rank, MiB",
        lines,
    )


def layer_rows(layers: dict[str, Row]) -> str:
    return table(
        "model | layers | parameters | forward, s | backward, s | Gflop/s | most expensive layer, share",
        (
            [
                name,
                found["number"],
                f"{found['parameters'] / 1e6:.0f}M",
                f"{found['forward seconds']:.2f}",
                f"{found['backward seconds']:.2f}",
                f"{found['Gflops a second']:.0f}",
                f"{found['dearest']}, {found['its share']:.1%}",
            ]
            for name, found in layers.items()
        ),
    )


def balance_rows(rows: list[Row]) -> str:
    return table(
        "model | K | way | forward and backward | forward | backward",
        ([r["model"], r["K"], r["split"], *(f"{r[x]:.3f}" for x in ("both", "forward", "backward"))] for r in rows),
    )


def throughput_rows(rows: list[Row], paper_table: str) -> str:
    by = {(r["model"], r["K"], r["M"], r["recompute"], r["split"]): r for r in rows}

    def line(paper: dict[str, str]) -> list[str]:
        model, k, m = paper["model"], int(paper["K"]), int(paper["M"])
        none, late, early = (by[model, k, m, way, BEST] for way in ("none", "with each backward", "as early as it can"))
        greedy = by[model, k, m, "none", "variance, greedy"]
        normalised = [f"{row['normalised']:.2f}" for row in (none, late, early, greedy)]
        over_one = [f"{row['over one']:.2f}" for row in (none, late, early)]
        return [model, str(k), str(m), paper["throughput"], *normalised, *over_one]

    return table(
        "model | K | M | paper | nothing recomputed | with each backward | early | nothing, greedy | over one device: "
        "nothing | with each backward | early",
        (line(row) for row in read(paper_table)),
    )


def process_rows(rows: list[Row]) -> str:
    return table(
        "model | recompute | M | measured, s | simulated, s | error | measured, normalised | simulated, normalised",
        (
            [
                row["model"],
                row["recompute"],
                row["M"],
                f"{row['measured seconds']:.3f}",
                f"{row['simulated seconds']:.3f}",
                f"{row['simulated seconds'] / row['measured seconds'] - 1:+.1%}",
                f"{row['measured']:.2f}",
                f"{row['simulated']:.2f}",
            ]
            for row in rows
        ),
    )


def breakdown_rows(rows: list[Row]) -> str:
    return table(
        "model | recompute | M | step, s | " + " | ".join(PARTS) + " | (K-1)/(M+K-1)",
        (
            [
                row["model"],
                row["recompute"],
                row["M"],
                f"{row['seconds']['step']:.3f}",
                *(f"{row['seconds'][part] / row['seconds']['step']:.1%}" for part in PARTS),
                f"{row['(K-1)/(M+K-1)']:.1%}",
            ]
            for row in rows
        ),
    )


def peer_rows(rows: list[Row]) -> str:
    return table(
        "schedule | ours, s | theirs, s | pairs | ratio | 95% interval",
        (
            [
                row["schedule"],
                f"{row['ours']:.3f}",
                f"{row['theirs']:.3f}",
                len(row["all"]),
                f"{row['ratio']:.4f}",
                " to ".join(f"{end:.4f}" for end in row["interval"]),
            ]
            for row in rows
        ),
    )


def families() -> dict[str, Row]:
    """Returns the records of Table 1 that exist, by family."""
    names = {family: f"memory_{family.lower().replace('-', '_')}" for family in ("AmoebaNet-D", "Transformer-L")}
    return {family: load(name) for family, name in names.items() if is_recorded(name)}


def tables() -> dict[str, str]:
    """Returns the tables by their marks on the page."""
    formula, throughput = load("memory_formula"), load("throughput")
    return {
        "activations": memory_rows(formula["rows"]),
        "fits": fit_rows(formula["fits"]),
        "largest models": model_size_rows(families()),
        "layers": layer_rows(throughput["layers"]),
        "balance": balance_rows(throughput["balance"]),
        "table 2": throughput_rows(throughput["table 2"], "gpipe_table2_throughput"),
        "table 3": throughput_rows(throughput["table 3"], "gpipe_table3_pcie"),
        "two processes": process_rows(throughput["two processes"]) if "two processes" in throughput else MISSING,
        "breakdown": breakdown_rows(load("breakdown")["rows"]) if is_recorded("breakdown") else MISSING,
        "peers": peer_rows(load("peers")["rows"]) if is_recorded("peers") else MISSING,
    }


def main() -> None:
    argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0]).parse_args()
    text = PAGE.read_text(encoding="utf-8")
    for name, content in tables().items():
        mark = MARK.format(name)
        text, found = re.subn(
            re.escape(mark) + rf"(\|.*\n|{re.escape(MISSING)})*", lambda _, new=mark + content: new, text
        )
        assert found == 1, f"{PAGE} has no mark {mark!r}"
    PAGE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
