"""How well a profile predicts: points held out of its fit, and stages of four layers that it composes from fewer.

python -m benchmarks.profile_fit                   # prints tables, writes results/profile_fit.json and .profile.json

Two processes measure side by side, as the ranks of a pipeline would; the figures are the first one's.
"""

from __future__ import annotations

import argparse
import statistics

import torch
import torch.distributed as dist

from benchmarks.harness import RESULTS, destination, setting, two_ranks, write
from benchmarks.peers import NUM_LAYERS, model_config
from slipstream.cost import OPS, Profile
from slipstream.model import LayerRange, find_anatomy
from slipstream.profile import FIT_TOLERANCE, ProfileSettings, profile_model
from slipstream.profile.link_measurement import measure_link
from slipstream.profile.profile_run import make_benches
from slipstream.schedule import Op

CPU = torch.device("cpu")
STAGES = [range(4), range(4, NUM_LAYERS)]  # the cut of the other benchmarks
SLICES = [128, 192, 256, 320, 384, 384, 384]  # of 2048 tokens, likewise


def held_out(profile: Profile) -> list[dict[str, object]]:
    """Returns the error of each op of each measured stage at the points that were not fitted."""
    rows = []
    for stage in profile.stages:
        for op in OPS:
            errors = stage.errors(op, held_out=True)
            worst = max(errors, key=errors.__getitem__)
            rows.append(
                {
                    "parts": [*stage.parts],
                    "op": str(op),
                    "mean": statistics.mean(errors.values()),
                    "worst": errors[worst],
                    "worst_at": worst,
                    "spread": statistics.mean(point.spread for point in stage.points[op]),
                }
            )
    return rows


def composed(profile: Profile, settings: ProfileSettings, repeats: int) -> list[dict[str, object]]:
    """Compares measured stages of four layers with what the profile composes from fewer parts."""
    config = model_config(settings.seq_len)
    cuts = [(LayerRange(layers.start, layers.stop), find_anatomy(config)) for layers in STAGES]
    benches = make_benches(config, settings, CPU, cuts)
    share = settings.seq_len / sum(SLICES)
    lengths = [int(length * share) for length in SLICES]
    points = [(length, sum(lengths[:number])) for number, length in enumerate(lengths)]
    seconds: dict[tuple[int, tuple[int, int], Op], list[float]] = {}
    for repeat in range(2 + repeats):
        for point in points:
            dist.barrier()
            for index, bench in enumerate(benches):
                for op, found in bench.run(*point).items():
                    seconds.setdefault((index, point, op), []).extend([found] if repeat >= 2 else [])
    rows: list[dict[str, object]] = []
    for (index, point, op), values in seconds.items():
        measured, predicted = statistics.median(values), profile.time(STAGES[index], op)(*point)
        error = predicted / measured - 1
        rows.append({"stage": index, "slice": point, "op": str(op), "measured": measured, "error": error})
    return rows


def show(profile: Profile, fits: list[dict[str, object]], stages: list[dict[str, object]]) -> None:
    print("\nheld-out points      mean   worst  at             spread of the measurements")
    for row in fits:
        print(
            f"parts {row['parts']!s:8} {row['op']}  {row['mean']:6.2%}  {row['worst']:6.2%}  {row['worst_at']!s:13}",
            end="",
        )
        print(f"  {row['spread']:6.2%}")
    off = profile.points_off(FIT_TOLERANCE)
    print(f"mean of all {profile.error:.2%}; {len(off)} points are off by more than {FIT_TOLERANCE:.0%}")
    print("\nstages of four layers, composed from measured parts")
    for index, op in ((index, op) for index in range(len(STAGES)) for op in OPS):
        errors = [row["error"] for row in stages if (row["stage"], row["op"]) == (index, op)]
        print(f"stage {index} {op}  " + "  ".join(f"{error:+6.1%}" for error in errors))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--granularity", type=int, default=64)
    parser.add_argument("--budget", type=float, default=600.0, help="seconds of measuring")
    parser.add_argument("--repeats", type=int, default=7, help="of the composed stages")
    options = parser.parse_args()
    with two_ranks() as is_first:
        settings = ProfileSettings(options.length, granularity=options.granularity, budget=options.budget)
        profile = profile_model(model_config(options.length), settings, CPU, measure_link(CPU))
        fits, stages = held_out(profile), composed(profile, settings, options.repeats)
        if is_first:
            show(profile, fits, stages)
            mean = statistics.mean(abs(float(row["error"])) for row in stages)  # type: ignore[arg-type]
            print(f"mean error of composed stages {mean:.2%}")
            profile.save(destination(RESULTS / "profile_fit.profile.json"))
            report = {
                "setting": setting(tokens=options.length, budget=options.budget, repeats=options.repeats),
                "held-out error": profile.error,
                "composed error": mean,
                "held out": fits,
                "composed": stages,
            }
            print(f"wrote {write('profile_fit', report)}")


if __name__ == "__main__":
    main()
