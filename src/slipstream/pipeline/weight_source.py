"""Where the weights of a pipeline come from: saved ones, random ones, or a model in memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import PretrainedConfig, PreTrainedModel

from slipstream.errors import SlipstreamError
from slipstream.model import (
    ALL_WEIGHTS,
    Adapter,
    GivenModel,
    ModelAnatomy,
    NewTokens,
    StagePart,
    TrainedWeights,
    adapted_model,
    adapter_of,
    add_adapter,
    check_base_precision,
    check_method,
    check_quantisable,
    check_saved_weights,
    check_unquantised,
    compare_with_config,
    compiled_modules,
    find_frozen,
    freeze,
    load_config,
    meta_model,
    pretrained_model,
    quantise,
    quantised_names,
    read_adapter_config,
    switch_off_dropout,
)
from slipstream.number_format import BasePrecision


class WeightSource(NamedTuple):
    """A model, possibly not in memory yet: `load` makes the given layers of it, in a dtype."""

    config: PretrainedConfig
    load: Callable[[ModelAnatomy, list[StagePart], torch.dtype | None], PreTrainedModel]
    compiled: tuple[str, ...] = ()  # modules run by torch.compile
    trained: TrainedWeights = ALL_WEIGHTS
    given: GivenModel | None = None  # differences of a model in memory from its configuration
    beside: Path | None = None  # folder of further files, copied beside saved weights


def pretrained_source(
    path: str,
    freeze: Sequence[str],
    lora: Any = None,
    lora_seed: int = 0,
    beside: Path | None = None,
    config: PretrainedConfig | None = None,
    base_precision: BasePrecision = "full",
    new_tokens: NewTokens | None = None,
    num_saved: int | None = None,
) -> WeightSource:
    """Returns the model of a folder or of a name on the hub as a source, as `Pipeline.from_pretrained` takes it; the
    files beside its weights are in that folder, or in `beside`. `config` may have more tokens than the folder's, which
    has `num_saved`, and `new_tokens` may lie in the padding of its rows.

    Raises SlipstreamError where it can't be trained so.
    """
    if config is None:
        config = load_config(path)
        num_saved = config.get_text_config().vocab_size
    load = partial(pretrained_model, path, config, new_tokens=new_tokens, num_saved=num_saved)
    source = WeightSource(config, load, beside=beside or Path(path))
    source = with_frozen(source, freeze)
    check_base_precision(base_precision, lora)
    return source if lora is None else _with_adapter(source, lora, lora_seed, path, base_precision)


def _with_adapter(source: WeightSource, lora: Any, seed: int, base: str, base_precision: BasePrecision) -> WeightSource:
    """Returns a source whose model, which is at `base`, gets an adapter: by a LoraConfig of PEFT, or of a saved folder.

    Raises SlipstreamError where it can't be trained, or a folder's isn't one of this model.
    """
    saved = lora if isinstance(lora, (str, Path)) else None
    config = lora if saved is None else read_adapter_config(saved, base)
    check_method(config)
    adapter = Adapter("default", config, base_precision)
    if adapter.on_4_bits:
        check_quantisable(meta_model(source.config), config, "lora_base_precision")
    if saved is not None:
        check_saved_weights(saved, adapted_model(meta_model(source.config), adapter), adapter)

    def load(anatomy: ModelAnatomy, parts: list[StagePart], dtype: torch.dtype | None) -> PreTrainedModel:
        model = source.load(anatomy, parts, dtype)
        whole = meta_model(source.config)
        names = quantised_names(whole) if adapter.on_4_bits else ()
        add_adapter(model, whole, config, seed, saved)
        quantise(model, names)
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


def without_dropout(source: WeightSource) -> WeightSource:
    """Returns a source whose model drops nothing in training."""

    def load(anatomy: ModelAnatomy, parts: list[StagePart], dtype: torch.dtype | None) -> PreTrainedModel:
        model = source.load(anatomy, parts, dtype)
        switch_off_dropout(model)
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
    if any(parameter.is_inference() for parameter in model.parameters()):
        raise SlipstreamError(
            "model was made within torch.inference_mode(), so it can't be trained. Make it outside of that."
        )
    if any(getattr(module, "gradient_checkpointing", False) for module in model.modules()):
        raise SlipstreamError(
            "model has gradient checkpointing enabled, which would run its layers again outside of the schedule. "
            "Disable it on the model: memory=slipstream.Memory(recompute='full') does what it does."
        )
    check_unquantised(model.config)
    trained = TrainedWeights.of(model, adapter)
    given = compare_with_config(model, adapter)
    return WeightSource(given.config, lambda *_: model, tuple(compiled_modules(model)), trained, given)
