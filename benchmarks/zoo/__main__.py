"""Which causal language models of transformers train exactly in token slices, and why the others are refused.

    python -m benchmarks.zoo                # what is not in results/zoo.json yet; then writes the tables of the docs
    python -m benchmarks.zoo falcon bloom   # tries these, and prints what it finds
    python -m benchmarks.zoo --page         # writes the tables of the docs from the record

Every architecture runs at toy size with random weights: its default configuration, and variants with what else it
offers. It can be stopped at any time, and goes on where it was. What earlier sources gave stays until it is tried
again.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from dataclasses import asdict
from typing import Any

import torch

from benchmarks.harness import destination, setting, write
from benchmarks.records import RESULTS, provenance
from benchmarks.zoo.attempts import try_defaults, try_variants
from benchmarks.zoo.families import architectures, class_name, kind_of
from benchmarks.zoo.outcomes import DEFAULTS, VARIANTS, Outcome, Verdict
from benchmarks.zoo.page import write_pages
from benchmarks.zoo.workers import Limits, Result, run_forked

NAME = "zoo"
LIMITS = Limits(seconds=60, memory=6 << 30)
EXACT = Verdict.EXACT.value
Row = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="ARCHITECTURE", help="as transformers' model_type; by default all")
    parser.add_argument("--defaults", action="store_true", help="try default configurations only, no variants")
    parser.add_argument("--page", action="store_true", help="write the tables of the docs from the record and end")
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)), help="by default one a core")
    options = parser.parse_args()
    if unknown := set(options.names) - set(architectures()):
        parser.error(f"transformers has no causal language model {min(unknown)!r}")
    if not options.page:
        sweep(options)
    if options.page or not options.names:
        print("wrote", *write_pages(NAME))


def sweep(options: argparse.Namespace) -> None:
    """Tries architectures, first the defaults of all, and keeps the rows in the record as they come."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # children end with it
    torch.set_num_threads(1)
    rows, now = {} if options.names else recorded_rows(), provenance(NAME)["sha256"]
    names = untried(options.names or architectures(), rows, now)
    for result in run_forked(names, try_defaults, options.processes, LIMITS):
        found, name = outcomes_of(result, DEFAULTS)[0], result.task
        rows[name] = {"kind": kind_of(name).value, "class": class_name(name), "sources": now, DEFAULTS: found}
        keep(rows, name, [found], options)
    names = [name for name, row in rows.items() if VARIANTS not in row and row[DEFAULTS]["verdict"] == EXACT]
    for result in run_forked([] if options.defaults else names, try_variants, options.processes, LIMITS):
        rows[result.task][VARIANTS] = outcomes_of(result, "the next variant")
        keep(rows, result.task, rows[result.task][VARIANTS], options)


def recorded_rows() -> dict[str, Row]:
    """Returns the rows of the record, of these sources or of earlier ones."""
    path = destination(RESULTS / f"{NAME}.json")
    return json.loads(path.read_text())["rows"] if path.exists() else {}


def untried(names: list[str], rows: dict[str, Row], now: str) -> list[str]:
    """Returns those that these sources weren't tried with: first what was never tried, and last what was exact."""

    def rank(name: str) -> int:
        return 0 if name not in rows else 1 + (rows[name][DEFAULTS]["verdict"] == EXACT)

    return sorted((name for name in names if rows.get(name, {}).get("sources") != now), key=rank)


def outcomes_of(result: Result, ended: str) -> list[Row]:
    """Returns what was found about an architecture, and of the variant with which it `ended` early."""
    early = [Outcome(ended, Verdict.OUT_OF_LIMITS, result.ended_by)] if result.ended_by else []
    return [asdict(each) | {"verdict": each.verdict.value} for each in (*result.sent, *early)]


def keep(rows: dict[str, Row], name: str, outcomes: list[Row], options: argparse.Namespace) -> None:
    """Prints what is new, and writes the record unless architectures were named."""
    for each in outcomes:
        error = f" {each['error']:.0e}" if each["error"] else ""
        paths = f" by {' and '.join(each['paths'])}" if each["paths"] else ""
        print(f"{name:24} {each['variant']:20} {each['verdict']}{error}{paths} {each['reason']}", flush=True)
    if not options.names:
        write(NAME, {"setting": setting(), "rows": dict(sorted(rows.items()))})


if __name__ == "__main__":
    main()
