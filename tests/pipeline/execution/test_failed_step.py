"""A step that failed leaves nothing behind: the next one is that of a fresh pipeline."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from slipstream import Pipeline
from slipstream.model import causal_cross_entropy
from support.architectures import ARCHITECTURES, tokens
from support.parameters import each_once
from support.pipelines import make_pipe


@pytest.mark.parametrize(("num_before", "name"), each_once([2, 5, 0], ["llama", "llama, tied"], 1))
def test_the_next_step_is_that_of_a_fresh_pipeline(name: str, num_before: int) -> None:
    """The loss function raises after some slices, while messages of others are on their way."""
    left = 1000

    def breaking(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        nonlocal left
        left -= 1
        if left == -1:
            raise RuntimeError("no loss")
        return causal_cross_entropy(outputs, targets)

    def make(**settings: object) -> Pipeline:
        return make_pipe(ARCHITECTURES[name], num_ranks=2, num_microbatches=2, slices=4, **settings)

    torch.manual_seed(0)
    pipe, fresh = make(loss_fn=breaking), make()
    for each in (pipe, fresh):
        each.step(tokens(), tokens())  # the first tries a given loss function, too
        for parameter in each.parameters():
            parameter.grad = None
    left = num_before
    with pytest.raises(RuntimeError, match="no loss"):
        pipe.step(tokens(), tokens())
    for parameter in pipe.parameters():
        parameter.grad = None
    inputs = tokens(seed=1)
    assert torch.equal(pipe.step(inputs, inputs), fresh.step(inputs, inputs))
    found, wanted = dict(pipe.named_parameters()), dict(fresh.named_parameters())
    for key, parameter in wanted.items():
        assert parameter.grad is not None
        assert torch.equal(found[key].grad, parameter.grad), key
