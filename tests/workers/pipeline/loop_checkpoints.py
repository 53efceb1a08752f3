"""Cases of test_processes: saves of a pipeline on two ranks, loaded by replicas that share an optimizer."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from slipstream import Pipeline, SlipstreamError, make_mesh
from slipstream.checkpoint import CheckpointFolder
from support.architectures import ARCHITECTURES, labels_of, tokens
from support.parallel.group_cases import Case, shared_folder
from support.pipelines import make_pipe


def start(mesh: dict[str, int], seed: int, **options: object) -> tuple[Pipeline, torch.optim.Optimizer]:
    settings = {"seed": seed, "slices": 3, "mesh": make_mesh(**mesh), "dtype": torch.float64}
    pipe = make_pipe(ARCHITECTURES["llama"], **settings, **options)
    return pipe, torch.optim.SGD(pipe.parameters(), lr=0.1, momentum=0.9)


def train(pipe: Pipeline, optimizer: torch.optim.Optimizer, step: int) -> float:
    inputs = tokens(seed=step)
    mine = slice(pipe.replica, pipe.replica + 1) if pipe.num_replicas > 1 else slice(None)
    optimizer.zero_grad()
    loss = float(pipe.step(inputs[mine], labels_of(inputs)[mine]))
    optimizer.step()
    return loss


def other_meshes(folder: Path) -> None:
    """What two stages saved, replicas with a sharded optimizer load, and the other way round."""
    pipe, optimizer = start({"pp": 2}, 0)
    train(pipe, optimizer, 1)
    pipe.save(folder, 1, optimizer=optimizer, facts={"rank": dist.get_rank()})
    expected = [train(pipe, optimizer, step) for step in (2, 3)]
    pipe, optimizer = start({"dp": 2}, 1, shard="optimizer")
    assert pipe.load(folder, optimizer=optimizer) == (1, {"rank": 0})
    found = [train(pipe, optimizer, 2)]
    pipe.save(folder, 2, optimizer=optimizer)
    pipe, optimizer = start({"pp": 2}, 1)
    pipe.load(folder, optimizer=optimizer)
    found.append(train(pipe, optimizer, 3))
    assert max(abs(one - other) for one, other in zip(expected, found, strict=True)) < 1e-12


def refusals(folder: Path) -> None:
    """Whatever one rank finds, all are told, and nothing is written."""
    rank = dist.get_rank()
    pipe, optimizer = start({"pp": 2}, 0)
    optimizer.param_groups[0]["lr"] = 0.1 + rank
    with pytest.raises(SlipstreamError, match=r"the optimizer of rank 1 differs from that of rank 0"):
        pipe.save(folder, 1, optimizer=optimizer)
    with pytest.raises(SlipstreamError, match=r"the step of rank 1 differs from that of rank 0: 8 and 7"):
        pipe.save(folder, 7 + rank)
    with pytest.raises(SlipstreamError, match=r"facts\['object'\] is a builtins.object"):
        pipe.save(folder, 1, facts={"object": object()} if rank else {})
    others = pipe.parameters() if rank else [nn.Parameter(torch.ones(3))]
    with pytest.raises(SlipstreamError, match=r"a tensor of shape \(3,\) that isn't of pipe.parameters"):
        pipe.save(folder, 1, optimizer=torch.optim.SGD(others, lr=0.1))
    assert not CheckpointFolder(folder).steps()
    pipe.save(folder, 1, optimizer=torch.optim.SGD(pipe.parameters(), lr=0.1))
    before = [parameter.detach().clone() for parameter in pipe.parameters()]
    with torch.no_grad():
        for parameter in pipe.parameters():
            parameter.zero_()
    other = (torch.optim.Adam if rank else torch.optim.SGD)(pipe.parameters(), lr=0.1)
    with pytest.raises(SlipstreamError, match=r"has the state of a SGD, and optimizer= is a Adam"):
        pipe.load(folder, optimizer=other)
    assert not any(parameter.any() for parameter in pipe.parameters())
    pipe.load(folder)
    assert all(one.equal(other) for one, other in zip(before, pipe.parameters(), strict=True))


def buffers(folder: Path) -> None:
    """Each rank's batch norms come back."""
    pipes = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4), nn.BatchNorm1d(4))
        pipes.append(Pipeline(model, partition=[2, 2], loss_fn=lambda y, t: ((y - t).square().sum(), len(t))))
    pipes[0].step(torch.ones(8, 4) * torch.arange(8)[:, None], torch.ones(8, 4))
    pipes[0].save(folder, 1)
    pipes[1].load(folder)
    expected, found = pipes[0].state_dict(), pipes[1].state_dict()
    assert all(tensor.equal(found[name]) for name, tensor in expected.items())


def in_a_folder(case: Callable[[Path], None]) -> None:
    with shared_folder() as folder:
        case(folder / "checkpoints")


CASES: dict[str, Case] = {run.__name__: partial(in_a_folder, run) for run in (other_meshes, refusals, buffers)}
