"""Checks that a run goes on as it began: with the same model, text and weights."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any

from transformers import AutoConfig

from slipstream.checkpoint import CheckpointFolder, DamagedError, Manifest, SavedCheckpoint, find_best
from slipstream.launch import Progress, flat_settings
from slipstream.pipeline import describe_model
from slipstream.train.config import Config
from slipstream.train.data import TrainingSequences
from slipstream.train.elastic_mesh import table_of_changes
from slipstream.train.run_state import check_data, describe_data, differs
from slipstream.train.training_step import count_steps
from slipstream.train.validation import is_out_of_patience

# Settings that a run goes on with as before, where they are left open.
_KEPT = ("pipeline.schedule", "pipeline.slices", "pipeline.stages_per_rank")
_UNTOLD = ("training.output", "training.overwrite", "checkpoint.resume")  # settings without effect on numbers


def check_resume(config: Config, model_config: Any, sequences: TrainingSequences, progress: Progress) -> bool:
    """Prints the settings that differ from those of the checkpoint that the run resumes from, if it does; returns
    whether its last step is done and its model exported.

    Raises:
        SlipstreamError: where the text, the order of its samples, or the model is another one.
    """
    saved = find_saved(config)
    if saved is None:
        return False
    if "settings" not in saved.facts:
        raise saved.unfit("was saved by pipe.save, and doesn't say on what it was trained: pipe.load goes on from it")
    _check_adapter(saved, config)
    if changes := list(_changes(saved.facts["settings"], config)):
        progress.say(
            f"resuming after step {saved.step} with other settings than before:{table_of_changes('setting', changes)}"
        )
    training = config.training
    check_data(saved.facts["data"], describe_data(sequences))
    saved.check_model(describe_model(_as_ranks_load_it(config, model_config)))
    has_stopped = is_out_of_patience(saved.facts["validation"], training.patience)
    if not ((has_stopped or saved.step >= count_steps(training, sequences)) and _is_exported(saved, config)):
        return False
    progress.say_result(
        f"the run has reached its last step, {saved.step}, and its model is in {config.folder.model}: "
        f"nothing is left to do. To train further, give a larger --training.{'patience' if has_stopped else 'steps'}"
    )
    return True


def _check_adapter(saved: SavedCheckpoint, config: Config) -> None:
    """Raises SlipstreamError where the checkpoint is of an adapter and the run isn't, or of other weights."""
    had = saved.facts["settings"]["lora"] is not None
    if had != (config.lora is not None):
        was, now = ("an adapter", "all weights") if had else ("all weights", "an adapter (lora)")
        raise saved.unfit(f"holds {was}, but the run trains {now}")
    if config.lora is None:
        return
    was = saved.facts["settings"]["lora"]["base_precision"]
    now = config.lora.base_precision
    if was != now:
        raise saved.unfit(f"holds an adapter of weights with lora.base_precision={was}, but the run has {now}")
    if differs(saved.facts["base"], str(config.model.path)):
        raise saved.unfit(
            f"holds an adapter of other weights than those in model.path={config.model.path}, which have been changed "
            "or replaced since"
        )


def _is_exported(saved: SavedCheckpoint, config: Config) -> bool:
    """Returns whether the exported model is there, of this checkpoint and not of a later one."""
    folder = config.folder
    newest = CheckpointFolder(folder.checkpoints).steps()[0]
    if saved.facts["settings"]["training"]["export"] != config.training.export:
        return False
    return saved.step == newest and all(map(folder.listed.is_itemised, config.exports(folder.model)))


def find_saved(config: Config) -> SavedCheckpoint | None:
    """Returns the checkpoint by its manifest; None where there is none, or it is damaged or another version's: the
    ranks, which verify every byte, then say which one is taken."""
    resume = config.checkpoint.resume
    folder = CheckpointFolder(config.folder.checkpoints)
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
    # Saving and loading may change the configuration.
    with tempfile.TemporaryDirectory() as folder:
        model_config.save_pretrained(folder)
        return AutoConfig.from_pretrained(folder, trust_remote_code=False)


def _changes(before: Mapping[str, Any], config: Config) -> Iterator[tuple[str, str, str]]:
    """Yields name, old and new value of each setting that differs."""
    old = dict(flat_settings(before))
    new = dict(flat_settings(json.loads(config.model_dump_json())))
    for name in dict.fromkeys(chain(old, new)):
        values = old.get(name, "absent"), new.get(name, "absent")
        stays = name in _KEPT and values[1] == "null"
        if values[0] != values[1] and name not in _UNTOLD and not stays:
            yield name, *values
