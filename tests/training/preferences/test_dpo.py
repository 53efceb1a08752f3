"""Loss and gradients of preferences are those of the formula on the unsplit model, however it is cut."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from slipstream import Pipeline, Runtime
from slipstream.train.config import PreferenceSection, precision_named
from slipstream.train.data import TokenBatch, sequences_of
from slipstream.train.preferences import mean_rewards, preference_loss, reward_sums
from support.architectures import BOUND, gradient_error, gradients, no_rounding_inside
from support.pipelines import make_pipe
from support.preference_pairs import NAME, SECTION, expected_of_dpo, pairs
from support.preferences import log_probabilities
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
        pytest.param({"schedule": "auto", "slices": "auto"}, marks=pytest.mark.more),
        {"schedule": "auto", "slices": "auto", "num_ranks": 1},
    ],
    ids=lambda order: f"{order['schedule']} on {order.get('num_ranks', 2)}",
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
    assert gradient_error(grads, gradients(pipe)) < BOUND
    assert batch.sequence_values is not None
    measured = mean_rewards(reward_sums(pipe, batch.sequence_values, SECTION))
    assert measured == pytest.approx(rewards, rel=BOUND)


def alone(model: PreTrainedModel, batch: TokenBatch) -> Tensor:
    """The log-probability of each sequence by the unsplit model, by itself."""
    both = zip(batch.input_ids, batch.labels, strict=True)
    with torch.no_grad():
        return torch.cat([log_probabilities(model, ids[None], labels[None]) for ids, labels in both]).double()


@pytest.mark.parametrize("precision", ["bf16", "bf16-weights"])
def test_in_bfloat16_it_is_as_near_to_plain_dpo_as_the_unsplit_model(expected: Any, precision: str) -> None:
    """Rewards are differences of large sums: those of the pipeline mustn't be rounded more than the model's own."""
    loss, rewards, _ = expected
    sequences = sequences_of([pairs()], "none", 24, seed=None)
    batch = sequences.batch(0, sequences.num_sequences)
    assert batch.sequence_values is not None
    model = copy.deepcopy(MODELS[NAME]).to(torch.bfloat16 if precision == "bf16-weights" else torch.float32)
    casts = torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16")
    exact = alone(MODELS[NAME], batch)
    with casts:
        plain = alone(model, batch)
    options = {"num_ranks": 2, "slices": 4, "num_microbatches": 2, "precision": precision_named(precision)}
    pipe = make_pipe(model, loss_fn=preference_loss(SECTION), **options)
    with casts:
        found = float(pipe.step(batch.input_ids, batch.labels, sequence_values=batch.sequence_values))
    ours = pipe.sequence_log_probabilities()
    assert (ours - exact).abs().max() < 2 * (plain - exact).abs().max()
    assert found == pytest.approx(loss, rel=0.05)
    measured = mean_rewards(reward_sums(pipe, batch.sequence_values, SECTION))
    assert measured["margin"] == pytest.approx(rewards["margin"], abs=0.05)


@pytest.mark.parametrize(("smoothing", "cost"), [(0.0, 0.0), (0.25, 250.0)])
def test_a_pair_that_is_sure_costs_what_its_smoothing_does(smoothing: float, cost: float) -> None:
    loss = preference_loss(PreferenceSection(beta=1.0, label_smoothing=smoothing)).function
    found = loss(torch.tensor([-1.0, -1001.0]).double(), torch.tensor([-1.0, -1.0]).double())
    assert float(found) == pytest.approx(cost, rel=1e-8, abs=0.0)
