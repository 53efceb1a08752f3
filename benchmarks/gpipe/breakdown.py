"""GPipe's Table 4: what a step's time goes to, measured on two processes.

    python -m benchmarks.gpipe.breakdown             # prints a table, writes results/gpipe_breakdown.json

All parts come from the timeline of the step itself, and add up to it (see `benchmarks.waterfall`).
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.gpipe.balance import for_flush
from benchmarks.gpipe.layer_times import measure
from benchmarks.gpipe.models import SMALL, Case
from benchmarks.harness import few, setting, two_ranks, write
from benchmarks.waterfall import waterfall
from slipstream import Memory, Pipeline, Schedule
from slipstream.timeline import Timeline

MICROBATCHES = (8, 32)
PARTS = (
    "computing",
    "recomputation",
    "load imbalance",
    "bubble",
    "communication",
    "executor",
    "weight update",
)


def parts(timeline: Timeline, schedule: Schedule, step: float, update: float) -> dict[str, float]:
    """Returns the seconds of each part of a step and its weight update, on the mean rank; they add up to both.

    Recomputation in a bubble is recomputation: what is called bubble is what remains idle. The executor's part is what
    passes between actions beyond that, with the loss summed over ranks at the end.
    """
    lost = waterfall(timeline, schedule, 0.0, step)
    return {
        "computing": lost["ideal"] + lost["slicing"],
        "recomputation": lost["recomputation"],
        "load imbalance": lost["imbalance"],
        "bubble": lost["bubble"],
        "communication": lost["communication"],
        "executor": lost["executor"] + lost["outside"],
        "weight update": update,
    }


def row(name: str, case: Case, rows: int, recompute: str, num_microbatches: int, repeats: int) -> dict[str, Any]:
    """Measures some steps after two that warm up; returns the means."""
    pipe = _pipe(case, rows, recompute, num_microbatches)
    optimizer = torch.optim.RMSprop(pipe.parameters(), lr=1e-4)
    inputs, targets = case.batch(rows * num_microbatches)
    found = []
    for _ in range(2 + repeats):
        optimizer.zero_grad()
        step = _seconds(lambda: pipe.step(inputs, targets))
        timeline = pipe.timeline()
        update = _seconds(optimizer.step)
        found.append(parts(timeline, pipe.layout.training, step, update) | {"step": step + update})
    seconds = {key: sum(each[key] for each in found[2:]) / repeats for key in found[0]}
    bubble = (pipe.num_ranks - 1) / (num_microbatches + pipe.num_ranks - 1)
    return {
        "model": name,
        "K": pipe.num_ranks,
        "M": num_microbatches,
        "recompute": recompute,
        "seconds": seconds,
        "(K-1)/(M+K-1)": bubble,
    }


def _pipe(case: Case, rows: int, recompute: str, num_microbatches: int) -> Pipeline:
    """Builds the pipeline, balanced by rank 0's measurement."""
    found: list[Any] = [None]
    if dist.get_rank() == 0:
        times = measure(case.model(), *case.batch(rows), case.loss, repeats=3)
        again = times.forward if recompute == "stage" else [0.0] * len(times.layers)
        found[0] = for_flush(times.forward, [b + r for b, r in zip(times.backward, again, strict=True)], 2)
    dist.broadcast_object_list(found, 0)
    return Pipeline(
        case.model(),
        "gpipe",
        num_microbatches,
        partition=found[0],
        memory=Memory(recompute=recompute),
        loss_fn=case.loss,
    )


def _seconds(run: Any) -> float:
    """Returns the slowest rank's seconds."""
    dist.barrier()
    began = time.perf_counter()
    run()
    seconds = torch.tensor(time.perf_counter() - began, dtype=torch.float64)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return float(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    with two_ranks() as is_first:
        found = []
        for name, (case, rows) in few(list(SMALL.items())):
            for recompute in ("stage", "none"):
                for num_microbatches in few(MICROBATCHES):
                    found.append(row(name, case, rows, recompute, num_microbatches, options.repeats))
                    if is_first:
                        seconds = found[-1]["seconds"]
                        shares = "  ".join(f"{part} {seconds[part] / seconds['step']:6.1%}" for part in PARTS)
                        print(
                            f"{name}  M={num_microbatches} {recompute}: {seconds['step']:.3f} s  {shares}", flush=True
                        )
        if is_first:
            print(f"wrote {write('gpipe_breakdown', {'setting': setting(repeats=options.repeats), 'rows': found})}")


if __name__ == "__main__":
    main()
