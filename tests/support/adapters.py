"""Models with adapters of PEFT, and the comparison of a pipeline's gradients with those of the whole model."""

from __future__ import annotations

import copy
from typing import Any

import peft
import torch
from torch import Tensor

from slipstream.model.added_adapter import quiet_peft
from support.architectures import (
    ARCHITECTURES,
    build,
    gradient_error,
    gradients,
    labels_of,
    no_rounding_inside,
    tokens,
    unsplit_step,
)

PREFIX = "base_model.model."  # of a parameter's name in a PeftModel
SLICES = [30, 17, 11, 6]


def lora(**changes: Any) -> peft.LoraConfig:
    return peft.LoraConfig(
        **{"r": 4, "target_modules": ["q_proj", "v_proj", "down_proj"], "task_type": "CAUSAL_LM"} | changes
    )


def adapted(config: peft.PeftConfig, architecture: str = "llama") -> peft.PeftModel:
    """A model with an adapter whose weights are all drawn, so that none has a gradient of zero."""
    with quiet_peft():
        model = peft.get_peft_model(build(ARCHITECTURES[architecture]), config, autocast_adapter_dtype=False).double()
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return model


def whole_gradients(model: peft.PeftModel, batch: int = 2) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients of the unsplit model, by the names of the model inside."""
    whole, inputs = copy.deepcopy(model), tokens(batch)
    with no_rounding_inside():
        loss = unsplit_step(whole, inputs, labels_of(inputs))
    return loss, {name.removeprefix(PREFIX): found for name, found in gradients(whole).items()}


def pipe_error(pipe: Any, expected: dict[str, Tensor], batch: int = 2) -> float:
    """The error of a pipeline's gradients in one step; that it has those of the trained parameters and no others."""
    inputs = tokens(batch)
    with no_rounding_inside():
        pipe.step(inputs, labels_of(inputs))
    found = gradients(pipe)
    assert found.keys() == expected.keys()
    return gradient_error(expected, found)
