"""The names of what a run leaves behind.

output/
  config.yaml          the settings it ran with
  inputs/              the tokens, the tokenizer and the model's configuration; run_id, by which ranks see that
                       they share the folder
  plan.yaml            the plan that was made where the configuration left it open, as a configuration of another run
  plan.txt             the planned order, which plan.yaml names
  metrics.jsonl        one line per step, and one per validation
  failures.jsonl       one line for each time that numbers were not finite
  schedule.txt         the order in which the last steps ran, sends and receives included
  timeline.png         the last step as it was measured
  timeline.json        the same for ui.perfetto.dev and chrome://tracing
  comparison.json      seconds per step of one process alone, where asked for
  checkpoints/         where asked for, what the run can be resumed from
  tensorboard/         event files, where asked for
  model-step-100/      exports at intervals
  model/               the trained model and its tokenizer
"""

from __future__ import annotations

import shutil
from pathlib import Path


class RunFolder:
    """The paths inside the folder at `path`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.yaml"
        self.inputs = path / "inputs"
        self.run_id = self.inputs / "run_id"
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

    def model_at(self, step: int) -> Path:
        """Returns the folder of the export after a step."""
        return self.path / f"model-step-{step}"

    def find_earlier_run(self) -> Path | None:
        """Returns something that a run made, or a model that somebody put here; None where there is nothing."""
        model_files = [self.path / "config.json", *sorted(self.path.glob("*.safetensors"))]
        kept = [*self._exports(), *model_files, self.metrics, self.checkpoints, self.inputs]
        return next((path for path in kept if path.exists()), None)

    def clear(self) -> None:
        """Removes what a run makes, and nothing else."""
        for folder in [*self._exports(), self.inputs, self.checkpoints, self.tensorboard]:
            shutil.rmtree(folder, ignore_errors=True)
        pictures = (self.schedule, self.timeline, self.perfetto, self.comparison)
        for file in (self.config, self.plan, self.planned_schedule, self.metrics, self.failures, *pictures):
            file.unlink(missing_ok=True)

    def _exports(self) -> list[Path]:
        return [self.model, *sorted(self.path.glob("model-step-*"))]
