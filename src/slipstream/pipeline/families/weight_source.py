"""The source of a pipeline's weights: a model in memory, or one of which each rank makes only its layers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from transformers import PretrainedConfig, PreTrainedModel

from slipstream.errors import SlipstreamError
from slipstream.model import ModelAnatomy, StagePart, load_config, pretrained_model, random_model
from slipstream.model.saving import compiled_modules
from slipstream.options import Precision
from slipstream.pipeline.pipeline_options import torch_dtype


@dataclass(frozen=True)
class WeightSource:
    """A model that need not be in memory yet: `load` makes the given layers of it."""

    config: PretrainedConfig
    load: Callable[[ModelAnatomy, list[StagePart]], PreTrainedModel]
    compiled: tuple[str, ...] = ()  # modules that torch.compile runs


def in_memory(model: object) -> WeightSource:
    if not isinstance(model, PreTrainedModel):
        raise SlipstreamError(
            f"model is a {type(model).__name__}; give a causal LM of transformers, for example "
            "AutoModelForCausalLM.from_pretrained(...), or an nn.Sequential without another forward or hooks."
        )
    if any(parameter.is_meta for parameter in model.parameters()):
        raise SlipstreamError(
            "model is on the meta device, so it has no weights. Use Pipeline.from_config(config, seed=...) or "
            "Pipeline.from_pretrained(folder): each rank then makes only its own layers."
        )
    return WeightSource(model.config, lambda *_: model, tuple(compiled_modules(model)))


def random_weights(config: PretrainedConfig, seed: int, precision: Precision) -> WeightSource:
    """Returns the weights that `AutoModelForCausalLM.from_config(config)` has after `torch.manual_seed(seed)`."""
    dtype = torch_dtype(precision.dtype)
    return WeightSource(config, lambda anatomy, layers: random_model(config, seed, anatomy, layers, dtype))


def pretrained_weights(path: str, precision: Precision) -> WeightSource:
    """Returns the weights of a folder of safetensors or a name on the hub."""
    config, dtype = load_config(path), torch_dtype(precision.dtype)
    return WeightSource(config, lambda anatomy, layers: pretrained_model(path, config, anatomy, layers, dtype))
