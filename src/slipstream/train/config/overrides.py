"""Reads settings that are typed one by one, and checks their names and values without the others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import yaml
from pydantic import ValidationError

from slipstream.errors import SlipstreamError, syntax_text
from slipstream.foreign_text import parse_yaml
from slipstream.option_errors import describe_problems, records_in
from slipstream.train.config.config_values import parse_config
from slipstream.train.config.rules import OTHER_NAMES
from slipstream.train.config.run_config import Config
from slipstream.train.config.sections import MESH_SETTINGS


def set_override(values: dict[str, Any], override: str) -> None:
    """Sets `--a.b=value` or `a.b=value` in nested dictionaries. Raises SlipstreamError where it can't be read."""
    name, equals, text = override.removeprefix("--").partition("=")
    if not equals and override.startswith("--") and name.rpartition(".")[2] in OTHER_NAMES and not _is_setting(name):
        # The configuration refuses it then, and says what the name is here.
        equals, text = "=", "null"
    if not equals or not name:
        raise SlipstreamError(f"{override!r} isn't a setting with a value; write it as --training.steps=100")
    *path, key = MESH_SETTINGS.get(name) or name.split(".")
    section = values
    for part in path:
        section = section.setdefault(part, {})
        if not isinstance(section, dict):
            raise SlipstreamError(f"can't set {name}: {part} is the value {section!r}, not a section")
    try:
        section[key] = parse_yaml(text)
    except yaml.YAMLError as error:
        hint = "; put quotes around what begins with a *" if "*" in text else ""
        raise SlipstreamError(f"the value of {name}={text!r} isn't valid YAML: {syntax_text(error)}{hint}") from error


def _is_setting(name: str) -> bool:
    section, _, key = name.rpartition(".")
    return section in Config.model_fields and key in records_in(Config.model_fields[section].annotation)[0].model_fields


SMALLEST: dict[str, dict[str, Any]] = {
    "training": {"output": "runs", "seq_len": 1, "steps": 1},
    "pipeline": {"num_ranks": 1, "slices": 1},
}
"""The settings that a configuration needs next to its model and data."""


def read_settings(overrides: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Returns settings by section, from `section.key=value`.

    Raises:
        SlipstreamError: for text that isn't one, for unknown settings, and for values that no configuration can have.
    """
    settings: dict[str, Any] = {}
    for override in overrides:
        set_override(settings, override)
    check_names(settings)
    _check_values(settings)
    return settings


_IN_ANY: dict[str, dict[str, Any]] = {**SMALLEST, "model": {"path": "model"}, "data": {"files": ["text"]}}


def _check_values(given: dict[str, dict[str, Any]]) -> None:
    """Raises SlipstreamError for values of a wrong kind; whether they fit together shows in the whole configuration."""
    values = {**_IN_ANY, **{name: _IN_ANY.get(name, {}) | section for name, section in given.items() if section}}
    try:
        Config.model_validate(values)
    except ValidationError as error:
        if any(problem["type"] not in ("value_error", "missing") for problem in error.errors()):
            raise SlipstreamError("\n".join(describe_problems(error, Config))) from None


def check_names(given: dict[str, Any]) -> None:
    """Raises SlipstreamError for sections and settings that there aren't."""
    smallest = _IN_ANY
    for name, values in given.items():
        section = records_in(Config.model_fields[name].annotation)[0] if name in Config.model_fields else None
        if section is None or not isinstance(values, dict):
            parse_config({**smallest, name: values})
        elif unknown := {key: value for key, value in values.items() if key not in section.model_fields}:
            parse_config({**smallest, name: smallest.get(name, {}) | unknown})
