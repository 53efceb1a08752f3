"""How well a plan predicts: step time and memory from a profile, against real runs of the same configurations.

    python -m benchmarks.planned      # prints a table, writes results/planned.json and an example of a profile

Two processes profile the model side by side. Then, for each batch, pipelines of many schedules, slices and
recomputation are built, and take steps in turns. The profile has seen none of them: it knows stages of one and two
layers, one op at a time. Measured memory is the most bytes of all tensors alive at once, AdamW's state included.
"""

from __future__ import annotations

import argparse
import statistics
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.harness import restart_in_environment, setting, write
from benchmarks.peers import VOCABULARY, model_config
from slipstream import Pipeline
from slipstream.pipeline.live_memory import memory_meter, tensors_alive
from slipstream.planner.configuration import Configuration
from slipstream.planner.judge import Candidate, predict
from slipstream.planner.profile_source import ProfileSource
from slipstream.planner.space import Options, Space
from slipstream.profiler import ProfileSettings, profile_model
from slipstream.profiler.links import measure_link
from slipstream.simulator import simulate

CPU = torch.device("cpu")
BATCHES = [(1, 1024), (2, 512), (4, 512)]  # sequences, tokens
# schedule, stages a rank, slices, recomputation; for every batch
CONFIGURATIONS = [
    ("1f1b", 1, 1, "none"),
    ("1f1b", 1, 2, "none"),
    ("1f1b", 1, 4, "none"),
    ("1f1b", 1, 8, "none"),
    ("1f1b", 1, 4, "full"),
    ("zb-h1", 1, 4, "none"),
    ("zb-h1", 1, 8, "none"),
    ("zb-h1", 1, 4, "full"),
    ("interleaved-1f1b", 2, 4, "none"),
    ("interleaved-1f1b", 2, 2, "full"),
    ("zb-v", 2, 2, "none"),
    ("zb-v", 2, 4, "none"),
]
WARM_UPS = 2
PROFILE = Path(__file__).parents[1] / "examples" / "profiles" / "xeon-two-processes.json"


class Contender:
    """One configuration: what is predicted, and the pipeline that runs it."""

    def __init__(self, space: Space, configuration: Configuration) -> None:
        candidate = Candidate.of(space, configuration)
        prediction = predict(candidate)
        self.configuration = configuration
        self.predicted = float(simulate(candidate.schedule, candidate.cost).makespan)  # without the optimizer
        self.predicted_bytes = [sum(kinds.values()) for kinds in prediction.memory]
        self.kinds = [{str(kind): round(size) for kind, size in kinds.items()} for kinds in prediction.memory]
        self.pipe = Pipeline.from_config(
            model_config(space.seq_len),
            schedule=configuration.schedule,
            stages_per_rank=configuration.stages_per_rank,
            num_microbatches=prediction.num_microbatches,
            slices=list(prediction.slices),
            partition=list(prediction.partition),
            recompute=configuration.recompute,
            self_check=False,
        )
        self.optimizer = torch.optim.AdamW(self.pipe.parameters(), lr=1e-4)
        self.seconds: list[float] = []

    def step(self, inputs: torch.Tensor) -> float:
        self.optimizer.zero_grad()
        dist.barrier()
        self.pipe.step(inputs, inputs)
        return self.pipe.timeline.makespan

    def measured_bytes(self, inputs: torch.Tensor) -> list[int]:
        """Of every rank, in a step; what the other contenders hold doesn't count."""
        self.step(inputs)
        self.optimizer.step()
        self.optimizer.zero_grad()
        own = {p.untyped_storage()._cdata for p in self.pipe.parameters()}
        own |= {t.untyped_storage()._cdata for s in self.optimizer.state.values() for t in s.values()}
        others = [t for t in tensors_alive() if t.untyped_storage()._cdata not in own]
        present = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in others}
        with memory_meter(CPU, tensors_alive()) as memory:
            self.pipe.step(inputs, inputs)
            peak = memory.peak - sum(present.values())
        peaks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(peaks, peak)
        return peaks


def compare(source: ProfileSource, batch: int, length: int, repeats: int) -> list[dict[str, Any]]:
    space = Space(source, length, batch, Options())
    contenders = []
    for schedule, stages, slices, recompute in CONFIGURATIONS:
        configuration = Configuration(1, 2, 1, stages, schedule, 1, slices, recompute, 0.0, False)
        contenders.append(Contender(space, configuration))
    inputs = torch.randint(0, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(0))
    for repeat in range(WARM_UPS + repeats):
        for contender in contenders:
            seconds = contender.step(inputs)
            contender.seconds += [seconds] if repeat >= WARM_UPS else []
    rows = []
    for contender in contenders:
        rows.append(
            {
                "sequences": batch,
                "tokens": length,
                "configuration": asdict(contender.configuration),
                "slices": contender.pipe.slices(length),
                "measured": statistics.median(contender.seconds),
                "seconds": contender.seconds,
                "predicted": contender.predicted,
                "measured bytes": contender.measured_bytes(inputs),
                "predicted bytes": contender.predicted_bytes,
                "kinds": contender.kinds,
            }
        )
    return rows


def line(row: dict[str, Any]) -> str:
    c = row["configuration"]
    memory = [p / m - 1 for p, m in zip(row["predicted bytes"], row["measured bytes"], strict=True)]
    error = row["predicted"] / row["measured"] - 1
    return (
        f"{row['sequences']} x {row['tokens']:<5} {c['schedule']:17} {c['num_slices']:2} {c['recompute']:5} "
        f"{row['predicted']:.3f} s predicted, {row['measured']:.3f} measured {error:+6.1%}"
        f"   memory {' '.join(f'{error:+6.1%}' for error in memory)}"
    )


def summary(rows: list[dict[str, Any]]) -> dict[str, float]:
    errors = [abs(row["predicted"] / row["measured"] - 1) for row in rows]
    pairs = [pair for row in rows for pair in zip(row["predicted bytes"], row["measured bytes"], strict=True)]
    memory = [abs(predicted / measured - 1) for predicted, measured in pairs]
    return {
        "configurations": len(rows),
        "mean error of the step": statistics.mean(errors),
        "largest": max(errors),
        "mean error of the memory": statistics.mean(memory),
        "largest of the memory": max(memory),
        "chosen over best measured, worst batch": max(_regret(rows, batch) for batch in BATCHES),
    }


def _regret(rows: list[dict[str, Any]], batch: tuple[int, int]) -> float:
    """How much slower the configuration with the shortest predicted step is than the fastest one measured."""
    own = [row for row in rows if (row["sequences"], row["tokens"]) == batch]
    chosen = min(own, key=lambda row: row["predicted"])
    return chosen["measured"] / min(row["measured"] for row in own) - 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--budget", type=float, default=200.0, help="seconds of profiling")
    parser.add_argument("--repeats", type=int, default=4)
    options = parser.parse_args()
    restart_in_environment(num_processes=2)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    longest = max(length for _, length in BATCHES)
    settings = ProfileSettings(longest, granularity=32, budget=options.budget)
    profile = profile_model(model_config(longest), settings, CPU, measure_link(CPU))
    found: list[Any] = [profile]
    dist.broadcast_object_list(found, 0)  # every rank plans with the same times
    source = ProfileSource(found[0], 2, None)
    rows = []
    for batch, length in BATCHES:
        rows += compare(source, batch, length, options.repeats)
        if dist.get_rank() == 0:
            print(*map(line, rows[-len(CONFIGURATIONS) :]), sep="\n", flush=True)
    if dist.get_rank() == 0:
        print(summary(rows))
        report = {
            "setting": setting(repeats=options.repeats, budget=options.budget),
            "error of the profile": found[0].error,
            "summary": summary(rows),
            "rows": rows,
        }
        found[0].save(PROFILE)
        print(f"wrote {write('planned', report)} and {PROFILE}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
