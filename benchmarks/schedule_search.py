"""Found orders against hand-written schedules and the lower bound, in the simulator, over a grid of problems.

python -m benchmarks.schedule_search                # 540 problems, two processes: about 15 minutes

A problem is drawn with a fixed seed: ranks p from 2 to 16, microbatches m and slices s from 1 to 16 (the logarithm
uniform, so that small and large ones are there), stages per rank v from 1 to 4 (loop; at v=2 also V), and
the levels of FACTORS. The forwards of one microbatch through one rank's layers take 1 second:

- attention's share A of it grows with the square of the tokens, the rest in proportion: a slice from x to y, as
  shares of the sequence, takes (1-A)(y-x) + A(y²-x²). Slices have equal tokens or equal times.
- I takes as long for the linear part and twice as long for attention, W as long as the linear part, B both.
- the head adds `head` · (y-x) / v to F, I and W of the last stage.
- I and W each take 1 + `split cost` times their share of B.
- a mean slice's forward of a stage is the unit of links: a fast one has latency 0.01 and is occupied 0.05 by a
  mean slice's message, a slow one 0.1 and 0.5.
- a slice keeps its tokens' share of activations. The memory limit is in the least that any order needs,
  one microbatch.
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from math import inf
from multiprocessing import get_context
from typing import Any

import numpy as np

from benchmarks.harness import few, setting, write
from slipstream import find_order, step_lower_bound
from slipstream.planner.order.list_scheduling import measure_order
from slipstream.planner.order.order_search import hand_written
from slipstream.planner.order.ordering_problem import OrderingProblem
from slipstream.schedule import Op, Schedule
from slipstream.simulator import TableCost, simulate

NUM_PROBLEMS = 540
FACTORS: dict[str, tuple[object, ...]] = {
    "attention": (0.0, 0.2, 0.4, 0.6, 0.8),
    "slices of equal": ("tokens", "time"),
    "head": (0.0, 0.5, 1.0),
    "split cost": (0.0, 0.05),
    "links": ("none", "fast", "slow"),
    "memory": (inf, inf, 2.0, 1.5, 1.0),
}
LINKS = {"none": (0.0, 0.0), "fast": (0.01, 0.05), "slow": (0.1, 0.5)}
BETTER = 1e-3


def best_hand_written(*arguments: Any, **keywords: Any) -> Schedule | None:
    """Returns the fastest hand-written schedule for the arguments of `find_order`; None where none fits the memory."""
    problem = OrderingProblem(*arguments, **keywords)
    measured = ((measure_order(problem, problem.times, problem.limits, each), each) for each in hand_written(problem))
    fitting = [(found.seconds, schedule) for found, schedule in measured if found]
    _, best = min(fitting, key=lambda pair: pair[0], default=(inf, None))
    return best and replace(best, reach=problem.reach)


def draw(index: int) -> dict[str, object]:
    random = np.random.default_rng([7, index])
    p = round(2 ** random.uniform(1, 4))
    m, s = (round(2 ** random.uniform(0, 4)) for _ in range(2))
    v = int(random.integers(1, 5))
    placement = "V" if v == 2 and random.random() < 0.5 else "loop"
    levels = {name: values[random.integers(len(values))] for name, values in FACTORS.items()}
    return {"p": p, "m": m, "s": s, "v": v, "placement": placement} | levels


def costs(problem: dict) -> TableCost:
    s, v, share, num_stages = problem["s"], problem["v"], problem["attention"], problem["p"] * problem["v"]
    cuts = np.arange(s + 1) / s
    if problem["slices of equal"] == "time" and share:
        cuts = (-(1 - share) + np.sqrt((1 - share) ** 2 + 4 * share * cuts)) / (2 * share)
    tokens = np.diff(cuts)
    linear, attention = (1 - share) * tokens / v, share * np.diff(cuts**2) / v
    times: dict[tuple[int, int, Op], float] = {}
    for g in range(num_stages):
        head = problem["head"] * tokens / v if g == num_stages - 1 else 0 * tokens
        forward, inputs, weights = linear + attention + head, linear + 2 * attention + head, linear + head
        split = 1 + problem["split cost"]
        rows = {Op.F: forward, Op.B: inputs + weights, Op.I: inputs * split, Op.W: weights * split}
        times |= {(g, i, op): float(row[i]) for op, row in rows.items() for i in range(s)}
    latency, occupied = (part / (s * v) for part in LINKS[problem["links"]])
    return TableCost(
        times,
        message_bytes=tuple(tokens * s),
        latency=latency,
        bandwidth=1 / occupied if occupied else None,
        activations={(g, i): float(tokens[i]) for g in range(num_stages) for i in range(s)},
    )


def compare(index: int) -> dict[str, object]:
    """Returns one problem's best hand-written schedule that fits and the found order, both simulated, and the bound."""
    problem = draw(index)
    p, v, cost = problem["p"], problem["v"], costs(problem)
    placement = [*range(p), *reversed(range(p))] if problem["placement"] == "V" else [*range(p)] * v
    limits = [v * problem["memory"]] * p
    arguments = (placement, problem["m"], problem["s"], cost)
    best = best_hand_written(*arguments, memory_limit=limits)
    began = time.process_time()
    found = simulate(schedule := find_order(*arguments, memory_limit=limits), cost)
    seconds = time.process_time() - began
    assert all(held <= limit * (1 + 1e-6) for held, limit in zip(found.peak_memory, limits, strict=True))
    return problem | {
        "memory": None if problem["memory"] == inf else problem["memory"],
        "actions": sum(map(len, schedule.actions)),
        "hand-written": best and best.name,
        "hand-written seconds": best and float(simulate(best, cost).makespan),
        "found seconds": float(found.makespan),
        "bound seconds": step_lower_bound(*arguments, memory_limit=limits),
        "search cpu seconds": round(seconds, 2),
    }


def ratios(rows: Iterable[dict]) -> dict[str, float]:
    values = [row["found seconds"] / row["bound seconds"] for row in rows]
    quantiles = {f"{q:.0%}": round(float(np.quantile(values, q)), 4) for q in (0.5, 0.75, 0.9, 0.95, 1)}
    return {"problems": len(values), "mean": round(float(np.mean(values)), 4)} | quantiles


def against_hand_written(rows: list[dict]) -> dict[str, object]:
    fitting = [row for row in rows if row["hand-written"]]
    open_ = [row for row in fitting if row["hand-written seconds"] > row["bound seconds"] * (1 + 1e-9)]
    gains = [row["hand-written seconds"] / row["found seconds"] for row in open_]
    return {
        "problems where a hand-written schedule fits": len(fitting),
        "slower": sum(row["found seconds"] > row["hand-written seconds"] * (1 + 1e-9) for row in fitting),
        "not at the bound": len(open_),
        "of these faster by more than 0.1%": round(float(np.mean([gain > 1 + BETTER for gain in gains])), 3),
        "mean speedup where not at the bound": round(float(np.mean(gains)), 4),
        "mean of hand-written over bound": round(
            float(np.mean([row["hand-written seconds"] / row["bound seconds"] for row in fitting])), 4
        ),
    }


def by_level(rows: list[dict]) -> dict[str, dict[str, dict[str, float]]]:
    def grouped(key: Callable[[dict], object]) -> dict[str, dict[str, float]]:
        levels = sorted({key(row) for row in rows}, key=lambda level: (level is None, level))
        return {str(level): ratios(row for row in rows if key(row) == level) for level in levels}

    bands = {name: grouped(lambda row, name=name: _band(row[name])) for name in ("p", "m", "s")}
    return bands | {name: grouped(lambda row, name=name: row[name]) for name in ("v", "placement", *FACTORS)}


def _band(number: int) -> str:
    return next(band for band, last in {" 1": 1, " 2-4": 4, " 5-8": 8, "9-16": 16}.items() if number <= last)


def timed_16_cubed() -> dict[str, float]:
    """Returns the wall seconds of 16 ranks, microbatches and slices in a new process without and with numba's cache."""
    with tempfile.TemporaryDirectory() as cache:
        program = (
            "import time; began = time.perf_counter()\n"
            "from slipstream.simulator.costs import UnitCost\n"
            "from slipstream.planner.order.order_search import find_order\n"
            "cost = UnitCost(link=0.05); limits = [1.5 * 16] * 16\n"
            "find_order(range(16), 16, 16, cost, memory_limit=limits); print(time.perf_counter() - began)"
        )
        environment = os.environ | {"NUMBA_CACHE_DIR": cache}
        runs = [
            subprocess.run([sys.executable, "-c", program], env=environment, check=True, capture_output=True, text=True)
            for _ in range(2)
        ]
    return dict(zip(("first", "compiled code cached"), (round(float(run.stdout), 2) for run in runs), strict=True))


def main() -> None:
    argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0]).parse_args()
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        rows = list(pool.map(compare, few(range(NUM_PROBLEMS), 4), chunksize=4))
    report: dict[str, object] = {
        "setting": setting(),
        "bound": inspect.getdoc(step_lower_bound),
        "against hand-written": against_hand_written(rows),
        "found over bound": ratios(rows),
        "found over bound by level": by_level(rows),
        "seconds for 16 ranks, 16 microbatches, 16 slices": timed_16_cubed(),
        "problems": [",".join(rows[0]), *(",".join(map(str, row.values())) for row in rows)],
    }
    shown = ("against hand-written", "found over bound", "seconds for 16 ranks, 16 microbatches, 16 slices")
    print(json.dumps({key: report[key] for key in shown}, indent=2))
    print("| factor | level | problems | mean | 50% | 90% | 100% |\n| --- | --- | --- | --- | --- | --- | --- |")
    for name, levels in by_level(rows).items():
        for level, row in levels.items():
            cells = [row[key] for key in ("problems", "mean", "50%", "90%", "100%")]
            print(f"| {name} | {level.strip()} | {' | '.join(map(str, cells))} |")
    print(f"wrote {write('schedule_search', report)}")


if __name__ == "__main__":
    main()
