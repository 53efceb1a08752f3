"""Cases of test_processes: logits of a vocabulary of 61 ids cut over two ranks, of stages, and of replicas."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from slipstream import Pipeline, make_mesh
from support.architectures import ARCHITECTURES, BOUND, build, labels_of, no_rounding_inside, tokens
from support.parallel.group_cases import by_name
from support.pipelines import make_pipe
from support.ragged_batches import batch_of


def pipeline(mesh: Any) -> Pipeline:
    settings = {"slices": 3, "num_microbatches": 2, "dtype": torch.float64}
    return make_pipe(ARCHITECTURES["llama, tied"], seed=0, mesh=mesh, **settings)


@torch.no_grad()
def check(pipe: Pipeline, inputs: Any, labels: Any, has_logits: bool) -> None:
    whole = build(ARCHITECTURES["llama, tied"])
    with no_rounding_inside():
        logits, found = pipe.logits(inputs), pipe.log_probabilities(inputs, labels)
    assert (logits is not None) == has_logits
    for row, (ids, targets) in enumerate(zip(inputs, labels, strict=True)):
        with no_rounding_inside():
            (expected,) = whole(input_ids=ids[None], use_cache=False).logits
        assert logits is None or (logits[row] - expected).abs().max() < BOUND
        each = expected[:-1].log_softmax(-1).gather(-1, targets[1:].clamp(min=0)[:, None])[:, 0]
        each = each.masked_fill(targets[1:] == -100, 0)
        assert found[row][0] == 0
        assert (found[row][1:] - each).abs().max() < BOUND


def both(pipe: Pipeline, has_logits: bool) -> None:
    inputs: Tensor = tokens(4, 30)[2 * pipe.replica : 2 * pipe.replica + 2]
    check(pipe, inputs, labels_of(inputs), has_logits)
    check(pipe, *batch_of([20, 9 + pipe.replica, 30]), has_logits)


def tensor_ranks() -> None:
    both(pipeline(make_mesh(tp=2)), has_logits=True)


def stages_and_replicas() -> None:
    pipe = pipeline(make_mesh(pp=2))
    both(pipe, has_logits=pipe.rank == 1)
    both(pipeline(make_mesh(dp=2)), has_logits=True)


CASES = by_name(tensor_ranks, stages_and_replicas)
