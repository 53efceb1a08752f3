"""The tables of docs/papers.md, from the recorded results: `python -m benchmarks.papers.page` writes them in place."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Iterable
from itertools import groupby
from pathlib import Path
from typing import Any

from benchmarks.papers.tables import errors

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
        "setting | slices | paper, s | model, s | error | fitted without it | row | our slices | model, s",
        (
            [
                f"({row['setting']})",
                slices(row["slices"]),
                f"{row['paper']:.3f}",
                f"{row['predicted']:.3f}",
                f"{row['error']:+.1%}",
                f"{row['error left out']:+.1%}",
                role(row),
                slices(row["our slices"]),
                f"{row['ours']:.3f}",
            ]
            for row in rows
        ),
    )


def batch_rows(rows: list[dict[str, Any]]) -> str:
    def microbatches(row: dict[str, Any]) -> str:
        runs = [(each, len(list(group))) for each, group in groupby(row["microbatches"])]
        return ", ".join(f"{count} x ({size}, {slices(lengths)})" for (size, lengths), count in runs)

    return table(
        "setting | paper's slices, s | whole sequences, s | batch sizes free, s | microbatches",
        (
            [
                f"({row['setting']})",
                *(f"{row[name]:.3f}" for name in ("paper's", "whole sequences", "free")),
                microbatches(row),
            ]
            for row in rows
        ),
    )


def summary_rows(report: dict[str, Any]) -> str:
    both, megatron = report["terapipe tables 2 and 3"], report["megatron table 1"]
    of_gpipe, gpipe = [report["gpipe table 2"][name] for name in MODELS], report["gpipe table 2"]["rows"]
    rows: list[tuple[str, str, str, list[dict[str, float]]]] = [
        ("TeraPipe 2, all 20 rows", "5 constants, shared with Table 3", "rows with equal slices", [both["table 2"]]),
        (
            "the same, each setting left out",
            "5 constants",
            "the other nine settings",
            [both["table 2, settings left out"]],
        ),
        ("TeraPipe 2, the 6 rows with unequal slices", "", "none of them", [both["table 2, rows not fitted"]]),
        ("TeraPipe 3, all 13 rows", "the same 5 constants", "rows with equal slices", [both["table 3"]]),
        (
            "the same, each setting left out",
            "5 constants",
            "the other nine settings",
            [both["table 3, settings left out"]],
        ),
        ("Megatron 1", "2 constants", "3 of 10 rows", [megatron]),
        ("Megatron 2, PTD-P", "nothing", "", [report["megatron table 2"]["errors"]["ptdp"]]),
        ("GPipe 2, two models", "nothing", "", of_gpipe),
        *(
            (f"the same, over {name}", "nothing", "", [ratio_errors(gpipe, model, same) for model in MODELS])
            for name, same in (("K = 2 at the same M", over_k), ("M = 4 at the same K, for M = 32", over_m))
        ),
    ]
    return table(
        "table | fitted | on | mean error | worst",
        (
            [name, what, on, *(" and ".join(f"{each[key]:.1%}" for each in found) for key in ("mean", "worst"))]
            for name, what, on, found in rows
        ),
    )


def megatron_rows(rows: list[dict[str, Any]]) -> str:
    return table(
        "parameters | paper, TFLOP/s | model | error | row | microbatch | fitting | stages a rank | memory, GB",
        (
            [
                f"{row['parameters'] / 1e9:.1f} B",
                f"{row['paper']:.0f}",
                f"{row['predicted']:.1f}",
                f"{row['error']:+.1%}",
                role(row),
                row["microbatch size"],
                ", ".join(map(str, row["microbatch sizes that fit"])) if row["fits"] else "none",
                row["stages a rank"],
                f"{row['peak bytes'] / 1e9:.1f}" if row["fits"] else f"**{row['peak bytes'] / 1e9:.1f}**",
            ]
            for row in rows
        ),
    )


def study_rows(studies: list[dict[str, Any]]) -> str:
    def numbers(values: dict[str, Any]) -> str:
        return "; ".join(f"{name}: {number(value)}" for name, value in values.items())

    def number(value: Any) -> str:
        return f"({numbers(value)})" if isinstance(value, dict) else f"{value:.3g}"

    ordered = sorted(studies, key=_number)
    rows = (
        (s["figure"], s["the paper says"], numbers(s["predicted"]), "yes" if s["holds"] else "**no**") for s in ordered
    )
    return table("figure | the paper | predicted | agrees", rows)


def memory_rows(figures: list[dict[str, Any]]) -> str:
    return table(
        "figure | configurations | most, GB | too large for 80 GB",
        (
            [
                each["figure"],
                each["number"],
                f"{each['most bytes'] / 1e9:.1f}",
                "; ".join(f"{run['run']}: **{run['bytes'] / 1e9:.1f}**" for run in each["too large"]) or "none",
            ]
            for each in sorted(figures, key=_number)
        ),
    )


def _number(row: dict[str, Any]) -> int:
    return int(row["figure"].partition(",")[0])


MODELS = ("AmoebaNet-D(18 256)", "Transformer-48")


def over_k(row: dict[str, Any]) -> tuple[int, int] | None:
    """Returns the K and M of the row over which one is taken, whose stages differ; None for none."""
    return (2, row["M"]) if row["K"] > 2 else None


def over_m(row: dict[str, Any]) -> tuple[int, int] | None:
    """Returns the same of one with the same stages."""
    return (row["K"], 4) if row["M"] == 32 else None


Base = Callable[[dict[str, Any]], tuple[int, int] | None]


def ratios(rows: list[dict[str, Any]], row: dict[str, Any], base: Base) -> tuple[float, float] | None:
    """Returns a row's throughput over another one of its model: the paper's, and the predicted one."""
    of = [each for each in rows if each["model"] == row["model"] and (each["K"], each["M"]) == base(row)]
    return (row["paper"] / of[0]["paper"], row["predicted"] / of[0]["predicted"]) if of else None


def ratio_errors(rows: list[dict[str, Any]], model: str, base: Base) -> dict[str, float]:
    found = [found for row in rows if row["model"] == model and (found := ratios(rows, row, base))]
    return errors([{"error": predicted / paper - 1} for paper, predicted in found])


def gpipe_rows(rows: list[dict[str, Any]]) -> str:
    def scaled(row: dict[str, Any], base: Base) -> list[str]:
        return [f"{each:.2f}" for each in ratios(rows, row, base) or ()] or ["", ""]

    return table(
        "model | K | M | paper | model | error | paper, over K = 2 | model, over K = 2 | paper, over M = 4 | "
        "model, over M = 4",
        (
            [
                row["model"],
                row["K"],
                row["M"],
                f"{row['paper']:.2f}",
                f"{row['predicted']:.2f}",
                f"{row['error']:+.1%}",
                *scaled(row, over_k),
                *scaled(row, over_m),
            ]
            for row in rows
        ),
    )


WAYS = {
    "as described": "as described",
    "fitted": "with a factor of its half of the sources",
    "judged": "with one of the other half",
}


def step_rows(groups: dict[str, Any]) -> str:
    def errors(group: dict[str, Any], way: str) -> str:
        found = group.get(way)
        if found is None:
            return ""
        fewer = f", {found['rows']} rows" if found["rows"] < group["rows"] else ""
        return f"{found['mean']:.1%} ({found['bias']:+.1%}{fewer})"

    rows = ([name, group["rows"], *(errors(group, way) for way in WAYS)] for name, group in groups.items())
    return table(f"rows of | number | {' | '.join(WAYS.values())}", rows)


def allocated_rows(stages: list[dict[str, Any]]) -> str:
    """Writes a row for each run, with its stages' peaks and the account's errors."""
    runs = [list(group) for _, group in groupby(stages, lambda stage: stage["id"])]
    return table(
        "model | tokens | slices | allocated by stage, GB | error of the account",
        (
            [
                run[0]["model"].removesuffix(" (Seq1F1B)"),
                run[0]["tokens"],
                run[0]["slices"],
                ", ".join(f"{stage['measured'] / 1e9:.1f}" for stage in run),
                ", ".join(f"{stage['error']:+.1%}" for stage in run),
            ]
            for run in runs
        ),
    )


def peak_rows(rows: list[dict[str, Any]]) -> str:
    return table(
        "source | model | GPUs | tp | pp | cp | published, GB | account, GB | error",
        (
            [
                *(row["source"], row["model"], row["gpus"], row["tp"], row["pp"], row["cp"]),
                f"{row['measured'] / 1e9:.1f}",
                f"{row['predicted'] / 1e9:.1f}",
                f"{row['error']:+.1%}",
            ]
            for row in rows
        ),
    )


def practice_rows(rows: list[dict[str, Any]]) -> str:
    def plan(found: dict[str, Any]) -> str:
        return f"{found['plan']}: {found['seconds']:.2f} s, {found['bytes'] / 1e9:.0f} GB"

    return table(
        "model | H100 | sequences | with the degrees of | best with these | best without offloading | best of all | "
        "longer by",
        (
            [
                row["model"],
                row["devices"],
                row["sequences"],
                row["whose"],
                *(plan(row[which]) for which in ("practice", "on devices", "best")),
                " and ".join(f"{row[f'{which} over best'] - 1:.1%}" for which in ("practice", "on devices")),
            ]
            for row in rows
        ),
    )


def tables(report: dict[str, Any], steps: dict[str, Any], practice: dict[str, Any]) -> dict[str, str]:
    """Returns the tables by their marks on the page."""
    both, figures = report["terapipe tables 2 and 3"], report["megatron figures"]
    constants = {name: f"{value:.3g}" for name, value in both["constants"].items()}
    return {
        "summary": summary_rows(report),
        "terapipe constants": table(" | ".join(constants), [constants.values()]),
        "terapipe table 2": terapipe_rows([row for row in both["rows"] if row["table"] == 2]),
        "terapipe table 3": terapipe_rows([row for row in both["rows"] if row["table"] == 3]),
        "terapipe batch": batch_rows(report["terapipe table 2, batch sizes free"]),
        "megatron table 1": megatron_rows(report["megatron table 1"]["rows"]),
        "megatron studies": study_rows(figures["rows"]),
        "megatron memory": memory_rows(figures["memory"]),
        "gpipe table 2": gpipe_rows(report["gpipe table 2"]["rows"]),
        "measured steps": step_rows(steps["groups"]),
        "measured memory": allocated_rows(steps["allocated"]),
        "published peaks": peak_rows(steps["peaks"]),
        "practice": practice_rows(practice["rows"]),
        "measured factors": table(
            "device and bits | half of the sources | rows | factor",
            (
                [f"{each['device']}, {each['bits']} bits", each["half"] + 1, each["rows"], f"{each['factor']:.2f}"]
                for each in steps["factors"]
            ),
        ),
        "measured not expressed": table("why | rows", steps["not expressed"].items()),
        "measured 405b": table("stages a rank | recompute | seconds | GB | fits", map(meta_row, steps["llama 3 405b"])),
    }


def meta_row(row: dict[str, Any]) -> tuple[str, ...]:
    seconds, memory = f"{row['seconds']:.2f} ({row['error']:+.1%})", f"{row['bytes'] / 1e9:.1f}"
    return str(row["stages a rank"]), row["recompute"], seconds, memory, "yes" if row["fits"] else "no"


def main() -> None:
    argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0]).parse_args()
    records = [
        json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())
        for name in ("papers", "measured_steps", "practice")
    ]
    text = PAGE.read_text(encoding="utf-8")
    for name, content in tables(*records).items():
        mark = MARK.format(name)
        text, found = re.subn(re.escape(mark) + r"(\|.*\n)*", lambda _, new=mark + content: new, text)
        assert found == 1, f"{PAGE} has no mark {mark!r}"
    PAGE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
