"""The settings of an evaluation: those of the run whose model it is, or of a model alone, and what is typed besides."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from slipstream.errors import SlipstreamError
from slipstream.training.config import Config, SourceSection
from slipstream.training.config.config_file import parse_config, set_override
from slipstream.training.run_folder import RunFolder

# What an evaluation takes over from a run; it has one process, and trains nothing.
_TAKEN_OVER = ("model", "data", "preference", "training")
_TYPED = ("data", "preference")
_ABSENT: dict[str, Any] = {"steps": 1, "epochs": None, "eval_every": 0, "batch_size": 1, "batch_tokens": None}


def settings_of_run(run: RunFolder, file: str | None, seq_len: int | None, typed: Sequence[str]) -> Config:
    """Returns how the run validates; with `file` held out in place of its own text, in the form of its first source.

    Raises:
        SlipstreamError: where settings aren't allowed, or don't fit each other.
    """
    values = yaml.safe_load(run.config.read_text(encoding="utf-8"))
    data = values["data"]
    if sources := data.pop("sources", None):
        data |= {name: value for name, value in sources[0].items() if name in SourceSection.model_fields}
    if file is not None and not (data.get("dataset") or any(each.startswith("--data.dataset=") for each in typed)):
        check_file(Path(file))  # of a data set it may be the name of a split
    # The template of the run is in its tokenizer; the file may be gone.
    data |= {"streaming": False, "chat_template": None}
    values["data"] = data | ({} if file is None else {"validation": file})
    return _parse(values, seq_len, typed)


def settings_of_model(model: str, file: str, seq_len: int, typed: Sequence[str]) -> Config:
    """Returns how a model that no run has left is evaluated on a file: each document and each sample by itself.

    Raises:
        SlipstreamError: where settings aren't allowed, or don't fit each other.
    """
    values = {
        "model": {"path": model},
        "data": {"files": [file], "packing": "none", "validation_fraction": 0},
        "training": {"output": "unused", "seq_len": seq_len},
    }
    return _parse(values, None, typed)


def _parse(values: dict[str, Any], seq_len: int | None, typed: Sequence[str]) -> Config:
    kept: dict[str, Any] = {name: values[name] for name in _TAKEN_OVER if values.get(name) is not None}
    for setting in typed:
        name = setting.removeprefix("--").partition("=")[0]
        if not name.startswith(tuple(f"{section}." for section in _TYPED)):
            raise SlipstreamError(
                f"`slipstream eval` doesn't take {setting}: give settings of data and preference, such as "
                "--data.loss=all, or see `slipstream eval --help`"
            )
        set_override(kept, setting)
    training: Mapping[str, Any] = kept["training"]
    kept["training"] = {
        **{name: training[name] for name in ("output", "seq_len", "precision", "seed") if name in training},
        **_ABSENT,
        **({} if seq_len is None else {"seq_len": seq_len}),
    }
    kept["pipeline"] = {"num_ranks": 1, "slices": 1}
    return parse_config(kept)


def held_out_file(config: Config) -> Path | None:
    """Returns the file that is evaluated; None where it is a split of a data set."""
    names = [Path(str(config.data.validation))] if config.data.validation is not None else config.data.files or []
    return next((name for name in names if name.suffix or name.exists()), None)


def check_file(file: Path | None) -> None:
    """Raises SlipstreamError for a file that isn't there, or that is empty."""
    if file is not None and not file.is_file():
        raise SlipstreamError(
            f"there is no file {file}; give a text, or a table ending in .json, .jsonl, .csv or .parquet"
        )
    if file is not None and file.stat().st_size == 0:
        raise SlipstreamError(f"{file} is empty; give a file with text")
