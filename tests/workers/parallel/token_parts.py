"""A third axis of the mesh, whose ranks share weights and batch and each work on some tokens of every slice.

Layers work token by token, so nothing is exchanged inside of them: what is tried is that losses, gradients, norm,
optimizer state and checkpoints follow from the axis's roles.
"""

from __future__ import annotations

import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import slipstream
from slipstream import CutTokens, Layers, Memory, Parallelism, Pipeline, make_mesh
from slipstream.parallel import MeshAxis, add_axis
from slipstream.pipeline.cut_batch import SlicedValues
from support.architectures import BOUND, gradient_error
from support.parallel.group_cases import by_name, run_cases

NAME = "parts"
SLICES, WIDTH, BATCH, TOKENS = (5, 4, 6), 6, 3, 15


def part_of(batch: Any, rank: int, size: int) -> Any:
    """Returns a rank's part of a split batch: a run of tokens of every slice, at most one longer than another's."""
    bounds = [
        [(len(piece.tokens) * rank // size, len(piece.tokens) * (rank + 1) // size) for piece in pieces]
        for pieces in batch.slices
    ]

    def own(values: SlicedValues) -> SlicedValues:
        rows = zip(bounds, values.slices, strict=True)
        return replace(values, slices=[[each[:, a:b] for (a, b), each in zip(*row, strict=True)] for row in rows])

    rows = zip(bounds, batch.slices, strict=True)
    slices = [[replace(piece, tokens=piece.tokens[a:b]) for (a, b), piece in zip(*row, strict=True)] for row in rows]
    return replace(batch, slices=slices, values={name: own(values) for name, values in batch.values.items()})


def layers() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Linear(4, WIDTH), nn.Tanh(), CutTokens(), nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, 3)
    ).double()


def examples(step: int) -> tuple[Tensor, Tensor]:
    draws = torch.Generator().manual_seed(step)
    inputs = torch.randn(BATCH, TOKENS, 4, dtype=torch.float64, generator=draws)
    labels = torch.randint(3, (BATCH, TOKENS), generator=draws)
    labels[0, :7] = -100
    return inputs, labels


def loss_of(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    losses = nn.functional.cross_entropy(outputs.flatten(0, -2), targets.flatten(), reduction="sum")
    return losses, (targets != -100).sum()


def pipeline(mesh: DeviceMesh, **options: Any) -> Pipeline:
    settings = {"slices": list(SLICES), "loss_fn": loss_of, "layers": Layers(example=examples(0)[0][:1])} | options
    return Pipeline(layers(), "1f1b", num_microbatches=3, mesh=mesh, **settings)


def one_process(steps: int) -> tuple[nn.Sequential, list[tuple[float, dict[str, Tensor], float]]]:
    """Returns the layers after some steps of AdamW, and the loss, gradients and norm of each step."""
    model, found = layers(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(steps):
        optimizer.zero_grad()
        inputs, labels = examples(step)
        total, count = loss_of(model(inputs), labels)
        (total / count).backward()
        grads = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}  # type: ignore[union-attr]
        norm = torch.sqrt(sum(each.square().sum() for each in grads.values()))  # type: ignore[arg-type]
        found.append((float(total.detach() / count), grads, float(norm)))
        optimizer.step()
    return model, found


def trained(pipe: Pipeline, steps: range, optimizer: torch.optim.Optimizer) -> list[tuple[float, float]]:
    found = []
    for step in steps:
        optimizer.zero_grad()
        loss = float(pipe.step(*examples(step)))
        found.append((loss, float(pipe.clip_grad_norm_(torch.inf))))
        optimizer.step()
    return found


def gradients_and_norm() -> None:
    """Loss, gradients and norm are one process's, also where what is in memory is recomputed."""
    _, (expected, *_) = one_process(1)
    for memory in (Memory(), Memory(recompute="full")):
        pipe = pipeline(make_mesh(parts=2), memory=memory)
        assert abs(float(pipe.step(*examples(0))) - expected[0]) < BOUND * expected[0]
        found = {each.name: each.parameter.grad for each in pipe.parameter_shards()}
        assert found.keys() == expected[1].keys()
        assert gradient_error(expected[1], found) < BOUND  # type: ignore[arg-type]
        assert abs(float(pipe.clip_grad_norm_(torch.inf)) - expected[2]) < BOUND * expected[2]


def resumed() -> None:
    """Three steps of AdamW, whose state is sharded over the axis or not, resumed on this mesh and on another."""
    whole, expected = one_process(3)
    wanted = dict(whole.named_parameters())
    for sharded in (False, True):
        settings = {"parallel": Parallelism(shard="optimizer" if sharded else "none")}
        folder = _shared_folder()
        pipe = pipeline(make_mesh(parts=2), **settings)
        optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-2)
        found = trained(pipe, range(2), optimizer)
        assert "parts=2" in str(pipe)
        assert pipe.axes[NAME].size == 2
        pipe.save(folder, 2, optimizer=optimizer)
        for mesh in (make_mesh(parts=2), make_mesh(pp=2)):
            other = pipeline(mesh, **settings)
            theirs = torch.optim.AdamW(other.parameters(), lr=1e-2)
            other.load(folder, optimizer=theirs)
            after = [*found, *trained(other, range(2, 3), theirs)]
            for (loss, norm), (right, _, right_norm) in zip(after, expected, strict=True):
                assert abs(loss - right) < 1e-9 * right
                assert abs(norm - right_norm) < 1e-9 * right_norm
            state = other.state_dict()
            if dist.get_rank() == 0:
                assert gradient_error({name: p.data for name, p in wanted.items()}, state) < 1e-9


def _shared_folder() -> Path:
    given = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(given)
    return Path(given[0]) / "checkpoints"


def unknown_axes() -> None:
    """A mesh refuses an axis that nobody has made known, by its name."""
    with pytest.raises(TypeError, match="'others'"):
        make_mesh(pp=2, others=1)
    with pytest.raises(slipstream.SlipstreamError, match="pp=2 x dp=1 x parts=2 x tp=1 has 4 ranks, but 2 processes"):
        make_mesh(pp=2, parts=2)


CASES = by_name(gradients_and_norm, resumed, unknown_axes)

if __name__ == "__main__":
    add_axis(MeshAxis(NAME, shares_weights=True, shares_batch=True, part_of=part_of))
    run_cases(CASES, sys.argv[1:])
