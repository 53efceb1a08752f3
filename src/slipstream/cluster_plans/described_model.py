"""A model as commands and `slipstream.plan` take it: by a name, a folder, a file, or a configuration in memory."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any

import yaml
from transformers import PretrainedConfig

from slipstream.errors import SlipstreamError, syntax_text
from slipstream.foreign_text import parse_json, parse_yaml, read_text
from slipstream.model import config_from_settings, load_config, trust_remote_code
from slipstream.units import plural

_YAML = (".yaml", ".yml")


class DescribedModel:
    """What describes a model, and what it says, each file of which is read once.

    Args:
        model: a transformers configuration; a folder or hub name; or a .json or .yaml file with a transformers
            configuration, or a training configuration with a `model` section.
        trusts_code: whether code that comes with the model is run.
    """

    def __init__(self, model: str | Path | PretrainedConfig, trusts_code: bool = False) -> None:
        self._model = model
        self._trusts_code = trusts_code

    @cached_property
    def settings(self) -> dict[str, Any]:
        """The settings of the file; none where it isn't one.

        Raises SlipstreamError where it can't be read.
        """
        if isinstance(self._model, PretrainedConfig):
            return {}
        path = Path(self._model)
        if path.suffix not in (*_YAML, ".json"):
            return {}
        try:
            text = read_text(path)
            values = parse_json(text) if path.suffix == ".json" else parse_yaml(text)
        except OSError as error:
            raise SlipstreamError(f"can't read the model's configuration {path}: {error.strerror}.") from error
        except (ValueError, yaml.YAMLError) as error:
            raise SlipstreamError(f"{path} isn't valid {path.suffix[1:].upper()}: {syntax_text(error)}.") from error
        return values if isinstance(values, dict) else {}

    @cached_property
    def section(self) -> dict[str, Any]:
        """A training configuration's `model` section for this model: a path or a config.

        Raises SlipstreamError for a file that can't be read or that describes no model.
        """
        if isinstance(self._model, PretrainedConfig):
            return {"config": {"model_type": self._model.model_type, **self._model.to_diff_dict()}}
        path = Path(self._model)
        if path.suffix not in (*_YAML, ".json"):
            return {"path": str(self._model)}
        if "model_type" in self.settings:
            return {"config": self.settings}
        section = self.settings.get("model")
        if not isinstance(section, dict) or not {"path", "config"} & section.keys():
            raise SlipstreamError(
                f"{path} describes no model: give a transformers configuration with a model_type (a config.json), or a "
                "training configuration whose model section has a path or a config."
            )
        return section

    @property
    def freeze(self) -> list[str]:
        """The patterns of `model.freeze` of a training configuration; of anything else none."""
        patterns: list[str] = self.section.get("freeze") or []
        return patterns

    @property
    def lora(self) -> dict[str, Any] | None:
        """The `lora` section of a training configuration; None where there is none."""
        section = self.settings.get("lora")
        return section if isinstance(section, dict) else None

    @property
    def is_run(self) -> bool:
        """Whether it is the configuration of a training, with the data to train on."""
        is_file = not isinstance(self._model, PretrainedConfig) and Path(self._model).suffix in _YAML
        return is_file and "data" in self.settings

    @cached_property
    def config(self) -> PretrainedConfig:
        """The transformers configuration.

        Raises SlipstreamError where it can't be read.
        """
        if isinstance(self._model, PretrainedConfig):
            return self._model
        if self.section.get("path") is None:
            return config_from_settings(self.section["config"], str(self._model))
        path = str(self.section["path"])
        if self._trusts_code or self.section.get("trust_remote_code"):
            trust_remote_code(path)
        return load_config(path)

    @property
    def name(self) -> str:
        """The model's file or folder, its architecture and size."""
        text = self.config.get_text_config()
        shape = f"{self.config.model_type}, {plural(text.num_hidden_layers, 'layer')} of {text.hidden_size}"
        return shape if isinstance(self._model, PretrainedConfig) else f"{self._model} ({shape})"
