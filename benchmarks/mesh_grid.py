"""The mesh that a run chooses by itself, against the best pipeline, two replicas, and DDP of PyTorch.

    python -m benchmarks.mesh_grid --rounds 1 # long, on two quiet cores; a later run does what is left

For 1, 2, 4, 8 and 16 sequences of 512 to 4096 tokens on two processes, each contender runs in its own processes, and
all take turns; a step ends with AdamW. The pipeline and the replicas are planned from measured costs, each on its
mesh; the mesh is chosen by the planned steps as `slipstream train --pp=auto --dp=auto` does. DDP takes each replica's
sequences one after the other, and sums gradients with the last. A case is right where the chosen one is at least 0.98
times as fast as the fastest of all.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.optim import AdamW

from benchmarks.contenders import Replicas, tokens
from benchmarks.harness import (
    costs_kept_in,
    few,
    interleaved,
    is_trial,
    medians,
    record,
    restart_in_environment,
    setting,
    write,
)
from benchmarks.isolated import Contender, build_all
from benchmarks.peers import model_config
from slipstream import Pipeline, Runtime, make_mesh
from slipstream.cost import LONE_UPDATE
from slipstream.pipeline.pipeline_options import ExpectedBatch
from slipstream.planner.search import GlobalBatch, evaluate
from slipstream.train.mesh_choice import preferred

NAME = "mesh_grid"
SEQUENCES, LENGTHS = (1, 2, 4, 8, 16), (512, 1024, 2048, 4096)
PIPELINE, REPLICAS, DDP = "pipeline", "two replicas", "DDP"
RANKS = {PIPELINE: 2, REPLICAS: 1}  # of the pipeline
GOAL = 0.98
MEMORY = 7e9  # bytes of a rank, as a run knows it: the processes of the other contenders are there too
STEPS = 3  # of a turn, of which the first doesn't count: it pays for page faults and for what others left in caches


def _optimizer(parameters: Iterator[nn.Parameter]) -> AdamW:
    # The weights stay as they are, so that the losses of all contenders can be compared.
    return AdamW(parameters, lr=0.0)


class TrainedReplicas(Replicas):
    """DDP of PyTorch with AdamW."""

    def __init__(self, batch: int, length: int) -> None:
        super().__init__(model_config(length), batch, length)
        self.optimizer = _optimizer(self.parameters())

    def step(self) -> float:
        loss = super().step()
        self.optimizer.step()
        return loss


class Planned:
    """A pipeline, or two replicas of the model, planned from measured costs; one sequence is a microbatch."""

    def __init__(self, batch: int, length: int, replicas: int) -> None:
        config = model_config(length)
        rows = batch // replicas
        first = dist.get_rank() * rows if replicas > 1 else 0
        self.inputs = tokens(config, batch, length)[first : first + rows]
        self._replicas = replicas
        self.pipe = Pipeline.from_config(
            config,
            schedule="auto",
            slices="auto",
            num_microbatches=rows,
            seq_len=ExpectedBatch(length, device_memory=MEMORY),
            mesh=make_mesh(pp=2 // replicas, dp=replicas),
            runtime=Runtime(self_check=False),
        )
        self.optimizer = _optimizer(self.pipe.parameters())

    def step(self) -> float:
        loss = self.pipe.step(self.inputs, self.inputs)
        self.optimizer.step()
        return float(loss)

    def parameters(self) -> Iterator[nn.Parameter]:
        return self.pipe.parameters()

    def report(self) -> dict[str, Any]:
        plan = self.pipe.plan
        assert plan is not None
        assert plan.costs is not None
        num_sequences, length = self.inputs.shape
        batch = GlobalBatch(length, self._replicas * num_sequences)
        step = evaluate(plan.plan, plan.costs, batch, LONE_UPDATE.state)
        return {"planned": step.seconds, "slices": [*plan.slices], "table": plan.table().splitlines()}


def case(batch: int, length: int, rounds: int) -> dict[str, Any]:
    """Runs the contenders of a case in turns; one sequence has no replicas."""
    contenders = [Contender(PIPELINE, Planned, batch, length, 1)]
    if batch > 1:
        contenders.append(Contender(REPLICAS, Planned, batch, length, 2))
        contenders.append(Contender(DDP, TrainedReplicas, batch, length))
    build_all(contenders)
    run, rest = ({each.name: getattr(each, what) for each in contenders} for what in ("run", "rest"))
    seconds = interleaved(run, repeats=1 if is_trial() else rounds, warmups=0, steps=STEPS, rests=rest)
    reports = {each.name: each.report() for each in contenders}
    losses = [loss for each in contenders for loss in each.losses]
    assert max(losses) - min(losses) < 1e-3, losses
    for contender in contenders:
        contender.close()
    return {"sequences": batch, "tokens": length, "seconds": seconds} | judged(seconds, reports)


def judged(seconds: Mapping[str, Sequence[float]], reports: Mapping[str, Any]) -> dict[str, Any]:
    """Returns which mesh is chosen, by the planned steps, and what it reaches against the fastest, by medians."""
    middle = medians({name: [*values] for name, values in seconds.items()})
    plans = {name: report for name, report in reports.items() if report is not None}
    chosen = [*plans][preferred([(plan["planned"], RANKS[name]) for name, plan in plans.items()])]
    over = min(middle.values()) / middle[chosen]
    return {"chosen": chosen, "over the fastest": over, "right": over >= GOAL, "medians": middle, "plans": plans}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3, help="turns of each contender that count")
    parser.add_argument("--costs", type=Path, help="folder that keeps what was measured; default: measured in each run")
    parser.add_argument("--sequences", type=int, nargs="*", default=SEQUENCES)
    parser.add_argument("--tokens", type=int, nargs="*", default=LENGTHS)
    options = parser.parse_args()
    restart_in_environment()
    rows: list[dict[str, Any]] = [*(record(NAME) or {}).get("rows", [])]
    done = {(row["sequences"], row["tokens"]) for row in rows}
    # most sequences per trial: with one there is but a pipeline
    sizes = [(n, length) for length in options.tokens for n in options.sequences if (n, length) not in done]
    with costs_kept_in(options.costs):
        for batch, length in few(sizes[1:] if is_trial() else sizes):
            rows.append(case(batch, length if not is_trial() else 128, options.rounds))
            last = rows[-1]
            times = ", ".join(f"{name} {value:.3f} s" for name, value in last["medians"].items())
            print(f"{batch} x {length}: {last['chosen']}, {last['over the fastest']:.3f}; {times}", file=sys.stderr)
            summary = {
                "least": min(row["over the fastest"] for row in rows),
                "right": all(row["right"] for row in rows),
            }
            path = write(NAME, {"setting": setting(rounds=options.rounds), "summary": summary, "rows": rows})
    print(f"wrote {path}: {summary}")


if __name__ == "__main__":
    main()
