"""What each of the two processes of test_metrics runs: collectives of two groups, and what they sent."""

from __future__ import annotations

import json
import sys

import torch
import torch.distributed as dist

from slipstream.parallel import Ranks, make_mesh
from slipstream.train.metrics.traffic import Traffic

HIDDEN = (2, 24, 8)  # b, T, h


def main() -> None:
    dist.init_process_group("gloo")
    axes = Ranks.of(make_mesh(tp=2))
    axes.tensor.sum(torch.zeros(100))  # before the first step
    traffic = Traffic({"dp": axes.world, "tp": axes.tensor})
    steps = []
    for _ in range(2):
        for _ in range(4):  # a layer's f and g, forward and backward
            axes.tensor.sum(torch.zeros(HIDDEN, dtype=torch.float32))
        axes.world.reduce_scatter(torch.zeros(2, 50, dtype=torch.float64))
        axes.world.all_gather(torch.zeros(50, dtype=torch.float32))
        steps.append(traffic.of_step(pipeline_bytes=7))
    steps.append(traffic.of_step(pipeline_bytes=0))
    ranks = axes.world.gather(steps)
    if axes.world.rank == 0:
        added = [{axis: sum(sent[axis] for sent in step) for axis in step[0]} for step in zip(*ranks, strict=True)]
        print(json.dumps({"rank": steps, "all": added}))
        sys.stdout.flush()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
