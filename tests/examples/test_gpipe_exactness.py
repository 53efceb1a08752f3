"""The models of examples/gpipe have the same gradients in a pipeline as the nn.Sequential alone."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import Tensor

from slipstream import Layers, Memory, Pipeline
from slipstream.schedule import SCHEDULES
from support.architectures import BOUND, gradient_error, gradients
from support.parameters import each_once
from support.sequences.gpipe_models import CASES


def step(
    name: str, schedule: str, num_ranks: int, num_microbatches: int, recompute: str
) -> tuple[Tensor, dict[str, Tensor]]:
    case = CASES[name]
    inputs, targets = case.batch()
    pipe = Pipeline(
        case.model(),
        schedule=schedule,
        num_microbatches=num_microbatches,
        stages_per_rank=2 if 2 in SCHEDULES[schedule].stages_per_rank else 1,
        memory=Memory(recompute=recompute),
        layers=Layers(example=inputs),
        num_ranks=num_ranks,
        loss_fn=case.loss_fn,
    )
    return pipe.step(inputs, targets), gradients(pipe)


@cache
def unsplit(name: str, num_microbatches: int) -> tuple[Tensor, dict[str, Tensor]]:
    return CASES[name].unsplit(num_microbatches)


def check(name: str, schedule: str, num_ranks: int, num_microbatches: int, recompute: str) -> None:
    loss, expected = unsplit(name, num_microbatches)
    found_loss, found = step(name, schedule, num_ranks, num_microbatches, recompute)
    assert abs(found_loss - loss) < BOUND
    assert found.keys() == expected.keys()
    assert gradient_error(expected, found) < BOUND


# One row for each K, M and schedule at least once, in each model with and without re-materialisation.
SELECTION = [
    ("gpipe", 1, 3, "none"),
    ("gpipe", 2, 8, "full"),
    ("1f1b", 2, 5, "none"),
    ("1f1b", 3, 7, "full"),
    ("zb-h1", 3, 4, "none"),
    ("interleaved-1f1b", 2, 2, "selective"),
    ("zb-v", 2, 6, "none"),
    ("breadth-first", 4, 1, "full"),
]


@pytest.mark.parametrize(
    ("schedule", "num_ranks", "num_microbatches", "recompute", "name"), each_once(SELECTION, CASES, 4)
)
def test_gradients_are_those_of_the_sequence(
    name: str, schedule: str, num_ranks: int, num_microbatches: int, recompute: str
) -> None:
    check(name, schedule, num_ranks, num_microbatches, recompute)


@pytest.mark.grid
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("schedule", sorted(SCHEDULES))
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_gradients_are_those_of_the_sequence_in_every_way(name: str, schedule: str, num_ranks: int) -> None:
    for num_microbatches in range(1, 9):
        for recompute in ("none", "full"):
            check(name, schedule, num_ranks, num_microbatches, recompute)


@pytest.mark.parametrize(
    ("recompute", "name"), each_once(["none", "full"], ["vit", "transformer", "resnet", "amoebanet"], 1)
)
def test_bits_do_not_depend_on_the_number_of_ranks(name: str, recompute: str) -> None:
    loss, expected = step(name, "1f1b", 1, 4, recompute)
    for num_ranks in (2, 3, 4):
        found_loss, found = step(name, "1f1b", num_ranks, 4, recompute)
        assert torch.equal(found_loss, loss)
        assert all(torch.equal(gradient, found[key]) for key, gradient in expected.items())


def test_batch_norm_sees_microbatches() -> None:
    """With another number of them the gradients are others, far above the bound of the comparisons here."""
    _, expected = unsplit("resnet", 4)
    _, found = step("resnet", "1f1b", 2, 3, "none")
    assert gradient_error(expected, found) > 1e-4
