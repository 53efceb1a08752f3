"""Where the weights of a causal LM come from: a model in memory, or one of which each rank makes its layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from transformers import PretrainedConfig, PreTrainedModel

from slipstream.errors import SlipstreamError
from slipstream.model import ModelAnatomy, StagePart, meta_model
from slipstream.model.adapters import Adapter, adapter_of, add_adapter, check_method, find_frozen, freeze
from slipstream.model.saving import compiled_modules


class WeightSource(NamedTuple):
    """A model that need not be in memory yet: `load` makes the given layers of it, in a dtype."""

    config: PretrainedConfig
    load: Callable[[ModelAnatomy, list[StagePart], torch.dtype | None], PreTrainedModel]
    compiled: tuple[str, ...] = ()  # modules that torch.compile runs
    adapter: Adapter | None = None  # that the model has, or is to have


def with_adapter(source: WeightSource, config: Any, seed: int) -> WeightSource:
    """Returns a source whose model gets an adapter, by a LoraConfig of PEFT; raises SlipstreamError where it can't."""
    check_method(config)

    def load(anatomy: ModelAnatomy, parts: list[StagePart], dtype: torch.dtype | None) -> PreTrainedModel:
        model = source.load(anatomy, parts, dtype)
        add_adapter(model, meta_model(source.config), config, seed)
        return model

    return source._replace(load=load, adapter=Adapter("default", config))


def with_frozen(source: WeightSource, patterns: Sequence[str]) -> WeightSource:
    """Returns a source whose model has the parameters frozen that the patterns match.

    Raises SlipstreamError where a pattern matches none, or all together match every one.
    """
    if not patterns:
        return source
    names = find_frozen(meta_model(source.config), patterns)

    def load(anatomy: ModelAnatomy, parts: list[StagePart], dtype: torch.dtype | None) -> PreTrainedModel:
        model = source.load(anatomy, parts, dtype)
        freeze(model, names)
        return model

    return source._replace(load=load)


def in_memory(model: object) -> WeightSource:
    """Returns a model as a source; raises SlipstreamError where it isn't one that a Pipeline takes."""
    if hasattr(model, "_orig_mod"):
        raise SlipstreamError(
            "model is what torch.compile returned, which can't be cut into stages. Give the model itself, and for "
            "fused norms and activations runtime=slipstream.Runtime(fused=True)."
        )
    model, adapter = adapter_of(model)
    if not isinstance(model, PreTrainedModel):
        raise SlipstreamError(
            f"model is a {type(model).__name__}; give a causal LM of transformers, for example "
            "AutoModelForCausalLM.from_pretrained(...), or an nn.Sequential without another forward or hooks."
        )
    if model.get_output_embeddings() is None:
        raise SlipstreamError(
            f"model is a {type(model).__name__}, which has no language-model head to predict tokens with. Give the "
            "causal LM: AutoModelForCausalLM.from_pretrained(...) or AutoModelForCausalLM.from_config(...)."
        )
    if any(parameter.is_meta for parameter in model.parameters()):
        raise SlipstreamError(
            "model is on the meta device, so it has no weights. Use Pipeline.from_config(config, seed=...) or "
            "Pipeline.from_pretrained(folder): each rank then makes only its own layers."
        )
    if any(getattr(module, "gradient_checkpointing", False) for module in model.modules()):
        raise SlipstreamError(
            "model has gradient checkpointing enabled, which would run its layers again outside of the schedule. "
            "Leave it out, or disable it on the model, and give memory=slipstream.Memory(recompute='full')."
        )
    return WeightSource(model.config, lambda *_: model, tuple(compiled_modules(model)), adapter)
