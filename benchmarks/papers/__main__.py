"""Predicts every row of the papers' tables, prints and records them: `python -m benchmarks.papers`."""

from __future__ import annotations

import argparse
from typing import Any

from benchmarks.harness import write
from benchmarks.papers import gpipe, megatron, terapipe

OTHER_ROWS = ((0, 4, 9), (0, 3, 9), (2, 6, 8))  # to show how little the choice of the fitted rows matters


def show(title: str, rows: list[dict[str, Any]], names: tuple[str, ...]) -> None:
    print(f"\n{title}")
    for row in rows:
        labels = "  ".join(f"{len(row[name]) if name == 'slices' else row[name]!s:>16}" for name in names)
        ours = f"  our slices {row['ours']:8.3f}" if "ours" in row else ""
        print(f"{labels}  paper {row['paper']:8.3f}  predicted {row['predicted']:8.3f}  {row['error']:+7.1%}{ours}")


def main() -> None:
    argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0]).parse_args()
    slices: Any = terapipe.table_2_and_3()
    alone: Any = terapipe.table_3()
    throughput: Any = megatron.table_1()
    studies: Any = megatron.studies()
    normalised: Any = gpipe.table_2()
    show("TeraPipe Tables 2 and 3, one set of constants", slices["rows"], ("table", "setting", "slices", "fitted"))
    print({key: value for key, value in slices.items() if key != "rows"})
    show("TeraPipe Table 3, three coefficients a setting", alone, ("setting", "slices", "fitted"))
    show("Megatron Table 1", throughput["rows"], ("microbatch size", "stages a rank", "fitted"))
    print({key: value for key, value in throughput.items() if key != "rows"})
    for name, study in studies.items():
        print(f"{name}: {study['the paper says']}: {'yes' if study['holds'] else 'no'}")
    show("GPipe Table 2", normalised["rows"], ("model", "K", "M"))
    others = {str(rows): megatron.table_1(rows) for rows in OTHER_ROWS}
    report = {
        "terapipe tables 2 and 3": slices,
        "terapipe table 3 alone": alone,
        "megatron table 1": throughput,
        "megatron table 1, fitted on other rows": {
            rows: {key: found[key] for key in ("constants", "mean", "worst")} for rows, found in others.items()
        },
        "megatron studies": studies,
        "gpipe table 2": normalised,
    }
    print(f"wrote {write('papers', report)}")


if __name__ == "__main__":
    main()
