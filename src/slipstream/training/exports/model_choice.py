"""The model that a command works with, and its tokenizer: a folder or hub name, or what a run has left."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream.errors import SlipstreamError
from slipstream.launch import Progress, temporary_folder
from slipstream.model import load_config, trust_remote_code
from slipstream.training.data import has_tokenizer, load_tokenizer
from slipstream.training.exports.checkpoint_choice import choose_checkpoint
from slipstream.training.exports.checkpoint_export import export_checkpoint
from slipstream.training.run_folder import RunFolder


@dataclass(frozen=True)
class OpenedModel:
    """A model that is about to be loaded: its folder or hub name, and its tokenizer."""

    path: str
    tokenizer: Any  # transformers.PreTrainedTokenizerBase
    trusts_code: bool
    run: RunFolder | None = None  # that has left it


@contextmanager
def opened_model(place: str, trusts_code: bool, progress: Progress, best: bool = False) -> Iterator[OpenedModel]:
    """Yields the model at `place`, or where that is a run its export, else its newest checkpoint, which is exported to
    a folder that is removed at the end; with `best` the run's best checkpoint.

    Raises:
        SlipstreamError: where there is no model, or it has no tokenizer.
    """
    path = Path(place)
    if not path.exists() and _is_surely_a_folder(place):
        raise SlipstreamError(
            f"there is no folder {place}; give a model's folder or hub name, a run's output folder, or a checkpoint"
        )
    if not path.exists() or (path / "config.json").is_file():
        if best:
            raise SlipstreamError(f"--best chooses a checkpoint of a run, and {place} is a model: leave it out")
        found: str | None = place
    else:
        found = None if best else _exported_by(RunFolder(path))
    if found is not None:
        yield _open(found, trusts_code, None if found == place else RunFolder(path))
        return
    chosen = choose_checkpoint(path, best=best)
    with temporary_folder() as folder:
        with progress.waiting("reading the checkpoint"):
            saved = chosen.read(progress.warn)
            export_checkpoint(chosen.run, saved, folder / "model", trusts_code)
        yield _open(str(folder / "model"), trusts_code, chosen.run)


def _is_surely_a_folder(place: str) -> bool:
    """Returns whether this can't be meant as a name on the hub, which is NAME or OWNER/NAME."""
    return place.startswith((".", "/", "~")) or place.count("/") > 1 or place.endswith("/")


def _exported_by(run: RunFolder) -> str | None:
    """Returns the model that a run has exported at its end; None where there is none, or where it isn't complete."""
    is_being_written = run.listed.has(run.model)
    return str(run.model) if (run.model / "config.json").is_file() and not is_being_written else None


def _open(path: str, trusts_code: bool, run: RunFolder | None) -> OpenedModel:
    if trusts_code:
        trust_remote_code(path)
    load_config(path)  # its errors say whether there is a model
    folder = Path(path)
    if folder.is_dir() and not has_tokenizer(folder):
        raise SlipstreamError(
            f"the model in {folder} has no tokenizer next to it; copy the files of its tokenizer there "
            "(tokenizer.json, tokenizer_config.json), which runs and `slipstream export` write with a model"
        )
    return OpenedModel(path, load_tokenizer(path, trusts_code), trusts_code, run)
