"""What comparing recomputed outputs with computed ones costs a step: on and off in turns.

    python -m benchmarks.recompute_check              # prints a table, writes results/recompute_check.json

Two ranks, GPipe, so that every slice is recomputed. Two pipelines of the same weights, which differ by
`Memory(check_recompute=...)`, take steps in turns; their gradients must be the same to the bit.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.harness import few, setting, two_ranks, write
from benchmarks.peers import VOCABULARY, model_config
from slipstream import Memory, Pipeline, Runtime

CASES = [("full", 1, 1), ("stage", 1, 8), ("stage", 4, 1), ("selective", 1, 8)]  # what, microbatches, slices
UNCOUNTED = 2  # steps at the beginning


def pipeline(recompute: str, microbatches: int, slices: int, length: int, is_checked: bool) -> Pipeline:
    """Returns a pipeline of two ranks."""
    return Pipeline.from_config(
        model_config(length),
        schedule="gpipe",
        num_microbatches=microbatches,
        slices=slices,
        partition=[4, 4],
        memory=Memory(recompute=recompute, check_recompute=is_checked),
        runtime=Runtime(self_check=False),
    )


def measure(recompute: str, microbatches: int, slices: int, length: int, repeats: int) -> dict[str, Any]:
    """Returns the seconds of steps with the comparison and without, the ratio of the medians, and its error."""
    pipes = {on: pipeline(recompute, microbatches, slices, length, on) for on in (True, False)}
    inputs = torch.randint(0, VOCABULARY, (microbatches, length), generator=torch.Generator().manual_seed(0))
    seconds: dict[bool, list[float]] = {True: [], False: []}
    for number in range(repeats + UNCOUNTED):
        for on in (True, False) if number % 2 else (False, True):
            for parameter in pipes[on].parameters():
                parameter.grad = None
            dist.barrier()
            began = time.perf_counter()
            pipes[on].step(inputs, inputs)
            dist.barrier()
            if number >= UNCOUNTED:
                seconds[on].append(time.perf_counter() - began)
    pairs = zip(pipes[True].parameters(), pipes[False].parameters(), strict=True)
    assert all(a.grad is not None and b.grad is not None and torch.equal(a.grad, b.grad) for a, b in pairs)
    ratios = [on / off for on, off in zip(seconds[True], seconds[False], strict=True)]
    return {
        "recompute": recompute,
        "microbatches": microbatches,
        "slices": slices,
        "tokens": length,
        "seconds_with": round(statistics.median(seconds[True]), 4),
        "seconds_without": round(statistics.median(seconds[False]), 4),
        "ratio": round(statistics.median(ratios), 4),
        "standard_error": round(statistics.stdev(ratios) / len(ratios) ** 0.5, 4) if repeats > 1 else None,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--repeats", type=int, default=15)
    options = parser.parse_args()
    with two_ranks() as is_first:
        rows = []
        for recompute, microbatches, slices in few(CASES):
            length = options.length // microbatches
            rows.append(measure(recompute, microbatches, slices, length, options.repeats))
            if is_first:
                print(rows[-1], flush=True)
        if is_first:
            print(f"wrote {write('recompute_check', {'setting': setting(**vars(options)), 'rows': rows})}")


if __name__ == "__main__":
    main()
