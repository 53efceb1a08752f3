"""The model of a plan, given as a folder, a hub name, a file or a transformers configuration."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml
from transformers import PretrainedConfig

from slipstream.errors import SlipstreamError
from slipstream.model import check_length, config_from_settings, load_config, trust_remote_code
from slipstream.planner.costs import ModelCount

_FILES = (".yaml", ".yml", ".json")


def model_section(model: str | Path | PretrainedConfig | ModelCount) -> dict[str, Any]:
    """Returns a training configuration's `model` section for this model: a path or a config.

    Raises:
        SlipstreamError: for a file that can't be read or that describes no model, and for a ModelCount.
    """
    if isinstance(model, ModelCount):
        raise SlipstreamError("a counted model can't be trained; give its transformers configuration, folder or name.")
    if isinstance(model, PretrainedConfig):
        return {"config": {"model_type": model.model_type, **model.to_diff_dict()}}
    path = Path(model)
    if path.suffix not in _FILES:
        return {"path": str(model)}
    values = _read(path)
    if "model_type" in values:
        return {"config": values}
    section = values.get("model")
    if not isinstance(section, dict) or not {"path", "config"} & section.keys():
        raise SlipstreamError(
            f"{path} describes no model: give a transformers configuration with a model_type (a config.json), or a "
            "training configuration whose model section has a path or a config."
        )
    return section


def frozen_patterns(model: str | Path | PretrainedConfig | ModelCount) -> list[str]:
    """Returns the `model.freeze` of a training configuration; of anything else nothing."""
    if isinstance(model, (str, Path)) and Path(model).suffix in _FILES:
        found: list[str] = model_section(model).get("freeze") or []
        return found
    return []


def lora_section(model: str | Path) -> dict[str, Any] | None:
    """Returns the `lora` section of a training configuration; None where there is none."""
    found = _read(Path(model)).get("lora") if Path(model).suffix in _FILES else None
    return found if isinstance(found, dict) else None


def _read(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
        values = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except OSError as error:
        raise SlipstreamError(f"can't read the model's configuration {path}: {error.strerror}.") from error
    except (ValueError, yaml.YAMLError) as error:
        raise SlipstreamError(f"{path} isn't valid {path.suffix[1:].upper()}: {error}.") from error
    return values if isinstance(values, dict) else {}


def model_config(
    model: str | Path | PretrainedConfig, seq_len: int | None = None, trusts_code: bool = False
) -> PretrainedConfig:
    """Returns the model's transformers configuration; with `trusts_code` by code that comes with it, too.

    Raises:
        SlipstreamError: where it can't be read, or the model doesn't take sequences of `seq_len` tokens.
    """
    if not isinstance(model, PretrainedConfig):
        section, name = model_section(model), str(model)
        has_path = section.get("path") is not None
        if has_path and (trusts_code or section.get("trust_remote_code")):
            trust_remote_code(str(section["path"]))
        model = load_config(str(section["path"])) if has_path else config_from_settings(section["config"], name)
    if seq_len is not None:
        check_length(model, seq_len, "seq_len")
    return model


def model_name(model: str | Path | PretrainedConfig, config: PretrainedConfig) -> str:
    """Returns the model's file or folder, its architecture and size."""
    text = config.get_text_config()
    shape = f"{config.model_type}, {text.num_hidden_layers} layers of {text.hidden_size}"
    return shape if isinstance(model, PretrainedConfig) else f"{model} ({shape})"
