"""Compares a run that is resumed with its checkpoint: what can't change is refused, and what changes is shown."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any

from transformers import AutoConfig

from slipstream.checkpoint import CheckpointFolder, DamagedError, Manifest, SavedCheckpoint, find_best
from slipstream.launch import Progress
from slipstream.pipeline.saving import describe_model
from slipstream.training.config import Config
from slipstream.training.data import TrainingSequences
from slipstream.training.resuming import check_data, describe_data, differs
from slipstream.training.run_folder import RunFolder, exported
from slipstream.training.training_step import count_steps
from slipstream.training.validation import is_out_of_patience

_UNTOLD = ("training.output", "training.overwrite", "checkpoint.resume")  # they say where, not what


def check_resume(config: Config, model_config: Any, sequences: TrainingSequences, progress: Progress) -> bool:
    """Prints the settings that differ from those of the checkpoint that the run resumes from, if it does; returns
    whether its last step is done and its model exported.

    Raises:
        SlipstreamError: where the text, the order of its samples, or the model is another one.
    """
    saved = find_saved(config)
    if saved is None:
        return False
    _check_adapter(saved, config)
    if changes := list(_changes(saved.facts.get("settings"), config)):
        progress.say(f"resuming after step {saved.step} with other settings than before:{_table(changes)}")
    training = config.training
    check_data(saved.facts["data"], describe_data(sequences))
    saved.check_model(describe_model(_as_ranks_load_it(config, model_config)))
    has_stopped = is_out_of_patience(saved.facts.get("validation", {}), training.patience)
    if not ((has_stopped or saved.step >= count_steps(training, sequences)) and _is_exported(saved, config)):
        return False
    progress.say_result(
        f"the run has reached its last step, {saved.step}, and its model is in {RunFolder(training.output).model}: "
        f"nothing is left to do. To train further, give a larger --training.{'patience' if has_stopped else 'steps'}"
    )
    return True


def _check_adapter(saved: SavedCheckpoint, config: Config) -> None:
    """Raises SlipstreamError where the checkpoint is of an adapter and the run isn't, or of other weights."""
    had = bool((saved.facts.get("settings") or {}).get("lora"))
    if had != (config.lora is not None):
        was, now = ("an adapter", "all weights") if had else ("all weights", "an adapter (lora)")
        raise saved.unfit(f"holds {was}, but the run trains {now}")
    if config.lora is not None and differs(saved.facts.get("base"), str(config.model.path)):
        raise saved.unfit(
            f"holds an adapter of other weights than those in model.path={config.model.path}, which have been changed "
            "or replaced since"
        )


def _is_exported(saved: SavedCheckpoint, config: Config) -> bool:
    """Returns whether what is to be exported is there, of this checkpoint and not of a later one."""
    folder = RunFolder(config.training.output)
    newest = CheckpointFolder(folder.checkpoints).steps()[0]
    if (saved.facts.get("settings") or {}).get("training", {}).get("export", "last") != config.training.export:
        return False
    return saved.step == newest and all(folder.listed.is_itemised(each) for each in exported(folder.model, config))


def find_saved(config: Config) -> SavedCheckpoint | None:
    """Returns the checkpoint by what its manifest says; None where there is none, or it is damaged or
    another version's: the ranks, which verify every byte, then say which one is taken."""
    resume, folder = config.checkpoint.resume, CheckpointFolder(RunFolder(config.training.output).checkpoints)
    steps = [] if resume == "no" else folder.steps()
    if not steps:
        return None
    best = find_best(folder) if resume == "best" else None
    place = folder.complete(resume if isinstance(resume, int) else steps[0] if best is None else best.step)
    try:
        return SavedCheckpoint(place, Manifest.read(place))
    except DamagedError:
        return None


def _as_ranks_load_it(config: Config, model_config: Any) -> Any:
    if config.model.pretrained:
        return model_config
    with tempfile.TemporaryDirectory() as folder:  # saving and loading may change it
        model_config.save_pretrained(folder)
        return AutoConfig.from_pretrained(folder, trust_remote_code=False)


def _changes(before: Mapping[str, Any] | None, config: Config) -> Iterator[tuple[str, str, str]]:
    """Yields name, old and new value of each setting that differs; earlier checkpoints don't have them."""
    if before is None:
        return
    old, new = dict(_flat(before)), dict(_flat(json.loads(config.model_dump_json())))
    for name in dict.fromkeys(chain(old, new)):
        values = old.get(name, "absent"), new.get(name, "absent")
        if values[0] != values[1] and name not in _UNTOLD:
            yield name, *values


def _flat(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from _flat(inner, f"{name}.{key}" if name else key)
    else:
        yield name, value if isinstance(value, str) else json.dumps(value)


def _table(changes: list[tuple[str, str, str]]) -> str:
    rows = [("setting", "before", "now"), *changes]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "".join(f"\n  {line.rstrip()}" for line in lines)
