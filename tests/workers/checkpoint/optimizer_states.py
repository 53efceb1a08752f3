"""Each of two processes of test_optimizer_state: what ranks saved goes on alike on the same mesh and on others."""

from __future__ import annotations

import sys
from itertools import cycle
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from slipstream import Pipeline, RankGroup, make_mesh
from slipstream.checkpoint import Checkpoints, load_training, training_shards
from support.architectures import labels_of, llama, tokens
from support.checkpoints.optimizers import OPTIMIZERS
from support.pipelines import make_pipe

MODEL = llama(num_hidden_layers=2)
LENGTH = 20  # tokens
MESHES = {"pp": ({"pp": 2}, {}), "zero": ({"dp": 2}, {"shard": "optimizer"}), "tp": ({"tp": 2}, {})}


def start(mesh: str, optimizer: str, seed: int = 1) -> tuple[Pipeline, Optimizer]:
    axes, options = MESHES[mesh]
    pipe = make_pipe(MODEL, seed=seed, slices=3, mesh=make_mesh(**axes), dtype=torch.float64, **options)
    return pipe, OPTIMIZERS[optimizer](pipe.parameters())


def train(pipe: Pipeline, optimizer: Optimizer, *steps: int) -> dict[str, Tensor]:
    """Steps on batches of their own; returns the whole model on rank 0."""
    for step in steps:
        inputs = tokens(length=LENGTH, seed=step)
        mine = slice(pipe.replica, pipe.replica + 1) if pipe.num_replicas > 1 else slice(None)
        optimizer.zero_grad()
        pipe.step(inputs[mine], labels_of(inputs)[mine])
        optimizer.step()
    return pipe.state_dict()


def check(folder: Path, optimizer: str, saving: str) -> None:
    checkpoints = Checkpoints(folder, RankGroup(dist.group.WORLD))
    pipe, own = start(saving, optimizer, seed=0)
    train(pipe, own, 1, 2)
    checkpoints.save(2, list(training_shards(pipe.parameter_shards(), own)), {})
    checkpoints.wait()
    expected = train(pipe, own, 3, 4)
    saved = checkpoints.find()
    assert saved is not None
    for mesh in MESHES:
        pipe, own = start(mesh, optimizer)
        load_training(checkpoints, saved, pipe.parameter_shards(), own)
        pipe.refresh()
        found = train(pipe, own, 3, 4)
        errors = [float((found[name] - tensor).abs().max()) for name, tensor in expected.items()]
        assert max(errors, default=0.0) <= (0.0 if mesh == saving else 1e-9), (optimizer, saving, mesh, max(errors))
    print(f"alike: {optimizer} of {saving}", flush=True)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    # Every mesh saves for some optimizers, and all meshes go on for each.
    for name, mesh in zip(sys.argv[2:], cycle(MESHES), strict=False):
        check(Path(sys.argv[1]) / name, name, mesh)
    dist.destroy_process_group()
