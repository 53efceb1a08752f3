"""A configuration as nested dictionaries: checked, and as text that is read back."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import yaml
from pydantic import ValidationError

from slipstream.errors import SlipstreamError
from slipstream.option_errors import describe_problems
from slipstream.train.config.run_config import Config


def parse_config(values: dict[str, Any]) -> Config:
    """Returns a checked configuration from nested dictionaries; SlipstreamError lists everything that is wrong."""
    change_paths(values, _without_tilde)
    try:
        return Config.model_validate(values)
    except ValidationError as error:
        raise SlipstreamError("\n".join(describe_problems(error, Config))) from None


def dump_config(config: Config) -> str:
    """Returns the configuration as YAML that `load_config` reads back."""
    values = config.model_dump(mode="json")
    left_out = ("microbatches",) if config.pipeline.microbatches is None else ("num_microbatches", "slices")
    for name in left_out:
        del values["pipeline"][name]
    if config.training.batch_tokens is not None:
        del values["training"]["batch_size"]
    return yaml.safe_dump(values, sort_keys=False)


_PATHS: dict[str, tuple[str, ...]] = {
    "model": ("path",),
    "lora": ("path",),
    "data": ("files", "dataset", "validation", "tokenizer", "chat_template"),
    # The path is absolute, so that the run can be found from any working folder.
    "training": ("output",),
}


def _without_tilde(name: str) -> str:
    """Returns a path with the home folder in place of ~, which a shell leaves as it is after = and in brackets."""
    return os.path.expanduser(name) if name.startswith("~") else name


def change_paths(values: dict[str, Any], change: Callable[[str], str]) -> None:
    """Replaces the paths and names of models, data and folders by what `change` returns for each."""

    def changed(given: Any) -> Any:
        if isinstance(given, list):
            return [changed(item) for item in given]
        return change(given) if isinstance(given, str) else given

    data = values.get("data")
    sources = data.get("sources") if isinstance(data, dict) else None
    named = [(values.get(section), names) for section, names in _PATHS.items()]
    named += [(source, _PATHS["data"]) for source in (sources if isinstance(sources, list) else ())]
    for section, names in named:
        if isinstance(section, dict):
            section.update({name: changed(section[name]) for name in names if name in section})
