"""What "auto" plans for four models, against grids of settings that were made by hand.

    python -m benchmarks.auto_grid --model deep     # run it again until it says that it is done

Two processes that stay build one setting of the grid after the other and time a few of its steps. The best ones, the
default and "auto" then take turns as contenders, each in its own processes, next to one process. After --minutes a run
writes what it has to results/auto_grid.json, and the next run goes on from there, if sources and machine are the same.
Once all are timed, further runs add rounds, as long as "auto" has the same plan: with --costs it measures once for all
runs. The other models' rows stay as they are: each says of which sources and on which machine it is.

With --quick every setting has one timed step, and the best six take part in the rounds, which decide; the row says so.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.auto_grid_models import DEFAULT, MODELS, GridModel, grid
from benchmarks.contenders import Ours, OwnReport, Unsliced
from benchmarks.harness import (
    costs_kept_in,
    few,
    interleaved,
    is_trial,
    medians,
    recorded,
    restart_in_environment,
    setting,
    write,
)
from benchmarks.isolated import Contender, build_all
from benchmarks.records import is_current, provenance
from slipstream import Schedule
from slipstream.errors import SlipstreamError

NAME = "auto_grid"
# By --quick: the timed steps of a setting, after one that warms up, and the settings that take turns with "auto"
SCREENINGS = {False: {"timed steps": 2, "best": 4}, True: {"timed steps": 1, "best": 6}}
_MACHINE = ("cpu", "cores", "threads_per_process", "python", "torch", "transformers", "environment")  # of a setting
SLOW = 1.3  # times the fastest so far: a setting whose first step takes longer is not timed again
STEPS = 2  # of a turn, of which the first doesn't count
AUTO = "auto"
ALONE = ("one process, unsliced", "one process, 4 slices")
Settings = Mapping[str, Any]


class Screening:
    """Settings built one after the other in the same processes, each for a few timed steps."""

    def __init__(self, model_name: str, names: Sequence[str], timed_steps: int, until: float) -> None:
        """`until` is when the last one may begin, on the clock of `time.time`."""
        model = MODELS[model_name]
        settings = grid(model)
        self.found: dict[str, dict[str, Any]] = {}
        self._fastest, self._timed_steps = float("inf"), timed_steps
        for name in names:
            if self._agreed(time.time()) > until:
                break
            try:
                self.found[name] = self._screen(model, settings[name])
            except SlipstreamError as error:
                self.found[name] = {"refused": str(error)}
            if dist.get_rank() == 0:
                print(f"{name}: {self.found[name].get('seconds', 'refused')}", file=sys.stderr, flush=True)
            gc.collect()
            self._renew_group()

    def _screen(self, model: GridModel, settings: Settings) -> dict[str, Any]:
        ours = Ours(model.config(), 1, model.length, settings)
        seconds = [self._seconds(ours)]
        if seconds[0] < SLOW * self._fastest:
            seconds = [self._seconds(ours) for _ in range(self._timed_steps)]
        self._fastest = min(self._fastest, *seconds)
        order = str(ours.pipe.order)
        return {"seconds": min(seconds), "slices": ours.pipe.slices(model.length), "order": order}

    def _seconds(self, ours: Ours) -> float:
        for parameter in ours.parameters():
            parameter.grad = None
        dist.barrier()
        began = time.perf_counter()
        ours.step()
        dist.barrier()
        return self._agreed(time.perf_counter() - began)

    def _agreed(self, seconds: float) -> float:
        """Returns the largest of both ranks."""
        each = torch.tensor(seconds, dtype=torch.float64)
        dist.all_reduce(each, dist.ReduceOp.MAX)
        return float(each)

    def _renew_group(self) -> None:
        """Ends the groups of the last pipeline: the threads of many would take time from the next ones."""
        store = [tempfile.mkdtemp(prefix="slipstream-benchmark-")]
        dist.broadcast_object_list(store)
        rank, size = dist.get_rank(), dist.get_world_size()
        dist.destroy_process_group()
        dist.init_process_group("gloo", init_method=f"file://{store[0]}/store", rank=rank, world_size=size)

    def step(self) -> None:
        return None

    def parameters(self) -> Iterator[nn.Parameter]:
        return iter(())

    def report(self) -> dict[str, dict[str, Any]]:
        return self.found


def screen(model_name: str, row: dict[str, Any], minutes: float) -> bool:
    """Times the settings of the grid that the row lacks; returns whether it has all of them now."""
    names = few([*grid(MODELS[model_name])], 3)
    left = [name for name in names if name not in row["grid"]]
    if left:
        timed_steps = row["screening"]["timed steps"]
        contender = Contender("grid", Screening, model_name, left, timed_steps, time.time() + 60 * minutes)
        contender.wait()
        row["grid"] |= contender.report()  # type: ignore[operator]
        contender.close()
    return set(names) <= row["grid"].keys()


def best_of(model: GridModel, row: dict[str, Any]) -> dict[str, Settings]:
    """Returns the default and the best settings of the grid; a searched order is given as it was found."""
    timed = {name: found for name, found in row["grid"].items() if "seconds" in found}
    names = few(sorted(timed, key=lambda name: timed[name]["seconds"])[: row["screening"]["best"]])
    settings = grid(model)
    chosen = {}
    for name in dict.fromkeys([DEFAULT, *names]):
        chosen[name] = dict(settings[name])
        if settings[name]["schedule"] in ("auto", "auto-v"):
            chosen[name] |= {"schedule": Schedule.parse(timed[name]["order"]), "slices": timed[name]["slices"]}
            del chosen[name]["stages_per_rank"]
    return chosen


def rounds(model: GridModel, row: dict[str, Any], until: float) -> None:
    """Adds rounds of all contenders to the row, until it is time to end."""
    config, length = model.config(), model.length
    settings: dict[str, Settings] = {AUTO: {"schedule": "auto", "slices": "auto"}, **best_of(model, row)}
    contenders = [Contender(name, Ours, config, 1, length, each) for name, each in settings.items()]
    whole, sliced = ALONE
    contenders.append(Contender(whole, Unsliced, config, 1, length, num_processes=1))
    in_slices = {"slices": 4, "schedule": "gpipe"}
    contenders.append(Contender(sliced, Ours, config, 1, length, in_slices, num_processes=1))
    build_all(contenders)
    run, rest = ({each.name: getattr(each, what) for each in contenders} for what in ("run", "rest"))
    seconds: dict[str, list[float]] = {}
    longest = 0.0
    while not longest or time.time() + longest < until:
        began = time.time()
        for name, found in interleaved(run, repeats=1, warmups=0, steps=STEPS, rests=rest).items():
            seconds.setdefault(name, []).extend(found)
        longest = max(longest, time.time() - began)
        if is_trial():
            break
    report = contenders[0].report()
    losses = [loss for each in contenders for loss in each.losses]
    assert max(losses) - min(losses) < 1e-3, losses
    for contender in contenders:
        contender.close()
    assert isinstance(report, OwnReport)
    if report.order == row.get("judged", {}).get("order") and row["seconds"].keys() == seconds.keys():
        seconds = {name: [*row["seconds"][name], *found] for name, found in seconds.items()}
    row["seconds"], row["judged"] = seconds, judged(seconds, report)


def judged(seconds: Mapping[str, list[float]], report: OwnReport) -> dict[str, Any]:
    """Returns what "auto" reaches against the others, in ratios of medians, and how well it was predicted."""
    middle = medians(seconds)
    auto = middle[AUTO]
    by_hand = [name for name in seconds if name not in (AUTO, *ALONE)]
    best = min(by_hand, key=middle.__getitem__)
    plan = report.planned
    assert plan is not None
    return {
        "rounds": len(seconds[AUTO]),
        "medians": middle,
        "best of the grid": best,
        "over the best of the grid": middle[best] / auto,
        "over the default": middle[DEFAULT] / auto,
        "rounds behind the default": sum(a > b for a, b in zip(seconds[AUTO], seconds[DEFAULT], strict=True)),
        "over one process": min(middle[name] for name in ALONE) / auto,
        "planned": plan.seconds,
        "planned over measured": plan.seconds / auto,
        "with own times": plan.with_own_times,
        "layers": report.layers,
        "slices": report.slices,
        "order": report.order,
        "table": plan.table.splitlines(),
    }


def show(name: str, row: Mapping[str, Any]) -> None:
    found = row["judged"]
    print(f"\n{name}: {row['what']}, {row['tokens']} tokens, {found['rounds']} rounds, a grid of {len(row['grid'])}")
    timed, best = row["screening"].values()
    print(f"  the {best} best of the grid by {timed} timed steps take part in the rounds")
    for contender, seconds in sorted(found["medians"].items(), key=lambda item: item[1]):
        print(f"  {seconds:7.3f} s  {contender}")
    print("\n".join(found["table"]))
    for what in ("over the best of the grid", "over the default", "over one process", "planned over measured"):
        print(f"  {found[what]:7.3f}  {what}")
    print(f"  {found['with own times']:7.3f} s  simulated with the run's own times", flush=True)


def summary(models: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    done = [row["judged"] for row in models.values() if "judged" in row]
    return {
        "models": len(done),
        "older": [name for name, row in models.items() if not is_current(row)],
        "least over the best of the grid": min(each["over the best of the grid"] for each in done),
        "least over the default": min(each["over the default"] for each in done),
        "mean error of the plan": statistics.mean(abs(each["planned over measured"] - 1) for each in done),
    }


def row_of(name: str, models: Mapping[str, dict[str, Any]], quick: bool) -> dict[str, Any]:
    """Returns the recorded row of a model if sources, machine and versions are the same and it was screened alike; else
    a new one."""
    model, here = MODELS[name], setting()
    new = {"of": provenance(NAME), "setting": here, "what": model.what, "tokens": model.length}
    new |= {"screening": SCREENINGS[quick], "grid": {}}
    row = models.get(name)
    if row is None:
        return new
    same_machine = all(row["setting"].get(key) == here[key] for key in _MACHINE)
    if is_current(row) and same_machine and row["screening"] == new["screening"]:
        return row
    print(f"the row of {name} is of other sources, another machine or another screening: it begins anew", flush=True)
    return new


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=[*MODELS], default="deep")
    parser.add_argument("--minutes", type=float, default=8.0, help="after which a run ends")
    parser.add_argument("--costs", type=Path, help="folder that keeps what was measured; default: measured in each run")
    parser.add_argument("--quick", action="store_true", help="one timed step of each setting, six in the rounds")
    options = parser.parse_args()
    restart_in_environment()
    until = time.time() + 60 * options.minutes
    models = (recorded(NAME) or {}).get("models", {})
    model = MODELS[options.model]
    row = models[options.model] = row_of(options.model, models, options.quick)
    with costs_kept_in(options.costs):
        is_screened = screen(options.model, row, 0.8 * options.minutes)
        has_time = is_trial() or until - time.time() > 0.5 * 60 * options.minutes
        if is_screened and has_time:
            rounds(model, row, until)
            show(options.model, row)
    report: dict[str, object] = {"models": models}
    if "judged" in row:
        report["summary"] = summary(models)
        print(report["summary"])
    print(f"wrote {write(NAME, report)}: {'done' if 'judged' in row else 'run it again'}", flush=True)


if __name__ == "__main__":
    main()
