"""What each process of test_measurement_run runs: a profile, of which it says what this rank ran and what it found."""

from __future__ import annotations

import json
import sys

import torch
import torch.distributed as dist

from slipstream.cost import OPS
from slipstream.parallel import Ranks, make_mesh
from slipstream.profile import ProfileSettings, profile_model
from slipstream.profile.stage_bench import StageBench
from slipstream.schedule import Op
from support.architectures import llama

SETTINGS = ProfileSettings(seq_len=32, longest_slice=16, granularity=8, repeats=3, budget=60.0, few_points=True)


class CountedRuns:
    """StageBench.run, counted, with steady seconds of this rank's own: those of rank 1 are 1% longer."""

    def __init__(self, rank: int) -> None:
        self.count, self._factor, self._run = 0, 1 + 0.01 * rank, StageBench.run

    def __call__(self, bench: StageBench, length: int, context: int) -> dict[Op, float]:
        self.count += 1
        self._run(bench, length, context)
        return dict.fromkeys(OPS, self._factor * (100 + length))


def main() -> None:
    dist.init_process_group("gloo")
    ranks = Ranks.of(make_mesh(pp=int(sys.argv[1]), tp=int(sys.argv[2])))
    runs = CountedRuns(ranks.world.rank)
    StageBench.run = lambda bench, length, context: runs(bench, length, context)  # type: ignore[method-assign]
    profile = profile_model(llama(num_hidden_layers=2), SETTINGS, torch.device("cpu"), ranks=ranks)
    measured = [(stage.fits, stage.points, stage.actions, stage.context_bytes) for stage in profile.stages]
    found = ranks.world.gather((runs.count, measured))
    spreads = [point.spread for point in profile.stages[0].points[Op.F]]
    if ranks.leads:
        counts, stages = zip(*found, strict=True)
        equal = all(each == stages[0] for each in stages)
        num_points = len(profile.stages[0].points[Op.F])
        lengths = len(profile.stages[0].actions)
        told = {"counts": counts, "equal": equal, "points": num_points, "lengths": lengths, "spreads": spreads}
        print(json.dumps(told | {"stages": len(profile.stages)}), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
