"""What each process of test_measurement_run runs: a profile, of which it says what this rank ran and what it found."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from dataclasses import replace
from types import SimpleNamespace

import torch
import torch.distributed as dist

from slipstream.cost import OPS, Profile
from slipstream.parallel import Ranks, make_mesh
from slipstream.profile import ProfileSettings, cost_cache, find_costs, measurement_run, profile_model
from slipstream.profile.stage_bench import StageBench
from slipstream.schedule import Op
from support.architectures import llama

SETTINGS = ProfileSettings(seq_len=32, longest_slice=16, granularity=8, repeats=3, budget=60.0, few_points=True)
MORE_POINTS = replace(SETTINGS, seq_len=64, longest_slice=32, granularity=1)  # 10 of 5 lengths


class CountedRuns:
    """StageBench.run, counted, with steady seconds of this rank's own: those of rank 1 are 1% longer."""

    def __init__(self, rank: int) -> None:
        self.count, self._factor, self._run, self._num_warm = 0, 1 + 0.01 * rank, StageBench.run, 0

    def __call__(self, bench: StageBench, length: int, context: int) -> dict[Op, float]:
        self.count += 1
        self._run(bench, length, context)
        return dict.fromkeys(OPS, self._factor * (100 + length))

    def warm_up(self, length: int, context: int) -> None:
        """StageBench.warm_up, which needs no run here."""
        self._num_warm += 1

    def busy_seconds(self, rank: int) -> float:
        """Seconds on a machine that becomes busy after the warming up, by a clock that goes wrong on rank 1."""
        return (1 + 0.1 * rank) * (self._num_warm + 20 * self.count)


def links(profile: Profile) -> list[tuple[int, float]]:
    """How many messages were timed, and the rate of a sum, of what is found for two replicas of one rank, then for two
    ranks of a pipeline, and for the replicas again, whose kept costs are in one file."""
    cost_cache.profile_model = lambda *given: replace(profile, link=given[3], disturbed=0.0)
    found = []
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = folder
        for pp in (1, 2, 1):
            mesh = Ranks.of(make_mesh(pp=pp, dp=2 // pp))
            link = find_costs(llama(num_hidden_layers=2), SETTINGS, torch.device("cpu"), mesh).link
            assert link is not None
            found.append((len(link.points), link.ring_bandwidth))
        dist.barrier()
    return found


def main() -> None:
    dist.init_process_group("gloo")
    ranks = Ranks.of(make_mesh(pp=int(sys.argv[1]), tp=int(sys.argv[2])))
    runs = CountedRuns(ranks.world.rank)
    StageBench.run = lambda bench, length, context: runs(bench, length, context)  # type: ignore[method-assign]
    settings = SETTINGS
    if budget := float(sys.argv[3] if len(sys.argv) > 3 else 0):
        settings = replace(MORE_POINTS, budget=budget)
        StageBench.warm_up = runs.warm_up  # type: ignore[method-assign]
        clock = SimpleNamespace(perf_counter=lambda: runs.busy_seconds(ranks.world.rank))
        measurement_run.time = clock  # type: ignore[attr-defined]
    profile = profile_model(llama(num_hidden_layers=2), settings, torch.device("cpu"), ranks=ranks)
    measured = [(stage.fits, stage.points, stage.actions, stage.context_bytes) for stage in profile.stages]
    found = ranks.world.gather((runs.count, measured))
    kept = links(profile) if ranks.pipeline.size == 2 and not budget else []
    spreads = [point.spread for point in profile.stages[0].points[Op.F]]
    if ranks.leads:
        counts, stages = zip(*found, strict=True)
        equal = all(each == stages[0] for each in stages)
        num_points = len(profile.stages[0].points[Op.F])
        lengths = len(profile.stages[0].actions)
        told = {
            "counts": counts,
            "equal": equal,
            "points": num_points,
            "lengths": lengths,
            "spreads": spreads,
            "links": kept,
        }
        print(json.dumps(told | {"stages": len(profile.stages)}), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
