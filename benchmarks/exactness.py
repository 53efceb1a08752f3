"""Every mesh of up to eight processes against one: gradients, losses and parameters after three steps, in float64.

    python -m benchmarks.exactness              # or `make exactness`; writes results/exactness.json
    python -m benchmarks.exactness --resume     # keeps the meshes that a stopped run of the same sources recorded

More processes than cores are fine, as nothing is timed; it takes an hour on two.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.harness import setting, write
from benchmarks.records import RESULTS, is_current

BOUND = 1e-9
TESTS = Path(__file__).parents[1] / "tests"
HEADS = 8  # of the models that are trained; ranks that share layers divide them


def meshes(most: int) -> Iterator[tuple[int, int, int]]:
    """Yields all (pp, dp, tp) with at most so many ranks."""
    for size in range(1, most + 1):
        for pp in range(1, size + 1):
            for dp in range(1, size // pp + 1):
                tp, rest = divmod(size, pp * dp)
                if rest == 0 and HEADS % tp == 0:
                    yield pp, dp, tp


def run(mesh: tuple[int, int, int]) -> list[dict[str, Any]]:
    """Trains all models in all ways on a mesh; returns a row for each."""
    num_processes = mesh[0] * mesh[1] * mesh[2]
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_processes}"]
    worker = str(TESTS / "workers" / "parallel" / "exactness.py")
    environment = os.environ | {"PYTHONPATH": str(TESTS), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *launcher, worker, *map(str, mesh)]
    ended = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=1800)
    if ended.returncode:
        raise RuntimeError(f"mesh {mesh}: {ended.stderr[-3000:]}")
    return [json.loads(line) for line in ended.stdout.splitlines()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--most", type=int, default=8, help="processes of the largest meshes")
    parser.add_argument("--resume", action="store_true", help="keep what was recorded with the same sources")
    options = parser.parse_args()
    rows = recorded() if options.resume else []
    done = {tuple(row["mesh"]) for row in rows}
    for mesh in meshes(options.most):
        if mesh in done:
            continue
        found = run(mesh)
        rows += found
        largest = max(row["error"] for row in found)
        print("pp{} dp{} tp{}".format(*mesh), f"{len(found)} cases, largest error {largest:.1e}", flush=True)
        save(rows, options.most)  # what is there so far, as it takes long
    worst = max(rows, key=lambda row: row["error"])
    if worst["error"] >= BOUND:
        raise SystemExit(f"not exact: {worst}")


def recorded() -> list[dict[str, Any]]:
    """Returns the recorded cases, if they ran with the sources as they are now."""
    path = RESULTS / "exactness.json"
    report = json.loads(path.read_text()) if path.exists() else None
    return report["rows"] if report is not None and is_current(report) else []


def save(rows: list[dict[str, Any]], most: int) -> None:
    """Writes all cases so far, and their summary."""
    done = {tuple(row["mesh"]) for row in rows}
    summary = {
        "meshes": len(done),
        "of": len(list(meshes(most))),
        "cases": len(rows),
        "largest error": max(row["error"] for row in rows),
    }
    kept = [{key: value for key, value in row.items() if key != "seconds"} for row in rows]
    write("exactness", {"setting": setting(), "bound": BOUND, "summary": summary, "rows": kept})


if __name__ == "__main__":
    main()
