"""The inputs of a run: written to its folder once, read there by every rank."""

from __future__ import annotations

import copy
import json
import os
from dataclasses import dataclass
from pathlib import Path

from slipstream.errors import SlipstreamError
from slipstream.model import NewTokens, copy_beside, write_generation
from slipstream.train.config import Config, dump_config
from slipstream.train.data import is_of_tokenizer, save_texts
from slipstream.train.model_files import ModelFiles
from slipstream.train.preflight.folder_check import check_run_folder
from slipstream.train.preflight.text_preparation import PreparedText


@dataclass(frozen=True)
class RunInputs:
    """The inputs of every rank: written once, read by all."""

    config: Config
    model: ModelFiles
    text: PreparedText
    is_finished: bool  # True for a run resumed after its last step, with its model there
    new_tokens: NewTokens | None = None

    def write(self) -> None:
        """Makes the run folder with `inputs/` inside, and removes an earlier run's files unless it is resumed.

        Call it while the folder is locked.

        Raises:
            SlipstreamError: if the folder can't be written, or another run has written to it since the preflight.
        """
        check_run_folder(self.config)
        folder = self.config.folder
        try:
            if self.config.checkpoint.resume == "no":
                folder.listed.remove()
            self._write_files()
        except OSError as error:
            raise SlipstreamError(f"can't write to training.output={folder.path}: {error}") from error

    def write_again(self) -> None:
        """Writes what `write` has written where somebody has removed it since, while the run goes on. Raises OSError
        where it can't be written."""
        folder = self.config.folder
        if not (folder.config.exists() and folder.inputs.exists()):
            self._write_files()

    def _write_files(self) -> None:
        folder = self.config.folder
        folder.listed.add(folder.config, folder.log)
        folder.listed.add_folder(folder.inputs)
        with folder.replaced(folder.config) as part:
            part.write_text(dump_config(self.config), encoding="utf-8")
        with folder.replaced(folder.inputs) as part:
            part.mkdir()
            self.model.config.save_pretrained(part)
            model = self.config.model
            if model.pretrained:
                if self.model.generation is not None:
                    generation = copy.deepcopy(self.model.generation)
                    stops = [*dict.fromkeys(self.model.stop_tokens)]
                    generation.eos_token_id = stops if len(stops) > 1 else generation.eos_token_id
                    write_generation(part, generation)
                # Files of a tokenizer that isn't the run's would be read with the run's own.
                beside = part / folder.beside.name
                copy_beside(
                    Path(str(model.path)), beside, None if self.config.has_models_tokenizer else is_of_tokenizer
                )
            self.text.tokenizer.save_pretrained(part)
            if self.new_tokens is not None:
                file = part / folder.new_tokens.name
                file.write_text(json.dumps(self.new_tokens._asdict()), encoding="utf-8")
            save_texts(self.text.train, part, "train")
            save_texts(self.text.validation, part, "validation")
            if os.path.lexists(folder.inputs):
                folder.own.remove(folder.own.move(folder.inputs, folder.work / "inputs.before"))
