"""How well the simulator predicts: simulated step against measured, over many schedules, slices and microbatches.

    python -m benchmarks.predicted                  # prints tables, writes results/predicted_2_ranks.json

A schedule is predicted from action times that were measured on other schedules of the same stages and slices: one with
whole backwards and one with split ones, which alternate with it. Two processes run 7 cuts of 1024 tokens. Four ranks
with eight stages run in one process, where ranks can't run at the same time: there the measured step is the order that
ran with the very times its own actions took.
"""

from __future__ import annotations

import argparse
import statistics
from collections import defaultdict
from dataclasses import replace

import torch
import torch.distributed as dist
from scipy.stats import spearmanr

from benchmarks.action_times import ActionTimes
from benchmarks.harness import few, is_trial, restart_in_environment, setting, write
from benchmarks.peers import VOCABULARY, model_config
from benchmarks.waterfall import WithoutLinks
from slipstream import Pipeline, Runtime, Schedule, make_schedule, simulate
from slipstream.schedule import split_backwards

TOKENS = 128 if is_trial() else 1024  # of a step, over all microbatches
WARM_UPS, ROUNDS = (1, 1) if is_trial() else (2, 5)
# By placement: stages per rank, the schedule whose actions are timed, and those that are predicted.
PLACEMENTS = [
    (1, "1f1b", ("gpipe", "1f1b", "zb-h1", "zb-h2")),
    (2, "interleaved-1f1b", ("interleaved-1f1b", "breadth-first")),
    (2, "zb-v", ("zb-v", "v-half", "v-min")),
]
TWO_PROCESSES = [(1, 1), (1, 2), (1, 4), (1, 8), (2, 1), (2, 4), (4, 2)]  # microbatches, slices
ONE_PROCESS = [(1, 8), (2, 4), (4, 2), (8, 1)]


def measure(num_ranks: int, num_microbatches: int, num_slices: int) -> list[dict[str, object]]:
    """Measures and simulates each schedule. Every rank runs the same; returns a row for each."""
    inputs = torch.randint(0, VOCABULARY, (num_microbatches, TOKENS // num_microbatches))
    dist.broadcast(inputs, 0)
    rows = []
    for stages_per_rank, timed, predicted in PLACEMENTS:
        counts = (num_ranks, num_microbatches, num_slices, stages_per_rank)
        if num_ranks == 4 and stages_per_rank == 1:
            continue
        whole = make_schedule(timed, *counts)
        references = {split_backwards(whole, everywhere=True), whole}
        schedules = {name: split_backwards(make_schedule(name, *counts)) for name in predicted}
        rows += compare(num_ranks, inputs, references, schedules)
    return rows


def compare(
    num_ranks: int, inputs: torch.Tensor, references: set[Schedule], schedules: dict[str, Schedule]
) -> list[dict[str, object]]:
    start = next(iter(schedules.values()))
    together = dist.get_world_size() == 1
    settings = {"num_ranks": num_ranks} if together else {}
    pipe = Pipeline.from_config(
        model_config(inputs.shape[1]), runtime=Runtime(self_check=False), schedule=start, **settings
    )
    times = ActionTimes()
    measured: defaultdict[str, list[float]] = defaultdict(list)
    for index in range(WARM_UPS + ROUNDS):
        for name, schedule in [*((f"timed {k}", s) for k, s in enumerate(references)), *schedules.items()]:
            plans = pipe._runtime.plans
            plans.rows = plans.rows._replace(schedule=schedule)
            for parameter in pipe.parameters():
                parameter.grad = None
            dist.barrier()
            pipe.step(inputs, inputs)
            timeline = pipe.timeline()
            if index < WARM_UPS:
                continue
            if schedule in references:
                times.add(timeline)
            if together:
                timeline = simulate(schedule, WithoutLinks(timeline))
            measured[name].append(timeline.makespan)
    return [
        {
            "ranks": num_ranks,
            "stages": schedule.num_stages,
            "microbatches": schedule.num_microbatches,
            "slices": schedule.num_slices,
            "schedule": name,
            "measured": statistics.median(measured[name]),
            "simulated": simulate(schedule, replace(times.cost(), latency=0.0) if together else times.cost()).makespan,
        }
        for name, schedule in schedules.items()
    ]


def summary(rows: list[dict[str, object]]) -> dict[str, float]:
    """Returns the mean and the largest relative error, and the rank correlation of the two orders."""
    pairs = [(float(row["simulated"]), float(row["measured"])) for row in rows]  # type: ignore[arg-type]
    errors = [abs(simulated / measured - 1) for simulated, measured in pairs]
    correlation = spearmanr(*zip(*pairs, strict=True)).statistic
    return {
        "configurations": len(rows),
        "mean error": statistics.mean(errors),
        "largest error": max(errors),
        "rank correlation": float(correlation),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, choices=[2, 4], default=2, help="2 processes, or 4 ranks in one")
    options = parser.parse_args()
    restart_in_environment(num_processes=1 if options.ranks == 4 else 2)
    torch.set_num_threads(1)
    if options.ranks == 4:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    else:
        dist.init_process_group("gloo")
    rows = []
    for counts in few(ONE_PROCESS if options.ranks == 4 else TWO_PROCESSES):
        found = measure(options.ranks, *counts)
        rows += found
        if dist.get_rank() == 0:
            for row in found:
                print({key: round(value, 4) if isinstance(value, float) else value for key, value in row.items()})
    if dist.get_rank() == 0:
        print(summary(rows))
        report = {"setting": setting(), "summary": summary(rows), "rows": rows}
        print(f"wrote {write(f'predicted_{options.ranks}_ranks', report)}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
