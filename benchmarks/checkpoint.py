"""What saving a checkpoint costs training: in the background, and with training waiting for the disk.

    python -m benchmarks.checkpoint                    # prints and writes results/checkpoint.json

Two ranks train with AdamW. Three ways take turns, each over the same number of steps: no checkpoint, one that is
written during the steps (and waited for at their end, where it isn't ready), one that is waited for before them.
Each save has the same bytes: parameters and both moments. Differences are of medians. The stall is what a rank spends
in `save` and `keep`, when training stands still.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.harness import interleaved, medians, setting, two_ranks, write
from benchmarks.peers import VOCABULARY, model_config
from slipstream import Pipeline, Runtime
from slipstream.checkpoint import Checkpoints, TensorShard
from slipstream.parallel import ParameterShare, RankGroup

NONE, BACKGROUND, WAITING = "no checkpoint", "in the background", "training waits"


class Training:
    """One rank of a pipeline of two, with its optimizer."""

    def __init__(self, length: int) -> None:
        self.pipe = Pipeline.from_config(model_config(length), runtime=Runtime(self_check=False), slices=8)
        self.optimizer = torch.optim.AdamW(self.pipe.parameters(), lr=1e-4)
        self.inputs = torch.randint(0, VOCABULARY, (1, length), generator=torch.Generator().manual_seed(0))
        self.step()  # makes the optimizer's state

    def step(self, before_update: Callable[[], None] = lambda: None) -> None:
        self.optimizer.zero_grad()
        self.pipe.step(self.inputs, self.inputs)
        before_update()
        self.optimizer.step()

    def pieces(self) -> Iterator[TensorShard]:
        """Returns the shards to save. No weight is tied: each is on one rank."""
        for name, parameter in self.pipe.named_parameters():
            yield TensorShard(name, ParameterShare.whole(tuple(parameter.shape)), parameter)
            for key, value in self.optimizer.state[parameter].items():
                yield TensorShard(f"optimizer.{key}.{name}", ParameterShare.whole(tuple(value.shape)), value)


class Saves:
    """Times steps with and without a save among them."""

    def __init__(self, training: Training, folder: Path, steps: int) -> None:
        self.training, self.steps = training, steps
        self.checkpoints = Checkpoints(folder, RankGroup(dist.group.WORLD), keep=1)
        self.checkpoints.prepare()
        self.num_saved = 0
        self.stalls: list[float] = []  # seconds in which a rank did nothing but copy: in `save`, and before the update

    def run(self, save: Callable[[], None] | None, wait: bool) -> float:
        """Returns the seconds of all steps, between two moments when both ranks have arrived."""
        dist.barrier()
        began = time.perf_counter()
        if save is not None:
            save()
            if wait:
                self.checkpoints.wait()
                self.stalls.pop()
        for _ in range(self.steps):
            self.training.step(self.keep)
        self.checkpoints.wait()
        dist.barrier()
        return time.perf_counter() - began

    def save(self) -> None:
        self.num_saved += 1
        began = time.perf_counter()
        self.checkpoints.save(self.num_saved, list(self.training.pieces()), {})
        self.stalls.append(time.perf_counter() - began)

    def keep(self) -> None:
        began = time.perf_counter()
        self.checkpoints.keep()
        if self.stalls:  # after the first update there is nothing left to copy
            self.stalls[-1] += time.perf_counter() - began


def measure(folder: Path, length: int, steps: int, repeats: int) -> dict[str, object]:
    """Returns the report, which is the same on both ranks except for the stall."""
    training = Training(length)
    saves = Saves(training, folder, steps)
    contenders: dict[str, Callable[[], float]] = {
        NONE: lambda: saves.run(None, wait=False),
        BACKGROUND: lambda: saves.run(saves.save, wait=False),
        WAITING: lambda: saves.run(saves.save, wait=True),
    }
    seconds = interleaved(contenders, repeats, warmups=1)
    found = medians(seconds)
    background, waiting = found[BACKGROUND] - found[NONE], found[WAITING] - found[NONE]
    stall = statistics.median(saves.stalls[1:])
    checkpoint = saves.checkpoints.find()
    assert checkpoint is not None
    return {
        "checkpoint_bytes": sum(file.size for file in checkpoint.manifest.files.values()),
        "seconds_of_all_steps": {name: round(value, 4) for name, value in found.items()},
        "stall_seconds": round(stall, 4),
        "stall_over_a_save_that_training_waits_for": round(stall / waiting, 4),
        "a_save_costs_in_the_background": round(background, 4),
        "a_save_costs_when_training_waits": round(waiting, 4),
        "background_over_waiting": round(background / waiting, 4),
        "slows_training_by": {
            BACKGROUND: round(background / found[NONE], 4),
            WAITING: round(waiting / found[NONE], 4),
        },
        "all": {name: [round(value, 4) for value in values] for name, values in seconds.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--length", type=int, default=1024, help="tokens of a step")
    parser.add_argument("--steps", type=int, default=10, help="from one save to the next")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="on the disk to be measured; a temporary one where not given")
    options = parser.parse_args()
    with two_ranks() as is_first:
        group = RankGroup(dist.group.WORLD)
        with tempfile.TemporaryDirectory(dir=options.folder) as own:
            report = measure(Path(group.gather(own)[0]), options.length, options.steps, options.repeats)
            dist.barrier()
        if is_first:
            settings = setting(length=options.length, steps=options.steps, repeats=options.repeats)
            for name, value in report.items():
                print(f"{name:36} {value}")
            print(f"wrote {write('checkpoint', {'setting': settings, **report})}")


if __name__ == "__main__":
    main()
