"""Experts in one 3-D weight have PyTorch's gradients in every dtype, whether added immediately or deferred to W."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GptOssConfig, MixtralConfig, PretrainedConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

from slipstream.model.weight_gradients import add_expert_gradients_in_place, defer_weight_gradients
from support.architectures import (
    ARCHITECTURES,
    BOUND,
    gradient_error,
    labels_of,
    no_rounding_inside,
    tokens,
    unsplit_step,
)
from support.parameters import first_of
from support.pipelines import make_pipe

_SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_local_experts": 5, "num_experts_per_tok": 2}
_ROUNDING = {torch.float64: 1e-13, torch.float32: 1e-5, torch.bfloat16: 3e-2}


def experts(kind: type[nn.Module], config: PretrainedConfig, dtype: torch.dtype, implementation: str) -> nn.Module:
    config._experts_implementation = implementation
    torch.manual_seed(0)
    made = kind(config).to(dtype)
    for parameter in made.parameters():
        nn.init.normal_(parameter, std=0.3)
    return made


def backward(module: nn.Module, seed: int) -> Tensor:
    """The gradient of the input; no token is sent to expert 3."""
    generator = torch.Generator().manual_seed(seed)
    weights = torch.rand(7, 2, generator=generator)
    dtype = next(module.parameters()).dtype
    x = torch.randn(7, 16, generator=generator).to(dtype).requires_grad_()
    ids = torch.tensor([[0, 2], [1, 4], [2, 1], [0, 4], [4, 2], [1, 0], [0, 1]])
    module(x, ids, weights.to(dtype)).square().sum().backward()
    assert x.grad is not None
    return x.grad


def closeness(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize("dtype", _ROUNDING)
@pytest.mark.parametrize("kind", [MixtralExperts, GptOssExperts])  # the second's are transposed, with biases
def test_gradients_are_those_of_experts_one_by_one(kind: Any, dtype: torch.dtype, deferred: bool) -> None:
    config = (MixtralConfig if kind is MixtralExperts else GptOssConfig)(**_SIZES)
    theirs = experts(kind, config, dtype, "eager")
    ours = experts(kind, copy.deepcopy(config), dtype, "grouped_mm")
    add_expert_gradients_in_place(nn.Sequential(ours))
    for seed in range(2):  # the second adds to the first
        expected = backward(theirs, seed)
        if deferred:
            with defer_weight_gradients() as work:
                found = backward(ours, seed)
            assert len(work) == 2
            for add in work:
                add()
        else:
            found = backward(ours, seed)
        assert closeness(found, expected) < _ROUNDING[dtype]
    for parameter, wanted in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert closeness(parameter.grad, wanted.grad) < _ROUNDING[dtype]


def test_a_frozen_expert_gets_no_gradient() -> None:
    ours = experts(MixtralExperts, MixtralConfig(**_SIZES), torch.float64, "grouped_mm")
    ours.down_proj.requires_grad_(False)
    add_expert_gradients_in_place(ours)
    with defer_weight_gradients() as work:
        backward(ours, 0)
    assert len(work) == 1
    assert ours.down_proj.grad is None


@pytest.mark.parametrize("settings", first_of([{"schedule": "zb-h1", "recompute": "selective"}, {"recompute": 1}]))
@pytest.mark.parametrize("name", first_of(["mixtral", "gpt_oss", "qwen2_moe"]))
def test_grouped_products_are_exact_in_float64(name: str, settings: dict[str, Any]) -> None:
    torch.manual_seed(0)
    config, inputs = copy.deepcopy(ARCHITECTURES[name]), tokens()
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float64)
    assert model.config._experts_implementation == "grouped_mm"
    whole = copy.deepcopy(model)
    whole.set_experts_implementation("eager")
    with no_rounding_inside():
        expected = unsplit_step(whole, inputs, labels_of(inputs))
        pipe = make_pipe(model, slices=[5, 1, 30, 28], num_microbatches=2, num_ranks=2, **settings)
        loss = pipe.step(inputs, labels_of(inputs))
    assert abs(loss - expected) < BOUND * expected
    assert gradient_error(whole, pipe) < BOUND
