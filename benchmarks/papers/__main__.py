"""Predicts every row of the papers' tables, prints and records them: `python -m benchmarks.papers`."""

from __future__ import annotations

import argparse
import gc
from typing import Any

from benchmarks.harness import write
from benchmarks.papers import gpipe, megatron, terapipe, zero3
from benchmarks.papers.megatron_studies import studies

OTHER_ROWS = ((0, 4, 9), (0, 3, 9), (2, 6, 8))  # to show how little the choice of the fitted rows matters


def show(title: str, rows: list[dict[str, Any]], names: tuple[str, ...]) -> None:
    print(f"\n{title}")
    for row in rows:
        labels = "  ".join(f"{len(row[name]) if name == 'slices' else row[name]!s:>16}" for name in names)
        left_out = f"  fitted without it {row['error left out']:+7.1%}" if "left out" in row else ""
        print(f"{labels}  paper {row['paper']:8.3f}  predicted {row['predicted']:8.3f}  {row['error']:+7.1%}{left_out}")


def main() -> None:
    argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0]).parse_args()
    gc.disable()  # schedules are millions of tuples, none of them in a cycle
    slices: Any = terapipe.table_2_and_3()
    show("TeraPipe Tables 2 and 3, one set of constants", slices["rows"], ("table", "setting", "slices", "fitted"))
    print({key: value for key, value in slices.items() if key not in ("rows", "constants without a setting")})
    sums = terapipe.batch_sums(terapipe.Constants(**slices["constants"]))
    throughput: Any = megatron.table_1()
    show("Megatron Table 1", throughput["rows"], ("microbatch size", "stages a rank", "fitted", "fits"))
    print({key: value for key, value in throughput.items() if key != "rows"})
    figures = studies()
    for study in figures["rows"]:
        print(f"figure {study['figure']}: {study['the paper says']}: {'yes' if study['holds'] else 'no'}")
    against_zero3: Any = zero3.table_2()
    show("Megatron Table 2", against_zero3["rows"], ("scheme", "gpus", "batch"))
    normalised: Any = gpipe.table_2()
    show("GPipe Table 2", normalised["rows"], ("model", "K", "M"))
    others = {str(rows): megatron.table_1(rows) for rows in OTHER_ROWS}
    report = {
        "terapipe tables 2 and 3": slices,
        "terapipe table 2, batch sizes free": sums,
        "megatron table 1": throughput,
        "megatron table 1, fitted on other rows": {
            rows: {key: found[key] for key in ("constants", "mean", "worst")} for rows, found in others.items()
        },
        "megatron figures": figures,
        "megatron table 2": against_zero3,
        "gpipe table 2": normalised,
    }
    print(f"wrote {write('papers', report)}")


if __name__ == "__main__":
    main()
