"""The names of what a run leaves behind.

output/
  slipstream-run/      the list of the files that runs made here, whose folder it is while a run is going on, what that
                       run is writing, and the lines of its terminal since nobody reads them there any more
  config.yaml          the settings it ran with
  reference.safetensors  with preference, how probable each answer was before the training, on which every loss depends
  inputs/              the tokens, the tokenizer and the model's configuration; beside/, what lay beside the weights of
                       the model's folder and comes with exports; run_id, by which ranks see that they share the folder
  plan.yaml            the plan that was made where the configuration left it open, as a configuration of another run
  plan.txt             the planned order, which plan.yaml names
  metrics.jsonl        one line per start, step, validation and checkpoint
  failures.jsonl       one line for each time that numbers were not finite
  schedule.txt         the order in which the last steps ran, sends and receives included
  timeline.png         the last step as it was measured
  timeline.json        the same for ui.perfetto.dev and chrome://tracing
  comparison.json      seconds per step of one process alone, where asked for
  checkpoints/         where asked for, what the run can be resumed from
  tensorboard/         event files, where asked for
  model-step-100/      exports at intervals
  model/               the trained model and its tokenizer
  adapter/             with lora, the trained adapter
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from slipstream.training.ownership import FOLDER, ListedFiles, work_folder

if TYPE_CHECKING:  # what only reads a run needs no torch
    from slipstream.training.config import Config


def exported(model: Path, config: Config) -> dict[Path, bool]:
    """Returns the folders that an export to `model` writes, and whether they have merged weights or the adapter."""
    if config.lora is None or config.lora.export == "merged":
        return {model: True}
    adapter = model.with_name(model.name.replace("model", "adapter", 1))
    return {adapter: False} if config.lora.export == "adapter" else {model: True, adapter: False}


class RunFolder:
    """The paths inside the folder at `path`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.log = path / FOLDER / "output.log"
        self.config = path / "config.yaml"
        self.inputs = path / "inputs"
        self.beside = self.inputs / "beside"
        self.run_id = self.inputs / "run_id"
        self.reference = path / "reference.safetensors"
        self.plan = path / "plan.yaml"
        self.planned_schedule = path / "plan.txt"
        self.metrics = path / "metrics.jsonl"
        self.failures = path / "failures.jsonl"
        self.schedule = path / "schedule.txt"
        self.timeline = path / "timeline.png"
        self.perfetto = path / "timeline.json"
        self.comparison = path / "comparison.json"
        self.checkpoints = path / "checkpoints"
        self.tensorboard = path / "tensorboard"
        self.model = path / "model"
        self.adapter = path / "adapter"
        self.listed = ListedFiles(path)

    @property
    def work(self) -> Path:
        """The folder in which this process writes what then gets its place by a rename."""
        return work_folder(self.path)

    @contextmanager
    def replaced(self, path: Path) -> Iterator[Path]:
        """Yields where to write a file that then gets its place at `path`, whole or not at all. Raises OSError where
        another run has the folder by now."""
        part = self.work / f"part.{path.name}"  # what writes pictures goes by the end of the name
        yield part
        part.replace(path)

    def model_at(self, step: int) -> Path:
        """Returns the folder of the export after a step."""
        return self.path / f"model-step-{step}"

    def find_result(self) -> Path | None:
        """Returns something that a run made and that would be missed; None where there is nothing."""
        kept = [*self.exports(), self.metrics, self.checkpoints]
        return next((path for path in kept if path.exists()), None)

    def find_unlisted(self, adopts_checkpoints: bool) -> Path | None:
        """Returns something in the way that no run has listed as its own, or a model that somebody put here; None where
        there is nothing. `adopts_checkpoints`: whether those that were copied here are to be resumed from."""
        model_files = [self.path / "config.json", *sorted(self.path.glob("*.safetensors"))]
        if adopts_checkpoints:  # which go on with it
            model_files = [file for file in model_files if file != self.reference]
        folders = [*self.exports(), self.inputs, self.tensorboard, *([] if adopts_checkpoints else [self.checkpoints])]
        results = (self.schedule, self.timeline, self.perfetto, self.comparison)
        files = (self.config, self.plan, self.planned_schedule, self.metrics, self.failures, *results)
        paths = [*model_files, *files, *folders]
        return next((found for path in paths if (found := self.listed.find_unlisted(path))), None)

    def exports(self) -> list[Path]:
        """Returns the folders of exported models that are there, and of what a killed run left of one."""
        patterns = [f"{kind}{rest}" for kind in ("model", "adapter") for rest in ("-step-*", "*.part")]
        found = [self.model, self.adapter, *sorted({each for p in patterns for each in self.path.glob(p)})]
        return [path for path in found if path.exists()]
