"""Steps with `num_targets` add up to the loss and the gradients of one batch, however many labels each has."""

from __future__ import annotations

import pytest
import torch

from slipstream import SequenceLoss, SlipstreamError
from support.architectures import (
    ARCHITECTURES,
    BOUND,
    build,
    gradient_error,
    gradients,
    labels_of,
    tokens,
    unsplit_step,
)
from support.parameters import first_of
from support.pipelines import make_pipe

INPUTS = tokens(3)
LABELS = labels_of(INPUTS)
NUM_TARGETS = int((LABELS[:, 1:] != -100).sum())


@pytest.mark.parametrize(
    ("name", "options"),
    first_of(
        [
            ("llama, tied", {"schedule": "zb-h1", "slices": [30, 20, 14], "loss_scale": 2.0**10}),
            ("llama", {"vocabulary": "spread", "slices": 3}),
            ("gpt2", {"schedule": "gpipe", "slices": 2}),
        ],
        2,
    ),
)
def test_steps_of_unequal_labels_add_up_to_one_batch(name: str, options: dict[str, object]) -> None:
    model = build(ARCHITECTURES[name])
    expected = unsplit_step(model, INPUTS, LABELS)
    reference = gradients(model)
    scale = {"loss_scale": options.pop("loss_scale", 1.0)}
    pipe = make_pipe(build(ARCHITECTURES[name]), num_ranks=2, **options)
    losses = [pipe.step(INPUTS[part], LABELS[part], num_targets=NUM_TARGETS, **scale) for part in ([0], [1, 2])]
    assert abs(sum(losses) - expected) < BOUND
    assert gradient_error(gradients(pipe), reference) < BOUND


def test_numbers_that_are_too_small_and_losses_without_targets() -> None:
    model = build(ARCHITECTURES["llama"])
    pipe = make_pipe(model, num_ranks=2, slices=2)
    with pytest.raises(SlipstreamError, match=r"num_targets=10, but 189 targets of this batch alone count"):
        pipe.step(INPUTS, INPUTS, num_targets=10)
    assert pipe.step(INPUTS, INPUTS, num_targets=189) == pipe.step(INPUTS, INPUTS)
    loss = SequenceLoss(lambda log_probabilities: -log_probabilities)
    sequences = make_pipe(build(ARCHITECTURES["llama"]), slices=2, loss_fn=loss)
    with pytest.raises(SlipstreamError, match=r"num_targets with a SequenceLoss, .* leave it out"):
        sequences.step(INPUTS, INPUTS, num_targets=200)
    assert all(torch.isfinite(each.grad).all() for each in pipe.parameters() if each.grad is not None)
