"""Reads the file of a configuration, and finds the files that it names."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from slipstream.errors import SlipstreamError, syntax_text
from slipstream.foreign_text import parse_yaml, read_text
from slipstream.train.config.config_values import change_paths, parse_config
from slipstream.train.config.overrides import set_override
from slipstream.train.config.rules import check_is_ours
from slipstream.train.config.run_config import Config
from slipstream.train.config.this_machine import fill_in_for_this_machine, fill_mesh


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
    in the working folder. Models, texts and templates that the file names are looked for in the working folder, then in
    the file's own. Where a GPU is at hand, there are as many ranks by default, and weights in bfloat16.

    Raises SlipstreamError for a file that can't be read, an unknown key or a value that isn't allowed.
    """
    try:
        text = read_text(path)
        values = _parse_toml(text) if path.suffix == ".toml" else parse_yaml(text, _Loader)
    except _TwiceError as error:
        raise SlipstreamError(f"{path}: {error}") from None
    except IsADirectoryError:
        raise SlipstreamError(f"{path} is a folder, and a configuration is a YAML file; {_folder_hint(path)}") from None
    except OSError as error:
        raise SlipstreamError(f"can't read the configuration {path}: {error.strerror}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        kind = "TOML" if path.suffix == ".toml" else "YAML"
        raise SlipstreamError(f"{path} isn't valid {kind}: {syntax_text(error)}") from error
    if not isinstance(values, dict):
        raise SlipstreamError(f"{path} holds no settings; it needs at least: model, data, training")
    check_is_ours(path, values)
    _locate_schedule(values, path.parent)
    _locate_paths(values, path.parent)
    for override in overrides:
        set_override(values, override)
    _locate_schedule(values, Path())
    fill_in_for_this_machine(values)
    fill_mesh(values)
    return parse_config(values)


def _parse_toml(text: str) -> dict[str, Any]:
    import tomllib

    return tomllib.loads(text)


def _folder_hint(folder: Path) -> str:
    """Returns what to type in place of a folder: its configuration where it is a run's, or else how to write one."""
    from slipstream.train.run_folder import RunFolder

    run = RunFolder(folder)
    if run.config.is_file():
        return f"the one of the run in it is {run.config}"
    if (folder / "config.json").is_file():
        return f"to train the model in it, type slipstream init {folder} DATA, which writes one"
    return "slipstream init MODEL DATA writes one"


def _locate_schedule(values: dict[str, Any], folder: Path) -> None:
    """Makes the path of a schedule's text file absolute: the run's own configuration is in another folder."""
    pipeline = values.get("pipeline")
    name = pipeline.get("schedule") if isinstance(pipeline, dict) else None
    if isinstance(name, str) and name.endswith(".txt"):
        values["pipeline"]["schedule"] = str((folder / os.path.expanduser(name)).absolute())


def _locate_paths(values: dict[str, Any], folder: Path) -> None:
    """Replaces paths that aren't in the working folder, but in this one, by their place there."""

    def located(name: str) -> str:
        return name if os.path.exists(name) or not os.path.exists(folder / name) else str(folder / name)

    change_paths(values, located)
