"""How well a plan predicts: step time and memory from a profile, against real runs of the same configurations.

    python -m benchmarks.planned      # prints a table, writes results/planned.json and an example of a profile

Two processes profile the model side by side. Then two others run each configuration. The profile has seen none of them:
it knows stages of one and two layers, one op at a time. Measured memory is the most bytes of all tensors alive at once,
AdamW's state included.

A machine that others share is faster in one minute than in the next. So before every step two more processes each take
one of transformers' own, which is the same all the time: the pace is how long that takes, over how long it took around
the profile. Predictions are compared after multiplying them by the pace; `unpaced` are the errors without that.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from scipy.stats import spearmanr
from torch import nn

from benchmarks.contenders import Unsliced
from benchmarks.harness import destination, few, restart_in_environment, setting, write
from benchmarks.isolated import Contender
from benchmarks.peers import VOCABULARY, model_config
from slipstream import Memory, Pipeline, Runtime
from slipstream.cost import Profile, ProfileSource
from slipstream.planner.plan import CHOICES, ONE_DEVICE, Plan
from slipstream.planner.search import PlanOptions
from slipstream.planner.search.plan_space import PlanSpace
from slipstream.profile import ProfileSettings, profile_model
from slipstream.profile.link_measurement import measure_link
from slipstream.profile.stage_bench import memory_meter, tensors_alive
from slipstream.simulator import simulate

CPU = torch.device("cpu")
BATCHES = [(1, 1024), (2, 512), (4, 512)]  # sequences, tokens
# schedule, stages a rank, slices, recomputation; for every batch
CONFIGURATIONS = [
    ("1f1b", 1, 1, "none"),
    ("1f1b", 1, 2, "none"),
    ("1f1b", 1, 4, "none"),
    ("1f1b", 1, 8, "none"),
    ("1f1b", 1, 4, "stage"),
    ("zb-h1", 1, 4, "none"),
    ("zb-h1", 1, 8, "none"),
    ("zb-h1", 1, 4, "stage"),
    ("interleaved-1f1b", 2, 4, "none"),
    ("interleaved-1f1b", 2, 2, "stage"),
    ("zb-v", 2, 2, "none"),
    ("zb-v", 2, 4, "none"),
]
WARM_UPS = 2
PACES = 8  # steps before the profile, and after it
PACE_TOKENS = 512
PROFILE = Path(__file__).parents[1] / "examples" / "profiles" / "xeon-two-processes.json"


class Planned:
    """A plan as a contender: a pipeline in separate processes."""

    def __init__(self, plan: Plan, batch: int, length: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.inputs = torch.randint(0, VOCABULARY, (batch, length), generator=generator)
        self.pipe = Pipeline.from_config(
            model_config(length),
            schedule=plan.schedule,
            stages_per_rank=plan.stages_per_rank,
            num_microbatches=plan.num_microbatches,
            slices=list(plan.slices),
            partition=list(plan.partition),
            memory=Memory(recompute=plan.recompute),
            runtime=Runtime(self_check=False),
        )
        self.optimizer = torch.optim.AdamW(self.pipe.parameters(), lr=1e-4)

    def step(self) -> float:
        loss = float(self.pipe.step(self.inputs, self.inputs))
        self.seconds = self.pipe.timeline().makespan
        return loss

    def parameters(self) -> Iterator[nn.Parameter]:
        return self.pipe.parameters()

    def report(self) -> tuple[float, list[int]]:
        """Returns the seconds of the last step, and every rank's bytes in one more, the optimizer's state included."""
        self.optimizer.step()
        self.optimizer.zero_grad()
        with memory_meter(CPU, tensors_alive()) as memory:
            self.pipe.step(self.inputs, self.inputs)
            peak = memory.peak
        peaks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(peaks, peak)
        return self.seconds, peaks


class Profiled:
    """The profile as a contender: measured in separate processes."""

    def __init__(self, length: int, budget: float) -> None:
        settings = ProfileSettings(length, granularity=32, budget=budget)
        self.profile = profile_model(model_config(length), settings, CPU, measure_link(CPU))

    def step(self) -> None:
        return None

    def parameters(self) -> Iterator[nn.Parameter]:
        return iter(())

    def report(self) -> Profile:
        return self.profile


class Pace:
    """How slow the machine is now, over how slow it was around the profile."""

    def __init__(self) -> None:
        self._contender = Contender("pace", Unsliced, model_config(PACE_TOKENS), 1, PACE_TOKENS)
        self._contender.wait()
        self._around_profile: list[float] = []
        for _ in range(WARM_UPS):
            self._contender.run()

    def note(self) -> None:
        """Measures the pace around the profile: call it before and after."""
        self._around_profile += [self._contender.run() for _ in range(PACES)]

    def now(self) -> float:
        return self._contender.run() / statistics.median(self._around_profile)

    def close(self) -> None:
        self._contender.close()


def measure(space: PlanSpace, choices: Plan, repeats: int, pace: Pace) -> dict[str, Any]:
    candidate = space.evaluate(choices)
    prediction = space.predict(candidate)
    arguments = (prediction.plan, space.global_batch, space.seq_len)
    contender = Contender("planned", Planned, *arguments)
    contender.wait()
    rounds = [(pace.now(), contender.run()) for _ in range(WARM_UPS + repeats)][WARM_UPS:]
    paces, seconds = zip(*rounds, strict=True)
    _, peaks = contender.report()  # type: ignore[misc]
    contender.close()
    return {
        "sequences": space.global_batch,
        "tokens": space.seq_len,
        "configuration": {name: choices.choice(name) for name in CHOICES},
        "slices": prediction.plan.slices,
        "measured": statistics.median(seconds),
        "seconds": seconds,
        "pace": statistics.median(paces),
        "predicted": float(simulate(candidate.schedule, candidate.cost).makespan),  # without the optimizer
        "measured bytes": peaks,
        "predicted bytes": [sum(kinds.values()) for kinds in prediction.memory],
        "kinds": [{str(kind): round(size) for kind, size in kinds.items()} for kinds in prediction.memory],
    }


def compare(source: ProfileSource, batch: int, length: int, repeats: int, pace: Pace) -> list[dict[str, Any]]:
    space, rows = PlanSpace(source, length, batch, PlanOptions()), []
    for schedule, stages, slices, recompute in few(CONFIGURATIONS, 3):
        order = {"stages_per_rank": stages, "schedule": schedule, "num_slices": slices, "recompute": recompute}
        choices = replace(ONE_DEVICE, pipeline_parallel=2, **order)
        rows.append(measure(space, choices, repeats, pace))
        print(line(rows[-1]), flush=True)
    return rows


def line(row: dict[str, Any]) -> str:
    c = row["configuration"]
    memory = [p / m - 1 for p, m in zip(row["predicted bytes"], row["measured bytes"], strict=True)]
    return (
        f"{row['sequences']} x {row['tokens']:<5} {c['schedule']:17} {c['num_slices']:2} {c['recompute']:5} "
        f"{row['predicted']:.3f} s predicted at a pace of {row['pace']:.3f}, {row['measured']:.3f} measured "
        f"{_error(row):+6.1%}"
        f"   memory {' '.join(f'{error:+6.1%}' for error in memory)}"
    )


def _paced(row: dict[str, Any]) -> float:
    """Returns the measured seconds at the profile's pace."""
    return float(row["measured"] / row["pace"])


def _error(row: dict[str, Any]) -> float:
    return float(row["predicted"] / _paced(row) - 1)


def summary(rows: list[dict[str, Any]]) -> dict[str, float]:
    errors = [abs(_error(row)) for row in rows]
    correlation = spearmanr([row["predicted"] for row in rows], [_paced(row) for row in rows]).statistic
    unpaced = [abs(row["predicted"] / row["measured"] - 1) for row in rows]
    pairs = [pair for row in rows for pair in zip(row["predicted bytes"], row["measured bytes"], strict=True)]
    memory = [abs(predicted / measured - 1) for predicted, measured in pairs]
    return {
        "configurations": len(rows),
        "mean error of the step": statistics.mean(errors),
        "largest": max(errors),
        "too slow on average": statistics.mean(map(_error, rows)),  # below 0: too fast
        "rank correlation": float(correlation),
        "mean error unpaced": statistics.mean(unpaced),
        "mean error of the memory": statistics.mean(memory),
        "largest of the memory": max(memory),
        "chosen over best measured, worst batch": max(_regret(rows, batch) for batch in few(BATCHES)),
    }


def _regret(rows: list[dict[str, Any]], batch: tuple[int, int]) -> float:
    """Returns by how much the configuration predicted to be fastest is slower than the fastest, at equal pace."""
    own = [row for row in rows if (row["sequences"], row["tokens"]) == batch]
    chosen = min(own, key=lambda row: row["predicted"])
    return _paced(chosen) / min(map(_paced, own)) - 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--budget", type=float, default=200.0, help="seconds of profiling")
    parser.add_argument("--repeats", type=int, default=4)
    options = parser.parse_args()
    restart_in_environment()
    longest = max(length for _, length in BATCHES)
    pace = Pace()
    pace.note()
    profiled = Contender("profile", Profiled, longest, options.budget)
    profiled.wait()
    profile = profiled.report()
    profiled.close()
    pace.note()
    assert isinstance(profile, Profile)
    source = ProfileSource(profile, 2)
    rows = []
    for batch, length in few(BATCHES):
        rows += compare(source, batch, length, options.repeats, pace)
    pace.close()
    print(summary(rows))
    report = {
        "setting": setting(repeats=options.repeats, budget=options.budget),
        "error of the profile": profile.error,
        "summary": summary(rows),
        "rows": rows,
    }
    profile.save(destination(PROFILE))
    print(f"wrote {write('planned', report)} and {destination(PROFILE)}", flush=True)


if __name__ == "__main__":
    main()
