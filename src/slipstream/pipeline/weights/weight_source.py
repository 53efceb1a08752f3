"""Where the weights of a causal LM come from: a model in memory, or one of which each rank makes its layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import PretrainedConfig, PreTrainedModel

from slipstream.errors import SlipstreamError
from slipstream.model import ModelAnatomy, StagePart, load_config, meta_model, pretrained_model
from slipstream.model.adapters import (
    ALL_WEIGHTS,
    Adapter,
    TrainedWeights,
    adapted_model,
    adapter_of,
    add_adapter,
    check_method,
    check_saved_weights,
    find_frozen,
    freeze,
    read_adapter_config,
)
from slipstream.model.given_model import GivenModel, compare_with_config
from slipstream.model.saving import compiled_modules


class WeightSource(NamedTuple):
    """A model that need not be in memory yet: `load` makes the given layers of it, in a dtype."""

    config: PretrainedConfig
    load: Callable[[ModelAnatomy, list[StagePart], torch.dtype | None], PreTrainedModel]
    compiled: tuple[str, ...] = ()  # modules that torch.compile runs
    trained: TrainedWeights = ALL_WEIGHTS
    given: GivenModel | None = None  # how a model in memory differs from the configuration's
    beside: Path | None = None  # the folder of what lies beside the weights, and comes with what is saved


def pretrained_source(
    path: str, freeze: Sequence[str], lora: Any = None, lora_seed: int = 0, beside: Path | None = None
) -> WeightSource:
    """Returns the model of a folder or of a name on the hub as a source, as `Pipeline.from_pretrained` takes it; what
    lies beside its weights is in that folder, or in `beside`. Raises SlipstreamError where it can't be trained so."""
    config = load_config(path)
    source = WeightSource(config, partial(pretrained_model, path, config), beside=beside or Path(path))
    source = with_frozen(source, freeze)
    return source if lora is None else _with_adapter(source, lora, lora_seed, path)


def _with_adapter(source: WeightSource, lora: Any, seed: int, base: str) -> WeightSource:
    """Returns a source whose model, which is at `base`, gets an adapter: by a LoraConfig of PEFT, or of a saved folder.

    Raises SlipstreamError where it can't be trained, or a folder's isn't one of this model.
    """
    saved = lora if isinstance(lora, (str, Path)) else None
    config = lora if saved is None else read_adapter_config(saved, base)
    check_method(config)
    adapter = Adapter("default", config)
    if saved is not None:
        check_saved_weights(saved, adapted_model(meta_model(source.config), adapter), adapter)

    def load(anatomy: ModelAnatomy, parts: list[StagePart], dtype: torch.dtype | None) -> PreTrainedModel:
        model = source.load(anatomy, parts, dtype)
        add_adapter(model, meta_model(source.config), config, seed, saved)
        return model

    return source._replace(load=load, trained=TrainedWeights(adapter=adapter))


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

    return source._replace(load=load, trained=TrainedWeights(names))


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
    trained = TrainedWeights.of(model, adapter)
    given = compare_with_config(model, adapter)
    return WeightSource(given.config, lambda *_: model, tuple(compiled_modules(model)), trained, given)
