"""All checks of a run in their order, the cheapest first, and what they hand to the ranks by way of the run folder."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from typing import Any

from slipstream.errors import SlipstreamError
from slipstream.launch import Progress
from slipstream.training.config import Config, dump_config
from slipstream.training.data import TokenisedText
from slipstream.training.metrics import check_trackers
from slipstream.training.planned_start import what_prevents_a_plan
from slipstream.training.preflight.model_checks import check_model, load_model_config
from slipstream.training.preflight.text_preparation import check_vocabulary, prepare_text, split_text
from slipstream.training.run_folder import RunFolder


@dataclass(frozen=True)
class RunInputs:
    """The inputs of every rank: written once, read by all."""

    config: Config
    model_config: Any  # transformers.PretrainedConfig
    tokenizer: Any  # transformers.PreTrainedTokenizerBase
    train: TokenisedText
    validation: TokenisedText

    def write(self) -> None:
        """Makes the run folder with `inputs/` inside, and removes what an earlier run left unless it is resumed.

        Raises:
            SlipstreamError: if the folder can't be written.
        """
        folder = RunFolder(self.config.training.output)
        try:
            if _can_resume(self.config, folder):
                shutil.rmtree(folder.inputs, ignore_errors=True)
            else:
                folder.clear()
            folder.inputs.mkdir(parents=True)
            folder.config.write_text(dump_config(self.config), encoding="utf-8")
            self.model_config.save_pretrained(folder.inputs)
            self.tokenizer.save_pretrained(folder.inputs)
            self.train.save(folder.inputs, "train")
            self.validation.save(folder.inputs, "validation")
        except OSError as error:
            raise SlipstreamError(f"can't write to training.output={folder.path}: {error}") from error


def preflight(config: Config, progress: Progress) -> RunInputs:
    """Checks the run folder, the model and how it is split, and tokenises the text. Writes nothing.

    Raises:
        SlipstreamError: with what was given, what is allowed and what to type.
    """
    check_trackers(config.tracking.to)
    _check_run_folder(config)
    model_config = load_model_config(config.model)
    check_model(config, model_config, progress)
    if reason := what_prevents_a_plan(config):
        progress.say(reason)
    tokenizer, text = prepare_text(config, model_config, progress)
    check_vocabulary(int(text.tokens.max()), model_config)
    return RunInputs(config, model_config, tokenizer, *split_text(config, text))


def _check_run_folder(config: Config) -> None:
    """Raises SlipstreamError where the run would overwrite something that the configuration doesn't allow it to."""
    folder = RunFolder(config.training.output)
    if folder.path.exists() and not folder.path.is_dir():
        raise SlipstreamError(f"training.output={folder.path} is a file; name a folder")
    if _can_resume(config, folder):
        return
    kept = folder.find_earlier_run()
    if kept is not None and not config.training.overwrite:
        raise SlipstreamError(
            f"training.output={folder.path} already holds {kept.relative_to(folder.path)}; "
            "choose another folder, or replace it with --training.overwrite=true"
        )


def _can_resume(config: Config, folder: RunFolder) -> bool:
    return config.checkpoint.resume != "no" and folder.checkpoints.is_dir()
