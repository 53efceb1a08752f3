"""Gradients of keys and values that are summed in the model's type instead of float32: how far off, and how large."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream.cost import CountedOperations, Degrees, with_context_gradients
from slipstream.profile import count_model
from support.architectures import build, gradients, llama, tokens
from support.pipelines import make_pipe

BOUND = 2**-7  # of the norm of a weight's gradient
NUM_SLICES, LENGTH = 64, 256
LLAMA = llama(hidden_size=64, head_dim=16, num_hidden_layers=2, max_position_embeddings=LENGTH)


def trained(dtype: torch.dtype, **settings: Any) -> dict[str, Tensor]:
    """Takes a step of one rank in 64 slices; returns its weights' gradients, which are summed in float32."""
    pipe = make_pipe(build(LLAMA), slices=NUM_SLICES, dtype=dtype, master_dtype=torch.float32, **settings)
    inputs = tokens(1, LENGTH)
    pipe.step(inputs, inputs)
    return gradients(pipe)


def largest_error(wide: dict[str, Tensor], found: dict[str, Tensor]) -> float:
    """The norm of the difference over the norm of the gradient, the worst of all weights."""
    errors = {name: (found[name].double() - each.double()).norm() / each.double().norm() for name, each in wide.items()}
    return float(max(errors.values()))


@pytest.mark.parametrize("context", ["device", "host"])
def test_over_64_slices_in_bfloat16_gradients_are_nearly_those_of_wide_sums(context: str) -> None:
    wide = trained(torch.bfloat16, context=context)
    found = trained(torch.bfloat16, context=context, context_gradients="model")
    assert 0 < largest_error(wide, found) < BOUND


def test_in_float32_the_two_are_one() -> None:
    wide = trained(torch.float32, context="host")
    found = trained(torch.float32, context="host", context_gradients="model")
    assert largest_error(wide, found) == 0


@pytest.mark.parametrize("gradients", ["wide", "model"])
def test_the_account_knows_their_bytes(gradients: str) -> None:
    """As they are measured, and as they are counted before anything runs."""
    settings: dict[str, Any] = {"dtype": torch.bfloat16, "context_gradients": gradients}
    inputs = tokens(1, LENGTH)
    table = make_pipe(build(LLAMA), slices=4, **settings).memory_table(inputs, inputs)
    costs = CountedOperations(count_model(LLAMA, LENGTH, torch.bfloat16), Degrees(), 1)
    counted = with_context_gradients(costs, gradients).context_gradient_bytes(range(costs.num_layers), LENGTH)
    assert table.context_gradients[0] == counted == table.context[0] * (2 if gradients == "wide" else 1)
