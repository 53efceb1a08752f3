"""GPipe's memory: peak activations over K, M and L (section 2.3), and its Table 1, the largest models that fit.

    python -m benchmarks.gpipe.memory                 # all three; writes results/gpipe_memory_*.json and a picture
    python -m benchmarks.gpipe.memory Transformer-L   # or formula, or AmoebaNet-D

Every rank is a process. Counted are the bytes of all storages of tensors alive at once, so what else the machine does
doesn't matter.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.gpipe.memory_fit import PICTURE, draw, fit
from benchmarks.gpipe.memory_worker import Held, held
from benchmarks.gpipe.models import amoebanet, transformer
from benchmarks.harness import destination, few, restart_in_environment, setting, write

BUDGET = 256 * 2**20  # bytes of a rank
ROWS = 64  # of the formula's batches, N
FORMULA = [(k, m, layers) for k in (1, 2, 4) for m in (1, 2, 4, 8, 16) for layers in (8, 16, 32)]
WAYS = ("none", "stage", "segments")
FAMILIES = {"AmoebaNet-D": 64, "Transformer-L": 16}  # and the rows of a batch
SCENARIOS = {  # ranks, microbatches, recomputation
    "naive-1": (1, 1, "none"),
    "pipeline-1": (1, 16, "stage"),
    "pipeline-2": (2, 16, "stage"),
    "pipeline-4": (4, 16, "stage"),
}
Row = dict[str, Any]


def formula_row(num_ranks: int, num_microbatches: int, num_layers: int, recompute: str) -> Row:
    """Measures Transformer layers of width 64 over 32 tokens, each of two layers of the sequence."""
    case = transformer(num_layers // 2, 64, 4, 64, 32)
    found = held(case, ROWS, num_microbatches, recompute)
    return {
        "K": num_ranks,
        "M": num_microbatches,
        "L": num_layers,
        "N": ROWS,
        "recompute": recompute,
        "activations": found.activations,
    }


def formula_rows(num_ranks: int) -> Iterator[Row]:
    for k, m, layers in few([case for case in FORMULA if case[0] == num_ranks]):
        for recompute in WAYS:
            yield formula_row(k, m, layers, recompute)


def largest(fits: Callable[[int], bool], guess: int) -> int:
    """Returns the largest number, 1 or more, that fits; 0 if none does."""
    low, high = 0, guess
    while fits(high):
        low, high = high, high * 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def table_row(family: str, scenario: str) -> Row:
    """Finds the largest model of a family whose every rank stays within the budget."""
    _, num_microbatches, recompute = SCENARIOS[scenario]
    rows = FAMILIES[family]
    seen: dict[int, Held] = {}
    cells = 36 if scenario == "pipeline-4" else 18  # as in the paper

    def measure(size: int) -> Held:
        case = amoebanet(cells, 16 * size, 32) if family == "AmoebaNet-D" else transformer(size, 256, 8, 4000, 64)
        if size not in seen:
            seen[size] = held(case, rows, num_microbatches, recompute)
        return seen[size]

    size = largest(lambda size: max(measure(size).peak) <= BUDGET, guess=4)
    found, more = measure(size), measure(size + 1)
    return {
        "family": family,
        "scenario": scenario,
        "config": f"({cells}, {16 * size})" if family == "AmoebaNet-D" else str(size),
        "parameters": sum(found.parameters),
        "parameter bytes": 12 * sum(found.parameters),
        "activation bytes": sum(found.activations),
        "peak bytes": found.peak,
        "peak bytes of the next": more.peak,
    }


def run_rank(path: Path, what: str) -> None:
    """Runs in every process; the first one writes the rows."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    ranks = dist.get_world_size()
    if what == "formula":
        found = formula_rows(ranks)
    else:
        found = (table_row(what, name) for name, (k, *_) in SCENARIOS.items() if k == ranks)
    rows = []
    for row in found:
        rows.append(row)
        if dist.get_rank() == 0:
            print(row, flush=True)
            path.write_text(json.dumps(rows))
    dist.barrier()
    dist.destroy_process_group()


def on_ranks(num_ranks: int, what: str) -> list[Row]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.json"
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"]
        program = ["-m", "benchmarks.gpipe.memory", what, "--rank-of", str(path)]
        subprocess.run([sys.executable, *launcher, *program], check=True)
        rows: list[Row] = json.loads(path.read_text())
        return rows


def record(what: str) -> Path:
    rows = [row for num_ranks in (1, 2, 4) for row in on_ranks(num_ranks, what)]
    report: Row = {"setting": setting(), "rows": rows}
    if what == "formula":
        report |= {"fits": fit(rows)}
        draw(rows, report["fits"], destination(PICTURE))
    return write("gpipe_memory_" + what.lower().replace("-", "_"), report)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", nargs="*", choices=["formula", *FAMILIES], default=["formula", *FAMILIES])
    parser.add_argument("--rank-of", type=Path, help=argparse.SUPPRESS)  # where the processes leave what they found
    options = parser.parse_args()
    if options.rank_of:
        run_rank(options.rank_of, options.what[0])
        return
    restart_in_environment()
    for what in options.what:
        print(f"wrote {record(what)}")


if __name__ == "__main__":
    main()
