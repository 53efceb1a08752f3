"""Loss and gradients of preferences are those of the formula on the unsplit model, however it is cut."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from slipstream import Pipeline, Runtime
from slipstream.training.config import PreferenceSection
from slipstream.training.data import sequences_of
from slipstream.training.preferences import mean_rewards, preference_loss, reward_sums
from support.architectures import BOUND, gradient_error, gradients, no_rounding_inside
from support.forked import launch
from support.paths import WORKERS
from support.preference_pairs import NAME, SECTION, expected_of_dpo, pairs
from support.ragged_batches import MODELS


@pytest.fixture(scope="module")
def expected() -> tuple[float, dict[str, float], dict[str, Tensor]]:
    return expected_of_dpo()


@pytest.mark.parametrize(
    "order",
    [
        {"schedule": "1f1b"},
        {"schedule": "zb-h1"},
        {"schedule": "gpipe", "num_ranks": 1},
        {"schedule": "zb-v", "stages_per_rank": 2},
        {"schedule": "interleaved-1f1b", "stages_per_rank": 2},
    ],
    ids=lambda order: order["schedule"],
)
def test_a_step_is_that_of_plain_dpo(expected: Any, order: dict[str, Any]) -> None:
    loss, rewards, grads = expected
    sequences = sequences_of([pairs()], "none", 24, seed=0)
    batch = sequences.batch(0, sequences.num_sequences)
    options = {"num_ranks": 2, "slices": 4, "num_microbatches": 2, "runtime": Runtime(self_check=False), **order}
    pipe = Pipeline(copy.deepcopy(MODELS[NAME]), loss_fn=preference_loss(SECTION), **options)
    with no_rounding_inside():
        found = pipe.step(batch.input_ids, batch.labels, sequence_values=batch.sequence_values)
    assert float(found) == pytest.approx(loss, rel=BOUND)
    assert gradient_error(grads, gradients(pipe.named_parameters())) < BOUND
    assert batch.sequence_values is not None
    measured = mean_rewards(reward_sums(pipe, batch.sequence_values, SECTION))
    assert measured == pytest.approx(rewards, rel=BOUND)


@pytest.mark.parametrize("mesh", ["dp", "tp"])
def test_replicas_and_tensor_ranks(expected: Any, mesh: str) -> None:
    """Two processes: each with half of the pairs, or with half of every layer and of the vocabulary."""
    ended = launch(2, WORKERS / "training" / "preference_meshes.py", mesh)
    assert ended.returncode == 0, ended.stderr[-3000:]
    errors = [float(line) for line in ended.stdout.splitlines()]
    assert len(errors) == 2
    assert max(errors) < BOUND


def test_without_smoothing_a_pair_that_is_sure_costs_nothing() -> None:
    loss = preference_loss(PreferenceSection(beta=1.0)).function
    found = loss(torch.tensor([-1.0, -1001.0]).double(), torch.tensor([-1.0, -1.0]).double())
    assert float(found) == 0.0
    assert np.isclose(
        float(
            preference_loss(PreferenceSection(beta=1.0, label_smoothing=0.25)).function(
                torch.tensor([-1.0, -1001.0]).double(), torch.tensor([-1.0, -1.0]).double()
            )
        ),
        250.0,
    )
