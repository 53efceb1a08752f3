"""GPipe's Tables 2 and 3: normalised throughput over K and M, simulated from measured layers, and measured for K=2.

    python -m benchmarks.gpipe.throughput             # prints tables, writes results/gpipe_throughput.json

Every layer of the paper's models is timed on one core, in microbatches of one size, as many as M says. Stages are
balanced by these times in several ways, and a step of GPipe's schedule is simulated. For K=2 smaller models also run
on two processes, next to a simulation from their own layers' times, taken while both processes compute.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.executor_overhead import ping
from benchmarks.gpipe.balance import SPLITS, Split, between_cells, for_flush, imbalance, of_sum
from benchmarks.gpipe.layer_times import Times, measure
from benchmarks.gpipe.models import SMALL, Case, amoebanet, transformer
from benchmarks.gpipe.stage_cost import NONE, RECOMPUTE, Link, StageCost, step_seconds
from benchmarks.harness import few, interleaved, is_trial, restart_in_environment, setting, write
from benchmarks.papers.tables import read
from slipstream import Memory, Pipeline, simulate

STAGES, MICROBATCHES = (2, 4, 8), (1, 4, 32)
P100_FLOPS, PCI_E_BYTES = 9.3e12, 8e9  # a second: peak, and from one GPU through the host to another
Row = dict[str, Any]


def measure_paper_models(repeats: int) -> dict[str, Times]:
    """Times the layers, by the model's name in the paper. A Transformer's are alike: one in memory is enough."""
    found = {}
    for filters in (256, 128):
        case = amoebanet(3, 16, 64) if is_trial() else amoebanet(18, filters, 224)
        found[f"AmoebaNet-D(18 {filters})"] = _measured(case, 2, repeats)
    layer = transformer(1, 64, 4, 100, 32) if is_trial() else transformer(1, 2048, 32, 32_000, 1024)
    one = _measured(layer, 1, repeats)
    return found | {"Transformer-48": one.deepened(48), "Transformer-24": one.deepened(24)}


def _measured(case: Case, rows: int, repeats: int) -> Times:
    return measure(case.model(), *case.batch(rows), case.loss, repeats)


def splits_of(times: Times) -> dict[str, Split]:
    """Returns all ways to split; for AmoebaNet also cuts between cells only, as GPipe's authors probably had."""
    cells = [layer.name.partition("_")[0] for layer in times.layers]
    return SPLITS | ({"exact, between cells": of_sum(between_cells(cells))} if "cell0" in cells else {})


def balance_rows(name: str, times: Times) -> list[Row]:
    """Returns how uneven each way to split leaves the stages: forward and backward together, and each separately."""
    rows = []
    for k in STAGES:
        for how, split in splits_of(times).items():
            counts = split(times.forward, times.backward, k)
            of = {"both": times.costs, "forward": times.forward, "backward": times.backward}
            rows.append({"model": name, "K": k, "split": how} | {kind: imbalance(c, counts) for kind, c in of.items()})
    return rows


def throughput_rows(name: str, times: Times, link: Link, base: tuple[int, int]) -> list[Row]:
    """Returns the throughput of each K and M relative to the `base`, (K, M), recomputed and split in the same way.

    It is also given relative to K=1 without recomputation, by which all rows can be compared.
    """
    rows = []
    for recompute in RECOMPUTE:
        again = [0.0] * len(times.layers) if recompute == NONE else times.forward
        backward = [b + r for b, r in zip(times.backward, again, strict=True)]
        for how, split in splits_of(times).items():
            counts = {k: split(times.forward, backward, k) for k in STAGES}
            grid = [(k, m) for k in STAGES for m in MICROBATCHES]
            rate = {(k, m): m / step_seconds(times, counts[k], link, m, recompute) for k, m in grid}
            for k, m in grid:
                row = {"model": name, "K": k, "M": m, "recompute": recompute, "split": how}
                rows.append(row | {"normalised": rate[k, m] / rate[base], "over one": rate[k, m] * sum(times.costs)})
    return rows


def peak_flops(repeats: int, size: int = 2048) -> float:
    """Measures the operations per second of one core in a large matrix product."""
    matrix, seconds = torch.randn(size, size), []
    for _ in range(1 + repeats):
        began = time.perf_counter()
        matrix @ matrix
        seconds.append(time.perf_counter() - began)
    return 2 * size**3 / statistics.median(seconds[1:])


def slow_link(peak: float) -> Link:
    """Returns a link with as many bytes per operation as PCI-E and a P100 have."""
    return Link(seconds_per_byte=P100_FLOPS / PCI_E_BYTES / peak)


def simulated(repeats: int) -> Row:
    times, peak = measure_paper_models(repeats), peak_flops(repeats)
    paper = {"table 2": read("gpipe_table2_throughput"), "table 3": read("gpipe_table3_pcie")}
    names = {table: dict.fromkeys(row["model"] for row in rows) for table, rows in paper.items()}
    table_3 = [row for name in names["table 3"] for row in throughput_rows(name, times[name], slow_link(peak), (2, 32))]
    return {
        "peak Gflops a second": peak / 1e9,
        "layers": {name: describe(each) for name, each in times.items()},
        "balance": [row for name in names["table 2"] for row in balance_rows(name, times[name])],
        "table 2": [row for name in names["table 2"] for row in throughput_rows(name, times[name], Link(), (2, 1))],
        "table 3": [row for row in table_3 if row["M"] == 32],
    }


def describe(times: Times) -> Row:
    dearest = max(times.layers, key=lambda layer: layer.forward + layer.backward)
    return {
        "number": len(times.layers),
        "parameters": sum(layer.num_parameters for layer in times.layers),
        "forward seconds": sum(layer.forward for layer in times.layers),
        "backward seconds": sum(layer.backward for layer in times.layers),
        "Gflops a second": times.flops_per_second / 1e9,
        "dearest": dearest.name,
        "its share": max(times.costs) / sum(times.costs),
        "forward": times.forward,
        "backward": times.backward,
    }


def run_rank(path: Path, repeats: int) -> None:
    """Runs in each of two processes; the first one writes the rows."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rows = [row for name, (case, size) in few(list(SMALL.items())) for row in two_processes(name, case, size, repeats)]
    if dist.get_rank() == 0:
        path.write_text(json.dumps(rows))
    dist.barrier()
    dist.destroy_process_group()


def two_processes(name: str, case: Case, rows: int, repeats: int) -> list[Row]:
    """Returns measured and simulated seconds of a step, for every M, with and without recomputation."""
    times = _mean(measure(case.model(), *case.batch(rows), case.loss, repeats + 2))
    counts = for_flush(times.forward, times.backward, 2)
    settings = [(m, recompute) for recompute in ("none", "stage") for m in few(MICROBATCHES, 2)]
    pipes = {f"{m} {recompute}": _pipe(case, counts, m, recompute) for m, recompute in settings}
    steps = {key: _stepper(pipe, case, rows, m) for (key, pipe), (m, _) in zip(pipes.items(), settings, strict=True)}
    seconds = interleaved(steps, repeats)
    cost = StageCost(times, counts)
    link = ping(cost.message_bytes(0))
    cost = replace(cost, link=Link(link))
    found: list[Row] = []
    for (m, recompute), (key, pipe) in zip(settings, pipes.items(), strict=True):
        step = statistics.median(seconds[key])
        row = {"model": name, "K": 2, "M": m, "recompute": recompute, "measured seconds": step}
        row |= {"layers' seconds": sum(times.costs), "link seconds": link}
        found.append(row | {"simulated seconds": simulate(pipe.layout.training, cost).makespan})
    for row in found:
        first = next(each for each in found if each["recompute"] == row["recompute"])
        for kind in ("measured", "simulated"):
            row[kind] = row["M"] / row[f"{kind} seconds"] * first[f"{kind} seconds"]
    if dist.get_rank() == 0:
        print(f"{name}: layers {sum(times.costs):.4f} s, link {link:.6f} s, split {counts}")
        print(*found, sep="\n", flush=True)
    return found


def _mean(times: Times) -> Times:
    """Averages the times over both processes, which measured at the same time."""
    both: list[Any] = [None, None]
    dist.all_gather_object(both, times)
    layers = [
        replace(a, forward=(a.forward + b.forward) / 2, backward=(a.backward + b.backward) / 2)
        for a, b in zip(both[0].layers, both[1].layers, strict=True)
    ]
    return replace(times, layers=layers)


def _pipe(case: Case, counts: list[int], num_microbatches: int, recompute: str) -> Pipeline:
    return Pipeline(
        case.model(), "gpipe", num_microbatches, partition=counts, memory=Memory(recompute=recompute), loss_fn=case.loss
    )


def _stepper(pipe: Pipeline, case: Case, rows: int, num_microbatches: int) -> Callable[[], float]:
    inputs, targets = case.batch(rows * num_microbatches)

    def step() -> float:
        for parameter in pipe.parameters():
            parameter.grad = None
        dist.barrier()
        began = time.perf_counter()
        pipe.step(inputs, targets)
        dist.barrier()
        return time.perf_counter() - began

    return step


def measured(repeats: int) -> list[Row]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.json"
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        program = ["-m", "benchmarks.gpipe.throughput", "--rank-of", str(path), "--repeats", str(repeats)]
        subprocess.run([sys.executable, *launcher, *program], check=True)
        rows: list[Row] = json.loads(path.read_text())
        return rows


def show(report: Row) -> None:
    print("slowest stage over the mean: of both together, forward, backward")
    for row in report["balance"]:
        print("{model:22} K={K} {split:22} {both:.3f} {forward:.3f} {backward:.3f}".format(**row))
    for table in ("table 2", "table 3"):
        print(f"\n{table}: over its own first row; over one core without recomputation")
        for row in report[table]:
            if row["split"] == "exact, for a flush":
                print("{model:22} K={K} M={M:<3} {recompute:22} {normalised:5.2f} {over one:5.2f}".format(**row))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--rank-of", type=Path, help=argparse.SUPPRESS)  # where the processes leave what they found
    options = parser.parse_args()
    if options.rank_of:
        run_rank(options.rank_of, options.repeats)
        return
    restart_in_environment()
    torch.set_num_threads(1)
    report = {"setting": setting(repeats=options.repeats), **simulated(options.repeats)}
    show(report)
    report["two processes"] = measured(options.repeats)
    print(f"wrote {write('gpipe_throughput', report)}")


if __name__ == "__main__":
    main()
