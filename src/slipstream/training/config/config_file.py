"""Reads a configuration from YAML and dotted overrides, and fills in the mesh."""

from __future__ import annotations

import os
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from slipstream.errors import SlipstreamError
from slipstream.option_problems import describe_problems
from slipstream.training.config.run_config import Config


class _TwiceError(Exception):
    """A key is given twice in one section."""


class _Loader(yaml.SafeLoader):
    """Refuses a key that is given twice, of which YAML would keep the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        lines: dict[Any, int] = {}
        for key, _ in node.value:
            line = key.start_mark.line + 1
            if key.tag != "tag:yaml.org,2002:merge" and (first := lines.setdefault(key.value, line)) != line:
                raise _TwiceError(f"{key.value} is given in line {first} and again in line {line}; leave one out")
        return super().construct_mapping(node, deep)


def load_config(path: Path, overrides: Sequence[str] = ()) -> Config:
    """Returns the configuration of a YAML file, with `section.key=value` overrides (values are YAML).

    A schedule's text file is looked for in the folder of the configuration that names it; one that an override names,
    in the working folder.

    Raises SlipstreamError for a file that can't be read, an unknown key or a value that isn't allowed.
    """
    try:
        values = yaml.load(path.read_text(encoding="utf-8"), _Loader)
    except _TwiceError as error:
        raise SlipstreamError(f"{path}: {error}") from None
    except OSError as error:
        raise SlipstreamError(f"can't read the configuration {path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise SlipstreamError(f"{path} isn't valid YAML: {error}") from error
    if not isinstance(values, dict):
        raise SlipstreamError(f"{path} holds no settings; it needs at least: model, data, training")
    _locate_schedule(values, path.parent)
    for override in overrides:
        set_override(values, override)
    _locate_schedule(values, Path())
    _fill_mesh(values)
    return parse_config(values)


def parse_config(values: dict[str, Any]) -> Config:
    """Returns a checked configuration from nested dictionaries; SlipstreamError lists everything that is wrong."""
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


def _locate_schedule(values: dict[str, Any], folder: Path) -> None:
    """Makes the path of a schedule's text file absolute: the run's own configuration is in another folder."""
    pipeline = values.get("pipeline")
    name = pipeline.get("schedule") if isinstance(pipeline, dict) else None
    if isinstance(name, str) and name.endswith(".txt"):
        values["pipeline"]["schedule"] = str((folder / name).absolute())


# The axes of the mesh, as they are typed, and the settings that they are
_MESH = {"pp": ("pipeline", "num_ranks"), "dp": ("parallel", "data"), "tp": ("parallel", "tensor")}


def _fill_mesh(values: dict[str, Any]) -> None:
    """Gives an axis that is `auto` the processes that the others leave: the launcher's, or one for each GPU."""
    given = {
        axis: (values.get(section) or {}).get(name) or getattr(Config.model_fields[section].default, name)
        for axis, (section, name) in _MESH.items()
    }
    automatic = [axis for axis, size in given.items() if size == "auto"]
    if not automatic:
        return
    if len(automatic) > 1:
        raise SlipstreamError(
            f"--{automatic[0]}=auto and --{automatic[1]}=auto: one axis can take what the others leave. Give the other "
            "one, or let `slipstream plan` choose all three."
        )
    others = prod(int(size) for axis, size in given.items() if axis not in automatic)
    world = _num_processes(automatic[0])
    if world % others:
        raise SlipstreamError(
            f"--{automatic[0]}=auto: {world} processes don't divide by the {others} of the other axes; start a "
            f"multiple of {others}, or change them"
        )
    section, name = _MESH[automatic[0]]
    values.setdefault(section, {})[name] = world // others


def _num_processes(axis: str) -> int:
    if "WORLD_SIZE" in os.environ:
        return int(os.environ["WORLD_SIZE"])
    import torch

    if not torch.cuda.device_count():
        raise SlipstreamError(
            f"--{axis}=auto: there is no launcher and no GPU to count; give a number, such as --{axis}=2"
        )
    return torch.cuda.device_count()


def set_override(values: dict[str, Any], override: str) -> None:
    """Sets `--a.b=value` or `a.b=value` in nested dictionaries. Raises SlipstreamError where it can't be read."""
    name, equals, text = override.removeprefix("--").partition("=")
    if not equals or not name:
        raise SlipstreamError(f"can't read the override {override!r}; write it as --training.steps=100")
    *path, key = _MESH.get(name) or name.split(".")
    section = values
    for part in path:
        section = section.setdefault(part, {})
        if not isinstance(section, dict):
            raise SlipstreamError(f"can't set {name}: {part} is the value {section!r}, not a section")
    try:
        section[key] = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise SlipstreamError(f"the value of {name}={text!r} isn't valid YAML: {error}") from error
