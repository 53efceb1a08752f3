"""Our step over that of torch.distributed.pipelining, on ResNet-50: two processes, the same split and microbatches.

    python -m benchmarks.gpipe.peers                 # prints a table, writes results/gpipe_peers.json

Both run the same layers with one schedule, and batch norms that see a microbatch. Four pairs of processes take steps in
turns, ours and theirs one after the other, the first one changing; the ratio of each such pair is one measurement.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from examples.gpipe.resnet import resnet
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.nn import functional

from benchmarks.gpipe.layer_times import trace_of
from benchmarks.harness import restart_in_environment, setting, write
from benchmarks.isolated import Contender
from slipstream import Pipeline, partition_layers
from slipstream.pipeline.families.layer_sequence import counted_costs
from slipstream.sequential import flatten_layers

SCHEDULES = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
NUM_MICROBATCHES = 8
LIMIT = 1.02


def batch(rows: int, image_size: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(rows, 3, image_size, image_size, generator=generator)
    return images, torch.randint(1000, (rows,), generator=generator)


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return resnet()


def split(rows: int, image_size: int) -> list[int]:
    """Returns the partition of both contenders, by counted operations."""
    _, trace, _ = trace_of(model(), batch(rows // NUM_MICROBATCHES, image_size)[0])
    return partition_layers(counted_costs(trace), 2)


class Ours:
    """Slipstream's Pipeline as a contender."""

    def __init__(self, schedule: str, rows: int, image_size: int) -> None:
        self.batch = batch(rows, image_size)
        self.pipe = Pipeline(model(), schedule, NUM_MICROBATCHES, partition=split(rows, image_size))

    def step(self) -> float | None:
        return float(self.pipe.step(*self.batch))

    def parameters(self) -> Iterable[nn.Parameter]:
        return self.pipe.parameters()

    def report(self) -> object:
        return gradient_norms(self.pipe.parameters())


class Theirs:
    """torch's PipelineStage of the same layers as a contender."""

    def __init__(self, schedule: str, rows: int, image_size: int) -> None:
        self.images, self.targets = batch(rows, image_size)
        self.rank, (first, _) = dist.get_rank(), split(rows, image_size)
        layers = [layer.module for layer in flatten_layers(model())]
        self.layers = nn.Sequential(*(layers[:first] if self.rank == 0 else layers[first:]))
        stage = PipelineStage(self.layers, self.rank, 2, torch.device("cpu"))
        self.runner = SCHEDULES[schedule](stage, NUM_MICROBATCHES, loss_fn=functional.cross_entropy)

    def step(self) -> float | None:
        losses: list[Tensor] = []
        if self.rank == 0:
            self.runner.step(self.images)
        else:
            self.runner.step(target=self.targets, losses=losses)
        return float(torch.stack(losses).mean()) if losses else None

    def parameters(self) -> Iterable[nn.Parameter]:
        return self.layers.parameters()

    def report(self) -> object:
        return gradient_norms(self.layers.parameters())


def gradient_norms(parameters: Iterable[nn.Parameter]) -> list[float]:
    """Returns the gradients in the order of the layers."""
    return [float(parameter.grad.norm()) for parameter in parameters if parameter.grad is not None]


def ratios(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    return [a / b for a, b in zip(ours, theirs, strict=True)]


def interval(values: Sequence[float], resamples: int = 10_000) -> tuple[float, float, float]:
    """Returns the geometric mean of ratios and the ends of its 95% interval, by bootstrap."""
    logs, draw = [math.log(value) for value in values], random.Random(0)
    means = sorted(statistics.fmean(draw.choices(logs, k=len(logs))) for _ in range(resamples))
    low, high = means[int(0.025 * resamples)], means[int(0.975 * resamples)]
    return math.exp(statistics.fmean(logs)), math.exp(low), math.exp(high)


def paired(ours: Contender, theirs: Contender, index: int) -> tuple[float, float]:
    """Returns the seconds of a step of each contender; which one goes first alternates."""
    if index % 2:
        second = theirs.run()
        return ours.run(), second
    return ours.run(), theirs.run()


def check_alike(ours: Contender, theirs: Contender) -> None:
    """Checks that losses and rank 0's gradients are the same except for rounding."""
    mine, other = ours.report(), theirs.report()
    assert isinstance(mine, list)
    assert isinstance(other, list)
    pairs = [(ours.losses[-1], theirs.losses[-1]), *zip(mine, other, strict=True)]
    for a, b in pairs:
        assert math.isclose(a, b, rel_tol=1e-2, abs_tol=1e-4), f"{a} of ours, {b} of theirs: not the same step"


def compare(
    schedules: Sequence[str], rows: int, image_size: int, repeats: int, warm_ups: int
) -> list[dict[str, object]]:
    contenders = {
        name: (
            Contender(f"ours, {name}", Ours, name, rows, image_size),
            Contender(f"theirs, {name}", Theirs, name, rows, image_size),
        )
        for name in schedules
    }
    for pair in contenders.values():
        for contender in pair:
            contender.wait()
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in schedules}
    for index in range(warm_ups + repeats):
        for name, pair in contenders.items():
            found = paired(*pair, index)
            if index >= warm_ups:
                seconds[name].append(found)
        print(f"round {index + 1} of {warm_ups + repeats}: {_line(seconds)}", flush=True)
    for pair in contenders.values():
        check_alike(*pair)
        for contender in pair:
            contender.close()
    return [row(name, found) for name, found in seconds.items()]


def _line(seconds: dict[str, list[tuple[float, float]]]) -> str:
    if not all(seconds.values()):
        return "warm-up"
    return "   ".join(
        f"{name} {found[-1][0]:.3f} s over {found[-1][1]:.3f} s, mean ratio {_mean(found):.4f}"
        for name, found in seconds.items()
    )


def _mean(found: Sequence[tuple[float, float]]) -> float:
    return statistics.geometric_mean([a / b for a, b in found])


def row(name: str, seconds: Sequence[tuple[float, float]]) -> dict[str, object]:
    ours, theirs = [a for a, _ in seconds], [b for _, b in seconds]
    mean, low, high = interval(ratios(ours, theirs))
    return {
        "schedule": name,
        "ours": statistics.median(ours),
        "theirs": statistics.median(theirs),
        "ratio": mean,
        "interval": [low, high],
        "below the limit": high < LIMIT,
        "all": [[round(a, 4), round(b, 4)] for a, b in seconds],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=16, help="images of a batch, over 8 microbatches")
    parser.add_argument("--image-size", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--schedules", nargs="+", choices=list(SCHEDULES), default=list(SCHEDULES))
    options = parser.parse_args()
    restart_in_environment()
    rows = compare(options.schedules, options.rows, options.image_size, options.repeats, warm_ups=3)
    for each in rows:
        print(
            "{schedule}: ours {ours:.3f} s, theirs {theirs:.3f} s, ratio {ratio:.4f}, 95% in {interval}".format(**each)
        )
    settings = setting(**{name: value for name, value in vars(options).items() if name != "schedules"})
    print(f"wrote {write('gpipe_peers', {'setting': settings, 'limit': LIMIT, 'rows': rows})}")


if __name__ == "__main__":
    main()
