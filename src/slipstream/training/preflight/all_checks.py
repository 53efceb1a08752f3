"""All checks of a run in their order, the cheapest first, and what they hand to the ranks by way of the run folder."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream.errors import SlipstreamError
from slipstream.launch import Progress
from slipstream.pipeline.weights import copy_beside, read_generation, write_generation
from slipstream.training.config import Config, dump_config
from slipstream.training.data import is_of_tokenizer, save_texts
from slipstream.training.metrics import check_trackers
from slipstream.training.ownership import FolderLock
from slipstream.training.planned_start import what_prevents_a_plan
from slipstream.training.preferences import check_reference
from slipstream.training.preflight.folder_check import check_run_folder
from slipstream.training.preflight.memory_check import check_memory
from slipstream.training.preflight.model_checks import check_model, load_model_config
from slipstream.training.preflight.optimizer_check import check_optimizer
from slipstream.training.preflight.resume_check import check_resume, find_saved
from slipstream.training.preflight.text_preparation import PreparedText, check_amount, check_sample, prepare_text
from slipstream.training.run_folder import RunFolder


@dataclass(frozen=True)
class RunInputs:
    """The inputs of every rank: written once, read by all."""

    config: Config
    model_config: Any  # transformers.PretrainedConfig
    text: PreparedText
    is_finished: bool  # the run was resumed after its last step, and its model is there

    def write(self) -> None:
        """Makes the run folder with `inputs/` inside, and removes what an earlier run left unless it is resumed.

        Call it while the folder is locked.

        Raises:
            SlipstreamError: if the folder can't be written, or another run has written to it since the preflight.
        """
        check_run_folder(self.config)
        folder = RunFolder(self.config.training.output)
        try:
            if self.config.checkpoint.resume == "no":
                folder.listed.remove()
            folder.listed.add(folder.config, folder.log)
            folder.listed.add_folder(folder.inputs)
            with folder.replaced(folder.config) as part:
                part.write_text(dump_config(self.config), encoding="utf-8")
            with folder.replaced(folder.inputs) as part:
                part.mkdir()
                self.model_config.save_pretrained(part)
                model = self.config.model
                if model.pretrained:
                    if (generation := read_generation(str(model.path))) is not None:
                        write_generation(part, generation)
                    # Files of a tokenizer that isn't the run's would be read with the run's own.
                    beside = part / folder.beside.name
                    copy_beside(
                        Path(str(model.path)), beside, None if self.config.has_models_tokenizer else is_of_tokenizer
                    )
                self.text.tokenizer.save_pretrained(part)
                save_texts(self.text.train, part, "train")
                save_texts(self.text.validation, part, "validation")
                if folder.inputs.exists():
                    folder.inputs.rename(before := folder.work / "inputs.before")
                    shutil.rmtree(before)
        except OSError as error:
            raise SlipstreamError(f"can't write to training.output={folder.path}: {error}") from error


def preflight(config: Config, progress: Progress) -> RunInputs:
    """Checks the run folder, the model and how it is split, and tokenises the text. Writes nothing.

    Raises:
        SlipstreamError: with what was given, what is allowed and what to type.
    """
    check_trackers(config.tracking.to)
    FolderLock(config.training.output, progress.warn).check_free()
    check_run_folder(config)
    model_config = load_model_config(config.model)
    check_model(config, model_config, progress)
    check_optimizer(config, model_config)
    check_memory(config, model_config)
    if reason := what_prevents_a_plan(config):
        progress.say(reason)
    text = prepare_text(config, model_config, progress)
    check_sample(config.sample, text.tokenizer, model_config)
    check_amount(config, text, progress)
    is_finished = check_resume(config, model_config, text.sequences, progress)
    if config.preference is not None and not is_finished and find_saved(config) is not None:
        check_reference(config, {"train": text.train, "validation": text.validation})
    return RunInputs(config, model_config, text, is_finished)
