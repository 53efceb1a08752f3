"""Makes models' configs, by code of their own where that is trusted, and checks inputs against their limits.

That is the longest sequence, the largest token id, and the ids that stand for no text.
"""

from __future__ import annotations

import copy
import difflib
import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, PretrainedConfig
from transformers.dynamic_module_utils import get_class_from_dynamic_module
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_MASKED_LM_MAPPING,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
)

from slipstream.errors import SlipstreamError, check_not_misspelt, path_hint

MANY_TOKENS = 2**20
"""Stands for the longest sequence of a model that has none: more than documents have."""
# Read by all classes, next to the settings that each one lists.
_READ_BY_ALL = ("model_type", "torch_dtype", "attn_implementation", "auto_map")
_CLASSES = ("AutoConfig", "AutoModelForCausalLM")


def load_config(path: str, compares_ends: bool = True) -> PretrainedConfig:
    """Returns the config of a model folder or hub name, untied where the folder has a head that isn't the embedding,
    unless somebody who has compared them says it.

    Raises SlipstreamError where there is none, and where the model comes with code of its own that isn't trusted.
    """
    check_not_misspelt(f"no model at {path!r}", path)
    try:
        # None instead of False would ask on the terminal.
        config = AutoConfig.from_pretrained(path, trust_remote_code=False)
        return _tied_as_saved(Path(path), config) if compares_ends else config
    # Each architecture checks its settings in its own way, with exceptions of any type.
    except Exception as error:
        raise _refusal(path, error) from error


def _refusal(path: str, error: Exception) -> SlipstreamError:
    """Returns why a model's config can't be made, as its config.json says, or else the error of making it.

    Raises SlipstreamError where there is no config.json that can be read.
    """
    settings = _settings(path)
    code = _custom_code(settings)
    if code and settings.get("model_type") not in CONFIG_MAPPING:
        return SlipstreamError(
            f"{path!r} comes with Python code of its own ({', '.join(code)}), which transformers would run to make the "
            "model. That code can do whatever you can on this machine and on every rank: read it first. To allow it, "
            "set model.trust_remote_code: true in a training configuration, give --trust-remote-code to check, init, "
            "export, eval or generate, or "
            f"call slipstream.trust_remote_code({path!r}) in your own loop."
        )
    return SlipstreamError(f"{path!r} isn't a model that transformers knows. {in_a_line(error)}")


def _tied_as_saved(folder: Path, config: PretrainedConfig) -> PretrainedConfig:
    """Returns the config, without tied embeddings where the folder's weights have both and they differ, as transformers
    then loads them whatever the config says."""
    kind: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    tied = getattr(kind[0] if isinstance(kind, tuple) else kind, "_tied_weights_keys", None)
    if not isinstance(tied, dict) or not getattr(config.get_text_config(), "tie_word_embeddings", False):
        return config
    files: dict[str, Path] = {}
    try:
        for file in sorted(folder.glob("*.safetensors")):
            with safe_open(file, framework="pt") as weights:
                files |= dict.fromkeys(weights.keys(), file)
        for names in tied.items():
            keys = [next((key for key in files if f".{name}".endswith(f".{key}")), None) for name in names]
            if None not in keys and not torch.equal(*(_tensor(files[str(key)], str(key)) for key in keys)):
                return with_settings(config, {"tie_word_embeddings": False})
    except (OSError, SafetensorError):
        return config  # loading the weights names their problem
    return config


def _tensor(file: Path, name: str) -> Tensor:
    with safe_open(file, framework="pt") as weights:
        tensor: Tensor = weights.get_tensor(name)
    return tensor


def with_settings(config: PretrainedConfig, settings: Mapping[str, Any]) -> PretrainedConfig:
    """Returns a copy of a configuration, and of its text configuration, with other settings."""
    described = copy.deepcopy(config)
    for part in {id(part): part for part in (described, described.get_text_config())}.values():
        for name, value in settings.items():
            if hasattr(part, name):
                setattr(part, name, value)
    return described


def trust_remote_code(path: str) -> None:
    """Runs the Python code that a model's folder, or repository on the hub, comes with, and uses it in this process.

    The code can do whatever the user can. Does nothing for models of transformers, whose own code is used. Raises
    SlipstreamError where there is neither.
    """
    settings = _settings(path)
    if settings.get("model_type") in CONFIG_MAPPING:
        return
    code = _custom_code(settings)
    if len(code) < len(_CLASSES):
        raise SlipstreamError(
            f"{path!r} has no code for a causal LM: the auto_map of its config.json names "
            f"{', '.join(code) or 'nothing'}, and needs {' and '.join(_CLASSES)}"
        )
    config_class, model_class = (get_class_from_dynamic_module(reference, path) for reference in code)
    config_class.register_for_auto_class()
    # Registered code is written into exports.
    model_class.register_for_auto_class("AutoModelForCausalLM")
    AutoConfig.register(settings["model_type"], config_class, exist_ok=True)
    AutoModelForCausalLM.register(config_class, model_class, exist_ok=True)


def _settings(path: str) -> dict[str, Any]:
    """Returns the settings in a model's config.json."""
    check_not_misspelt(f"no model at {path!r}", path)
    try:
        settings: dict[str, Any] = PretrainedConfig.get_config_dict(path)[0]
        if not isinstance(settings, dict):
            raise TypeError("its config.json isn't a JSON object")
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        reason = str(error).partition("\n")[0]
        if Path(path).exists():
            raise SlipstreamError(f"no model at {path!r}: expected a folder with config.json. {reason}") from error
        raise SlipstreamError(
            f"no model at {path!r}: expected an existing folder or a hub name, and there is no such folder here"
            f"{path_hint(path)}. On the hub: {reason}"
        ) from error
    if not settings:
        is_there = not Path(path).is_dir() or Path(path, "config.json").exists()
        problem = "its config.json is empty; copy the model's own" if is_there else "expected a folder with config.json"
        raise SlipstreamError(f"no model at {path!r}: {problem}")
    return settings


def _custom_code(settings: Mapping[str, Any]) -> list[str]:
    """Returns the classes that a model's own files define for it, such as modeling_x.XForCausalLM."""
    named = settings.get("auto_map") or {}
    return [str(named[kind]) for kind in _CLASSES if kind in named]


def config_from_settings(settings: Mapping[str, Any], name: str) -> PretrainedConfig:
    """Returns a config made of these settings, one of which is `model_type`.

    Raises SlipstreamError, which calls the settings `name`, where transformers doesn't accept them.
    """
    values = {"model_type": None, **settings}
    _check_keys(values, name)
    try:
        made = AutoConfig.for_model(**values)
    # Each architecture checks its settings in its own way, with exceptions of any type.
    except Exception as error:
        if (kind := values["model_type"]) not in CONFIG_MAPPING:
            near = difflib.get_close_matches(str(kind), list(CONFIG_MAPPING), 3)
            hint = f"did you mean {' or '.join(map(repr, near))}?" if near else "give one such as 'llama' or 'qwen3'."
            raise SlipstreamError(
                f"{name} with model_type={kind!r} isn't usable: transformers has none; {hint}"
            ) from None
        raise SlipstreamError(
            f"{name} with model_type={values['model_type']!r} isn't usable: {in_a_line(error)}"
        ) from error
    heads, shared = (getattr(made.get_text_config(), key, None) for key in ("num_attention_heads", _KEY_HEADS))
    if isinstance(heads, int) and isinstance(shared, int) and (shared < 1 or heads % shared):
        raise SlipstreamError(
            f"{name}.{_KEY_HEADS}={shared}: {heads} attention heads can't share them evenly; give a divisor of {heads}"
        )
    return made


_KEY_HEADS = "num_key_value_heads"


def in_a_line(error: Exception) -> str:
    """Returns the message of an error, of which transformers breaks the lines."""
    return " ".join(str(error).split())


def _check_keys(settings: Mapping[str, Any], name: str) -> None:
    """Raises SlipstreamError for a setting that the architecture doesn't read, and that is like one that it does.

    transformers keeps any setting, and the model then has another one's default. A setting that is like none passes:
    some configs read settings that they don't list.
    """
    kind = settings["model_type"]
    if kind not in CONFIG_MAPPING:
        return
    made = CONFIG_MAPPING[kind]
    listed = {*vars(made()), *made.attribute_map, *inspect.signature(made.__init__).parameters, *_READ_BY_ALL}
    public = [key for key in sorted(listed) if not key.startswith("_")]
    for key in settings.keys() - listed:
        if near := difflib.get_close_matches(str(key), public, 1):
            raise SlipstreamError(
                f"unknown key {name}.{key}: a config of model_type={kind!r} has none; did you mean '{name}.{near[0]}'?"
            )


def check_is_causal_lm(config: PretrainedConfig) -> None:
    """Raises SlipstreamError, which names its kind, for a configuration without a causal LM in transformers."""
    if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING:
        try:
            config.get_text_config()
        except ValueError as error:  # text on both sides
            raise SlipstreamError(
                f"model_type {config.model_type!r} has several language models ({error}). Give one's configuration."
            ) from error
        return
    kind = "it has no language-model head that predicts the next token"
    if type(config) in MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING:
        kind = "it is an encoder and a decoder, of which only both together have a head"
    elif type(config) in MODEL_FOR_MASKED_LM_MAPPING:
        kind = "it is an encoder; slipstream.sequence_of pipelines some of them, without token slices"
    raise SlipstreamError(f"transformers has no causal LM of model_type {config.model_type!r}: {kind}.")


def check_unquantised(config: PretrainedConfig) -> None:
    """Raises SlipstreamError where the weights of a folder, of a hub name or of a model in memory are quantised: a run
    would find no such parameters, or train none."""
    found = getattr(config, "quantization_config", None) or getattr(
        config.get_text_config(), "quantization_config", None
    )
    if found is None:
        return
    method = found.get("quant_method") if isinstance(found, Mapping) else getattr(found, "quant_method", None)
    raise SlipstreamError(
        f"the weights of this {config.model_type!r} are quantised (quantization_config in its config.json: "
        f"{getattr(method, 'value', method)}), and can't be trained so; give the model that they were made of, and "
        "where memory is short train an adapter beside its weights in 4 bits: `slipstream train` with --lora.r=16 "
        "--lora.base_precision=nf4, in your own loop Pipeline.from_pretrained(..., lora=..., lora_base_precision='nf4')"
    )


def check_counted_positions(config: PretrainedConfig, input_ids: Tensor, first: int) -> None:
    """Raises SlipstreamError for tokens (b, T) of a model whose positions, from `first` on, don't count padding.

    These are too many tokens, or padding before others.
    """
    limit = config.max_position_embeddings - first
    length = input_ids.shape[-1]
    if length > limit:
        raise SlipstreamError(
            f"the sequence has {length} tokens, but {config.model_type!r} has max_position_embeddings="
            f"{limit + first}, of which the first {first} are reserved. Use at most {limit} tokens."
        )
    pads = input_ids == config.pad_token_id
    rows = (pads[:, :-1] & ~pads[:, 1:]).any(1).nonzero().flatten().tolist()
    if rows:
        raise SlipstreamError(
            f"row {rows[0]} of the inputs has padding (token id {config.pad_token_id}) before other tokens: "
            f"{config.model_type!r} counts positions without padding, and a slice doesn't know how much came before. "
            "Put padding at the end, or pack documents without it."
        )


def check_length(config: PretrainedConfig, length: int, setting: str = "") -> None:
    """Raises SlipstreamError for a sequence longer than the model's positions; `setting` names the length's source."""
    limit = longest_sequence(config)
    if limit is None or length <= limit:
        return
    problem = f"the sequence has {length} tokens, but {config.model_type!r} has max_position_embeddings={limit}"
    if setting:
        problem = f"{setting}={length} is more than the model's {limit} positions (max_position_embeddings)"
    raise SlipstreamError(f"{problem}. Use at most {limit} tokens, or a config with more positions.")


def longest_sequence(config: PretrainedConfig) -> int | None:
    """Returns the model's max_position_embeddings, in tokens; None where sequences may be of any length.

    Rope of type dynamic grows with the sequence: there max_position_embeddings is only where it begins to.
    """
    text = config.get_text_config()
    rope = getattr(text, "rope_parameters", None) or {}
    # A kind of layers may have settings of its own.
    kinds = [rope, *(inner for inner in rope.values() if isinstance(inner, dict))]
    limit: int | None = getattr(text, "max_position_embeddings", None)
    return None if any(kind.get("rope_type") == "dynamic" for kind in kinds) else limit


def check_router_loss(config: PretrainedConfig, setting: str = "router_loss") -> None:
    """Raises SlipstreamError where a mixture of experts asks for transformers' load-balancing loss; users ask for
    another one by `setting`."""
    if getattr(config.get_text_config(), "output_router_logits", False):
        raise SlipstreamError(
            f"output_router_logits=True asks for the load-balancing loss of {config.model_type!r}, which is computed "
            f"over the experts of all layers together, and a stage has only some. Give {setting}='per_layer' to "
            "compute it for each layer, or set output_router_logits=False."
        )
