"""Builds models with encoder, decoder or vision parts at toy size, and random inputs that fit them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from slipstream.model.toy import quiet_transformers, toy_config

_LENGTH = 12  # tokens


def toy_of(model: PreTrainedModel) -> PreTrainedModel:
    """Returns a model of the same class with few small layers and random weights, in float64 and evaluation mode."""
    config = _shrunk(model.config)
    with torch.random.fork_rng(devices=[]), quiet_transformers():
        torch.manual_seed(0)
        return type(model)(config).double().eval()


def toy_inputs(model: PreTrainedModel, names: Sequence[str]) -> dict[str, Tensor]:
    """Returns a random tensor of two rows for each name; the last tokens of the second row are padding."""
    generator = torch.Generator().manual_seed(0)
    return {name: _input(model, name, generator).to(model.device) for name in names}


def _input(model: PreTrainedModel, name: str, generator: torch.Generator) -> Tensor:
    config: Any = model.config
    if name == "pixel_values":
        size = config.image_size
        height, width = size if isinstance(size, (tuple, list)) else (size, size)
        return torch.randn(2, config.num_channels, height, width, generator=generator).to(model.dtype)
    if name == "inputs_embeds":
        return torch.randn(2, _LENGTH, config.get_text_config().hidden_size, generator=generator).to(model.dtype)
    if name.endswith("attention_mask"):
        return (torch.arange(_LENGTH) < torch.tensor([[_LENGTH], [_LENGTH - 3]])).long()
    return torch.randint(1, config.get_text_config().vocab_size, (2, _LENGTH), generator=generator)


def _shrunk(config: PretrainedConfig) -> PretrainedConfig:
    toy: Any = toy_config(config)
    for name, value in list(vars(toy).items()):
        if isinstance(value, PretrainedConfig):
            setattr(toy, name, _shrunk(value))
    encoder = getattr(toy, "encoder", None)
    if encoder is not None and hasattr(getattr(toy, "decoder", None), "cross_attention_hidden_size"):
        toy.decoder.cross_attention_hidden_size = encoder.hidden_size
    return toy
