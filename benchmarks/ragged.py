"""Documents of different lengths on two processes: a plan for every step against padding and against packing.

    python -m benchmarks.ragged                  # prints a table, writes results/ragged.json after every round

The documents are the Python standard library's source files, cut at 8192 tokens. Every contender takes the same ones in
a step. Padding makes all as long as the longest; packing lays them one after the other into rows of one length, with
document masks, and cuts those that don't fit. Each way has its settings, of which one turn each finds the fastest;
these then take turns, except for those that took half as long again as the fastest of all, and ratios are of medians.
Packing in whole rows is what a pipeline without token slices can do. A run takes about 8 minutes.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import LlamaConfig

from benchmarks.harness import costs_kept_in, few, interleaved, medians, restart_in_environment, setting, write
from benchmarks.isolated import Contender, build_all
from benchmarks.ragged_batches import (
    Batch,
    attended,
    batches_of_documents,
    model_config,
    multiplications,
    packed,
    padded,
)
from slipstream import Pipeline, Runtime
from slipstream.planner import Plan
from slipstream.planner.find_plan import find_plan
from slipstream.planner.ragged import StageRates, StepProblem
from slipstream.planner.ragged.sliced_step import SlicedStep
from slipstream.planner.ragged.step_search import lower_bound
from slipstream.schedule import Op, make_schedule
from slipstream.simulator import simulate
from slipstream.timeline import Timeline

_HOPELESS = 1.5  # times the fastest in the first turn: such a way isn't timed again


class Rows:
    """Batches as rows of one length: padded to the longest document, or with `length` packed."""

    def __init__(self, batches: list[Batch], length: int | None, config: LlamaConfig, settings: dict[str, Any]):
        self.batches = [padded(batch) if length is None else packed(batch, length) for batch in batches]
        self.pipe = Pipeline.from_config(config, runtime=Runtime(self_check=False), **settings)
        self.step()
        while self.pipe.is_tuning:
            self.step()

    def step(self) -> float:
        losses = [self.pipe.step(inputs, targets, document_ids=ids) for inputs, targets, ids in self.batches]
        return float(torch.stack(losses).mean())

    def parameters(self) -> Iterator[nn.Parameter]:
        return self.pipe.parameters()

    def report(self) -> Timeline:
        return self.pipe.timeline()


class Documents:
    """Batches as lists of documents, each step planned while the one before runs."""

    def __init__(self, batches: list[Batch], config: LlamaConfig, settings: dict[str, Any]):
        self.batches = batches
        self.pipe = Pipeline.from_config(config, runtime=Runtime(self_check=False), **settings)
        self.step()  # loads what is compiled

    def step(self) -> float:
        losses = []
        for batch, following in pairwise([*self.batches, self.batches[0]]):
            self.pipe.prepare([*map(len, batch)])
            self.pipe.prepare([*map(len, following)])
            losses.append(self.pipe.step(batch, batch))
        return float(torch.stack(losses).mean())

    def parameters(self) -> Iterator[nn.Parameter]:
        return self.pipe.parameters()

    def report(self) -> Timeline:
        return self.pipe.timeline()


def contenders(batches: list[Batch], longest: int, config: LlamaConfig) -> dict[str, list[Contender]]:
    """Returns each way of running documents, in several settings."""
    num_tokens, fewest = sum(map(len, batches[0])), min(map(len, batches))
    num_rows = num_tokens // longest
    auto: dict[str, Any] = {"schedule": "auto", "slices": "auto"}
    measured = auto | {"seq_len": longest}  # from the costs that packed rows are planned by too
    pads = [{"slices": 4, "num_microbatches": fewest}]
    rows = auto | {"seq_len": longest, "num_microbatches": num_rows}
    packs: list[tuple[int, dict[str, Any]]] = [
        (longest, rows),
        (longest, {"slices": 8, "num_microbatches": num_rows}),
    ]
    wholes: list[tuple[int, dict[str, Any]]] = [(longest, {"slices": 1, "num_microbatches": num_rows})]

    def packing(group: str, settings: Sequence[tuple[int, dict[str, Any]]]) -> list[Contender]:
        return [
            Contender(f"{group} to {length}, {way}", Rows, batches, length, config, way)
            for length, way in few(settings)
        ]

    return {
        "documents": [Contender(f"documents, {way}", Documents, batches, config, way) for way in few([measured, auto])],
        "padded": [Contender(f"padded, {way}", Rows, batches, None, config, way) for way in few(pads)],
        "packed": packing("packed", packs),
        "packed whole": packing("packed whole", wholes),
    }


def compare(batches: list[Batch], longest: int, config: LlamaConfig, repeats: int) -> Iterator[dict[str, object]]:
    """Yields after each round what is known so far: tokens per second, and the ratios of ours to the others."""
    groups = contenders(batches, longest, config)
    build_all(each for group in groups.values() for each in group)
    tried = {name: [(each.run(), each) for each in group] for name, group in groups.items()}
    fastest = {name: min(turns, key=lambda turn: turn[0]) for name, turns in tried.items()}
    first = {name: seconds for name, (seconds, _) in fastest.items()}
    running = {name: each for name, (seconds, each) in fastest.items() if seconds < _HOPELESS * min(first.values())}
    for seconds, each in (turn for turns in tried.values() for turn in turns):
        print(f"  {seconds:6.1f} s in the first turn  {each.name}", flush=True)
    ways = {name: each.name for name, (_, each) in fastest.items()}
    known = {
        "first turns": {each.name: seconds for turns in tried.values() for seconds, each in turns},
        "fastest": ways,
        "losses": {name: each.losses for name, (_, each) in fastest.items()},
    }
    idle = {name: each.report().idle_fraction for name, (_, each) in fastest.items()}  # type: ignore[attr-defined]
    for each in (each for turns in tried.values() for _, each in turns):
        if each not in running.values():
            each.close()
    measured: dict[str, list[float]] = {name: [] for name in running}
    for _ in range(repeats):
        for name, seconds in interleaved({name: each.run for name, each in running.items()}, 1, warmups=0).items():
            measured[name] += seconds
        idle |= {name: each.report().idle_fraction for name, each in running.items()}  # type: ignore[attr-defined]
        once = {name: [seconds] for name, seconds in first.items()}
        yield known | ratios(batches, config, once | measured, idle, ways)
    for each in running.values():
        each.close()


def ratios(
    batches: list[Batch],
    config: LlamaConfig,
    measured: dict[str, list[float]],
    idle: dict[str, float],
    ways: dict[str, str],
) -> dict[str, object]:
    """Returns tokens per second, how much faster ours are than each other way, and how much faster they could be.

    Without a moment's idling ours would do their multiplications as fast as the other way does its own while it is
    busy: that is the most that a plan can gain over it, however good.
    """
    middle, others = medians(measured), [name for name in measured if name != "documents"]
    num_tokens = sum(len(document) for batch in batches for document in batch)
    work = {name: multiplications(attended(batches, way), config) for name, way in ways.items()}
    better = min(("padded", "packed"), key=middle.__getitem__)
    over = {name: middle[name] / middle["documents"] for name in others}
    at_most = {name: work[name] / work["documents"] / (1 - idle[name]) for name in others}
    return {
        "documents": [[*map(len, batch)] for batch in batches],
        "tokens per second": {name: num_tokens / seconds for name, seconds in middle.items()},
        "seconds": measured,
        "idle in the last step": idle,
        "multiplications": work,
        "over": over,
        "at most": at_most,
        "over the better of padding and packing": over[better],
        "at most over it": at_most[better],
    }


def planning(num_mixes: int) -> list[dict[str, object]]:
    """Returns how long plans of 64 sequences take to find, of this process's time, and how good they are."""
    random, rows = np.random.default_rng(0), []
    for num_ranks in (2, 4, 8):
        found: list[tuple[float, float, float]] = []
        for _ in range(num_mixes):
            lengths = np.clip(random.lognormal(6.5, 1.2, 64), 16, 8192).astype(int).tolist()
            problem = StepProblem(tuple(lengths), stage_rates(num_ranks), Plan(placement=tuple(range(num_ranks))))
            if not found:
                find_plan(problem)  # compiles
            began = time.process_time()
            plan = find_plan(problem)
            spent = time.process_time() - began
            step = SlicedStep.of(problem, plan.groups, plan.slices)
            assert plan.seconds is not None
            found.append((spent, plan.seconds / lower_bound(problem, step), naive(problem) / plan.seconds))
        spent, bound, over = (median(column) for column in zip(*found, strict=True))
        rows.append({"ranks": num_ranks, "milliseconds": 1e3 * spent, "over its bound": bound, "over naive": over})
    return rows


def stage_rates(num_ranks: int) -> StageRates:
    """Returns rates like those of 8 layers of 512 on a CPU core, with a head that weighs 0.7 layers."""
    layers = 8 / num_ranks
    parts = {Op.F: (1e-3, 1.1e-3 / 100, 4e-9), Op.I: (1e-3, 1.1e-3 / 100, 1e-8), Op.W: (5e-4, 1.1e-3 / 100, 0.0)}
    rates = {op: np.tile(np.array(each) * layers, (num_ranks, 1)) for op, each in parts.items()}
    for op, each in parts.items():
        rates[op][-1, :2] += 0.7 * np.array(each[:2])
    seconds = rates | {Op.B: rates[Op.I] + rates[Op.W]}
    return StageRates(seconds, np.tile([0.0, 3e4 * layers], (num_ranks, 1)), 2048.0, 2e-4, 2e9)


def naive(problem: StepProblem) -> float:
    """Returns the seconds of sequences in their order in 8 groups of as many, in 8 equal slices each, by 1F1B."""
    groups = tuple(tuple(map(int, group)) for group in np.array_split(np.arange(len(problem.lengths)), 8))
    rows = [sum(problem.lengths[number] for number in group) for group in groups]
    slices = [[row // 8 + (index < row % 8) for index in range(8)] for row in rows]
    step = SlicedStep.of(problem, groups, slices)
    return simulate(make_schedule("1f1b", problem.num_ranks, 8, 8), step.costs()).makespan


def show(row: dict[str, object]) -> None:
    for name, rate in sorted(row["tokens per second"].items(), key=lambda item: -item[1]):  # type: ignore[attr-defined]
        print(f"  {rate:8.0f} tokens/s  {name}")
    for group, ratio in row["over"].items():  # type: ignore[attr-defined]
        print(f"  {ratio:8.3f} x over {group}, of at most {row['at most'][group]:.3f}", flush=True)  # type: ignore[index]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--longest", type=int, default=8192, help="tokens at which documents are cut")
    parser.add_argument("--tokens", type=int, default=16384, help="of a step: a multiple of --longest")
    parser.add_argument("--batches", type=int, default=1, help="steps that are timed together")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--costs", type=Path, help="folder in which measured costs are kept; default: a new one")
    options = parser.parse_args()
    restart_in_environment()
    plans = planning(len(few(range(9), 2)))
    for each in plans:
        print(", ".join(f"{name} {value:.3g}" for name, value in each.items()), flush=True)
    config = model_config(options.longest, options.layers)
    steps = batches_of_documents(options.batches, options.tokens, options.longest)
    print(f"documents of {[[*map(len, batch)] for batch in steps]} tokens", flush=True)
    facts = {"setting": setting(repeats=options.repeats, layers=options.layers), "planning": plans}
    with costs_kept_in(options.costs):
        for row in compare(steps, options.longest, config, options.repeats):
            show(row)
            print(f"wrote {write('ragged', facts | row)}", flush=True)


if __name__ == "__main__":
    main()
