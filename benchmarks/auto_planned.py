"""How close the step that "auto" plans comes to those that it then takes, for six models on two processes.

    python -m benchmarks.auto_planned     # about eight minutes for each start; writes results/auto_planned.json

Each model is started several times, in new processes which measure what its parts cost, plan, and take some steps. The
models take turns. A start's error is that of the planned seconds against the median of its steps. The rest of the error
is what remains where the same order is simulated with the times that its actions took in the run.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.auto_grid_models import MODELS, GridModel
from benchmarks.contenders import Ours, OwnReport
from benchmarks.harness import costs_kept_in, few, restart_in_environment, setting, write
from benchmarks.isolated import Contender
from benchmarks.peers import model_config

STEPS = 4  # of a start, of which the first doesn't count
GOAL = 0.03  # of the mean error
COMPARED = {
    "llama_2048": GridModel("8 layers of 512", model_config, 2048, 8),
    "llama_4096": GridModel("8 layers of 512", model_config, 4096, 8),
    **MODELS,
}


def start(name: str, model: GridModel) -> dict[str, Any]:
    """Starts a model once; returns its plan and its steps."""
    settings = {"schedule": "auto", "slices": "auto"}
    with costs_kept_in(None):
        contender = Contender(name, Ours, model.config(), 1, model.length, settings)
        contender.wait()
        seconds = [contender.run() for _ in range(STEPS)][1:]
        report = contender.report()
        contender.close()
    assert isinstance(report, OwnReport)
    assert report.planned is not None
    found = {
        "planned": report.planned.seconds,
        "seconds": seconds,
        "planned over measured": report.planned.seconds / statistics.median(seconds),
        "with own times over measured": report.planned.with_own_times / statistics.median(seconds),
        "layers": report.layers,
        "slices": report.slices,
        "order": report.order,
    }
    print(f"{name}: {found['planned over measured']:.3f} of {statistics.median(seconds):.3f} s", flush=True)
    return found


def row(name: str, starts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    ratios = [each["planned over measured"] for each in starts]
    return {
        "model": name,
        "what": COMPARED[name].what,
        "tokens": COMPARED[name].length,
        "planned over measured": statistics.median(ratios),
        "mean error": statistics.mean(abs(each - 1) for each in ratios),
        "starts": starts,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--starts", type=int, default=3, help="of each model")
    options = parser.parse_args()
    restart_in_environment()
    here = setting(starts=options.starts)
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in few([*COMPARED])}
    for number in range(options.starts):
        for name, starts in found.items():
            starts.append(start(name, COMPARED[name]))
        rows = [row(name, starts) for name, starts in found.items()]
        mean = statistics.mean(each["mean error"] for each in rows)
        report = {"starts": number + 1, "mean error": mean, "reached": mean <= GOAL, "rows": rows}
        print(f"{number + 1} starts: off by {mean:.1%} on average", flush=True)
        print(f"wrote {write('auto_planned', {'setting': here, **report})}", flush=True)


if __name__ == "__main__":
    main()
