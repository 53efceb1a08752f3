"""Cutting 131,072 tokens at multiples of 128: our exact search against the paper's Algorithm 1 with its step of 0.1 ms.

python -m benchmarks.slicing                       # prints a table, writes results/slicing.json

Algorithm 1 is compiled with Numba as ours is, and all times include the table of 524,800 slice times. Its sweep is read
as kindly as it can be: the limits go up by exactly 0.1 ms, so that it needn't sort the table, and each slicing counts
with its own slowest slice instead of the limit. A fourth contender is the same sweep with our inner program, which
skips the slices that start too early: what is left is the difference between sweep and branch and bound.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from math import inf
from typing import Any

import numpy as np

from benchmarks.harness import few, interleaved, medians, restart_in_environment, setting, write
from slipstream.array_types import Floats
from slipstream.numba_jit import compiled
from slipstream.planner.cuts import Cuts
from slipstream.planner.slicing.equal_stage_slicing import (
    CutPath,
    PathSearch,
    TimeTable,
    minimize,
    search_compiled,
    search_numpy,
    shortest_path,
    time_table,
)

LENGTH, GRANULARITY = 131_072, 128
EPSILON = 1e-4  # seconds, TeraPipe section 3.3
CASES = [(num_stages, share) for num_stages in (8, 16, 32, 64, 96) for share in (0.3, 0.6)]
# What a 70B model takes for one such sequence, forward and backward, on nodes that each do 3.2e15 operations a second:
# 6 * 70e9 * 131,072 of matrix products and about as many again of causal attention.
SECONDS = 36.0
LAUNCHES = 0.016  # seconds per slice over the whole model, 0.2 ms for each of 80 layers
MESSAGE = 1e-4  # seconds per slice and stage


def slice_time(num_stages: int, attention_share: float) -> Callable[[Any, Any], Any]:
    """Returns a stage's time: matrix products by the token, attention by its causal area."""
    fixed = MESSAGE + LAUNCHES / num_stages

    def seconds(tokens: Any, context: Any) -> Any:
        linear, area = tokens / LENGTH, tokens * (2 * context + tokens) / LENGTH**2
        return fixed + SECONDS / num_stages * ((1 - attention_share) * linear + attention_share * area)

    return seconds


def latency(path: CutPath, num_stages: int) -> float:
    return path.total + (num_stages - 1) * path.maxima[0]


def exact(table: TimeTable, num_stages: int, search: PathSearch) -> tuple[CutPath, int]:
    """Returns the slices, and how many shortest paths were solved."""
    solves = 0

    def solve(limits: tuple[float, ...]) -> CutPath:
        nonlocal solves
        solves += 1
        return shortest_path(table, limits, search)

    return minimize(solve, table.least, num_stages - 1), solves


@compiled
def _algorithm_1(times: Floats, limit: float) -> Any:
    """Runs Algorithm 1 as printed: every cut looks at every slice that ends there."""
    n = times.shape[1] - 1
    best, length = np.full(n + 1, np.inf), np.zeros(n + 1, np.int64)
    best[0] = 0
    for i in range(1, n + 1):
        for k in range(1, i + 1):
            if times[0, i, i - k] <= limit and best[i - k] + times[0, i, i - k] < best[i]:
                best[i] = best[i - k] + times[0, i, i - k]
                length[i] = k
    return best, np.arange(n + 1) - length


def as_printed(times: Floats, floors: Floats, weight: Floats, limits: Floats) -> Any:
    return *_algorithm_1(times, limits[0]), np.zeros(1)  # it has no use for the values above the limit


def algorithm_1(table: TimeTable, num_stages: int, search: PathSearch) -> tuple[CutPath, int]:
    """Runs Algorithm 1 with limits that grow in steps of EPSILON until K times the limit exceeds the best latency."""
    limit, solves = table.least[0], 0
    best: CutPath | None = None
    while best is None or num_stages * limit <= latency(best, num_stages):
        path = shortest_path(table, (limit,), search)
        solves += 1
        if path.total < inf and (best is None or latency(path, num_stages) < latency(best, num_stages)):
            best = path
        limit += EPSILON
    return best, solves


def measure(num_stages: int, attention_share: float, repeats: int) -> dict[str, object]:
    results: dict[str, tuple[CutPath, int]] = {}
    methods = {
        "exact": (exact, search_compiled()),
        "exact without Numba": (exact, search_numpy),
        "Algorithm 1": (algorithm_1, as_printed),
        "Algorithm 1, our inner program": (algorithm_1, search_compiled()),
    }

    def contender(name: str) -> Callable[[], float]:
        method, search = methods[name]

        def run() -> float:
            began = time.perf_counter()
            table = time_table([slice_time(num_stages, attention_share)], LENGTH, Cuts(GRANULARITY))
            results[name] = method(table, num_stages, search)
            return time.perf_counter() - began

        return run

    seconds = medians(interleaved({name: contender(name) for name in methods}, repeats, warmups=1))
    found = {name: latency(path, num_stages) for name, (path, _) in results.items()}
    assert found["exact"] == found["exact without Numba"] <= found["Algorithm 1, our inner program"]
    assert found["exact"] <= found["Algorithm 1"]
    return {
        "stages": num_stages,
        "attention_share": attention_share,
        "milliseconds": {name: round(1e3 * value, 1) for name, value in seconds.items()},
        "shortest paths": {name: solves for name, (_, solves) in results.items()},
        "slices": {name: len(path.choice) - 1 for name, (path, _) in results.items()},
        "latency_seconds": found["exact"],
        "Algorithm 1 over the optimum": f"{found['Algorithm 1'] / found['exact'] - 1:.4%}",
        "Algorithm 1 over exact, time": round(seconds["Algorithm 1"] / seconds["exact"], 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    restart_in_environment()
    rows = []
    for case in few(CASES):
        rows.append(measure(*case, options.repeats))
        print(rows[-1], flush=True)
    details = {"length": LENGTH, "granularity": GRANULARITY, "epsilon_seconds": EPSILON, "repeats": options.repeats}
    model = {"model_seconds": SECONDS, "launch_seconds_per_slice": LAUNCHES, "message_seconds": MESSAGE}
    print(f"wrote {write('slicing', {'setting': setting(**details, **model), 'rows': rows})}")


if __name__ == "__main__":
    main()
