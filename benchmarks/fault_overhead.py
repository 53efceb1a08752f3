"""What finding faults costs a run in which there are none: everything that is on by default, on and off in turns.

    python -m benchmarks.fault_overhead             # prints a table, writes results/fault_overhead.json

Two ranks train by the loop of `slipstream train`. In every second block of some steps the watchers and their hub are
stopped, shorter than what counts as silence, and told nothing, and nobody agrees on batches, on bad numbers, or looks
for slow ranks. Where it is on, the seconds inside the added calls count too: on the rank that spends least in them, as
another may wait there for what it would wait for a moment later. The copies of two replicas are compared only before a
checkpoint, which is measured apart.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch

from benchmarks.harness import is_trial, setting, write
from benchmarks.soak.soaked_run import is_helper
from slipstream.launch import Progress, launch_ranks
from slipstream.pipeline.agreement import BatchAgreement
from slipstream.train import training_rank
from slipstream.train.bad_steps import BadSteps
from slipstream.train.config.config_values import parse_config
from slipstream.train.corruption import StateCheck
from slipstream.train.folder_lock import FolderLock
from slipstream.train.metrics.stragglers import Stragglers
from slipstream.train.preflight import preflight
from slipstream.train.trainer import Trainer
from slipstream.watchdog import watched_rank

BLOCK = 5  # steps
UNCOUNTED = 4  # blocks at the beginning


class Switch:
    """Turns this rank's search for faults on and off, and takes the time of its calls."""

    def __init__(self) -> None:
        self.is_on = True
        self.inside = 0.0  # seconds of the step
        self.compared: list[float] = []  # seconds of each comparison of copies
        self.rows: list[dict[str, Any]] = []
        self.watching = 0.0  # seconds that the watcher has computed, and on rank 0 the hub
        self._watch: Any = None

    def install(self) -> None:
        """Puts itself in front of what is on by default."""
        self._guard(BatchAgreement, "_start", sum_over_replicas)
        self._guard(BatchAgreement, "finish", lambda _agreement: 0)
        self._guard(BadSteps, "accepts", lambda _steps, _loss, norm: math.isfinite(norm))
        self._guard(BadSteps, "act", lambda *_: None)
        self._guard(StateCheck, "before_update", lambda _check: None)
        self._guard(StateCheck, "after_step", lambda _check, _step: False)
        self._guard(Stragglers, "add", lambda *_: [])
        compare, step, run = StateCheck.compare, Trainer._train_step, Trainer.run

        def timed_compare(check: StateCheck) -> bool:
            began = time.perf_counter()
            result = compare(check)
            self.compared.append(time.perf_counter() - began)
            return result

        def timed_step(trainer: Trainer, number: int) -> Any:
            self.turn(number // BLOCK % 2 == 0)
            self.inside, began = 0.0, time.perf_counter()
            result = step(trainer, number)
            row = {"step": number, "on": self.is_on, "seconds": time.perf_counter() - began, "inside": self.inside}
            self.rows.append(row)
            return result

        def whole_run(trainer: Trainer) -> None:
            try:
                run(trainer)
            finally:
                self.turn(True)  # or the watchers would be left
                used = [each.cpu_times() for each in self._helpers()]
                self.watching = sum(each.user + each.system for each in used)

        for owner, name, function in (
            (StateCheck, "compare", timed_compare),
            (Trainer, "_train_step", timed_step),
            (Trainer, "run", whole_run),
        ):
            setattr(owner, name, function)

    def turn(self, on: bool) -> None:
        """Turns it on or off between two steps."""
        if on == self.is_on:
            return
        self.is_on = on
        if on:
            watched_rank._watch = self._watch
        else:
            self._watch, watched_rank._watch = watched_rank._watch, None
        for each in self._helpers():
            each.resume() if on else each.suspend()

    def _helpers(self) -> list[psutil.Process]:
        """Returns the process that watches this rank, and on rank 0 the launcher's hub."""
        children = psutil.Process().children()
        if os.environ["RANK"] == "0":
            children += psutil.Process(os.getppid()).children()
        return [each for each in children if is_helper(each, "watcher") or is_helper(each, "hub")]

    def _guard(self, owner: type, name: str, without: Callable[..., Any]) -> None:
        """Lets a method do nothing but `without` where the switch is off, and takes its time where it is on."""
        whole = getattr(owner, name)

        def method(*arguments: Any) -> Any:
            if not self.is_on:
                return without(*arguments)
            began, before = time.perf_counter(), self.inside
            try:
                return whole(*arguments)
            finally:
                self.inside = before + time.perf_counter() - began  # one may call another

        setattr(owner, name, method)


def sum_over_replicas(agreement: BatchAgreement, _batch: object, own: Any) -> Any:
    """Returns the totals with the valid targets of all replicas, which the agreement sums on its way."""
    return own._replace(num_valid=int(agreement._ranks.data.sum(torch.tensor([own.num_valid]))))


def run_rank() -> None:
    """Trains as one rank, and writes what it measured next to the run."""
    switch = Switch()
    switch.install()
    training_rank.main()
    output = Path(sys.argv[1]).parent
    rows = {"steps": switch.rows, "compared": switch.compared, "watching": switch.watching}
    (output / f"overhead-{os.environ['RANK']}.json").write_text(json.dumps(rows))


def train(folder: Path, options: argparse.Namespace, replicas: bool) -> list[dict[str, Any]]:
    """Trains on two ranks, stages or replicas; returns what each measured."""
    output = folder / ("replicas" if replicas else "stages")
    text = folder / "text.txt"
    text.write_text("".join(f"{number}: the quick brown fox jumps over the lazy dog.\n" for number in range(9000)))
    size = options.hidden_size
    model = {"model_type": "llama", "hidden_size": size, "intermediate_size": 3 * size, "vocab_size": 512}
    model |= {"num_hidden_layers": options.layers, "num_attention_heads": 4, "max_position_embeddings": 4096}
    pipeline = {"num_ranks": 1} if replicas else {"num_ranks": 2, "slices": 4, "schedule": "1f1b"}
    steps = 2 * BLOCK * (options.blocks + UNCOUNTED // 2)
    config = parse_config(
        {
            "model": {"config": model},
            "data": {"files": [str(text)], "validation_fraction": 0},
            "pipeline": pipeline,
            "parallel": {"data": 2 if replicas else 1},
            "runtime": {"self_check": False},
            "training": {"output": str(output), "seq_len": options.length, "steps": steps}
            | {"batch_size": 2 if replicas else 1, "stall_limit": 600},
            "checkpoint": {"every": 3 * BLOCK} if replicas else {"every": 0},
        }
    )
    inputs = preflight(config, Progress(None))
    with FolderLock(output, print) as lock:
        inputs.write()
        launch_ranks("benchmarks.fault_overhead", [str(output / "config.yaml"), lock.key], 2)
    measured = [json.loads((output / f"overhead-{rank}.json").read_text()) for rank in range(2)]
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    measured[0]["saves"] = [line["save_seconds"] for line in lines if "save_seconds" in line]
    measured[0]["alarms"] = sum("stragglers" in line for line in lines)
    return measured


def summary(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the medians of steps with and without, the median ratio of neighbouring blocks, the seconds inside the
    added calls, how often a rank was called slow, and the cores' share that the watchers take."""
    pairs = list(zip(*(rank["steps"] for rank in ranks), strict=True))[UNCOUNTED * BLOCK - 1 :]
    seconds: dict[bool, list[float]] = {True: [], False: []}
    blocks: dict[int, list[float]] = {}
    for rows in pairs:
        step = max(row["seconds"] for row in rows)
        seconds[rows[0]["on"]].append(step)
        blocks.setdefault(rows[0]["step"] // BLOCK, []).append(step)
    medians = {number: statistics.median(steps) for number, steps in blocks.items()}
    ratios = [
        2 * medians[number] / (medians[number - 1] + medians[number + 1])  # so that a drift cancels
        for number in medians
        if number % 2 == 0 and {number - 1, number + 1} <= medians.keys()
    ]
    time_with = sum(row["seconds"] for row in ranks[0]["steps"] if row["on"])
    inside = [min(row["inside"] for row in rows) for rows in pairs if rows[0]["on"]]
    return {
        "steps_with": len(seconds[True]),
        "alarms": ranks[0]["alarms"],
        "with": statistics.median(seconds[True]),
        "without": statistics.median(seconds[False]),
        "ratio": statistics.median(ratios),
        "ratios": ratios,
        "watching": sum(rank["watching"] for rank in ranks) / time_with,
        "inside": statistics.median(inside),
    }


def standard_error(values: list[float]) -> float:
    """Returns that of a median, were the values normal."""
    return 1.2533 * statistics.stdev(values) / math.sqrt(len(values))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--length", type=int, default=384)  # steps of 100 ms
    parser.add_argument("--hidden-size", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--blocks", type=int, default=3 if is_trial() else 100, help="pairs of them, of 5 steps each")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="slipstream-overhead-") as name:
        measured = {kind: train(Path(name), options, kind == "replicas") for kind in ("stages", "replicas")}
    figures = {kind: summary(ranks) for kind, ranks in measured.items()}
    for kind, found in figures.items():
        print(
            f"two {kind}: {1e3 * found['with']:.1f} ms with, {1e3 * found['without']:.1f} ms without; median of "
            f"neighbouring blocks {found['ratio']:.4f} (standard error {standard_error(found['ratios']):.4f});\n"
            f"  {1e3 * found['inside']:.2f} ms inside the added calls, {found['inside'] / found['without']:.2%}; "
            f"watchers and hub compute {found['watching']:.2%} of a core's time; a rank called slow {found['alarms']} "
            f"times in {found['steps_with']} steps"
        )
    compared, saves = (statistics.median(measured["replicas"][0][each]) for each in ("compared", "saves"))
    print(f"comparing copies before a checkpoint: {1e3 * compared:.1f} ms; the training stands {1e3 * saves:.1f} ms")
    copies = {"comparing_copies": compared, "saving": saves}
    print(write("fault_overhead", {"setting": setting(**vars(options)), "figures": figures, "copies": copies}))


if __name__ == "__main__":
    run_rank() if "RANK" in os.environ else main()
