"""What a run leaves behind, and where.

output/
  config.yaml          the settings it ran with
  inputs/              the tokens, the tokenizer and the model's configuration; run_id, by which ranks see that
                       they share the folder
  metrics.jsonl        one line per step, and one per validation
  schedule.txt         the order in which the last steps ran
  timeline.png         the last step as it was measured
  timeline.json        the same for Perfetto
  comparison.json      one process alone, where asked for
  checkpoints/         where asked for, what the run can go on from
  tensorboard/         event files, where asked for
  model-step-100/      exports at intervals
  model/               the trained model and its tokenizer
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class RunFolder:
    """The names inside one output folder."""

    folder: Path

    @property
    def config(self) -> Path:
        """The settings."""
        return self.folder / "config.yaml"

    @property
    def inputs(self) -> Path:
        """What every rank reads."""
        return self.folder / "inputs"

    @property
    def metrics(self) -> Path:
        """JSON lines."""
        return self.folder / "metrics.jsonl"

    @property
    def checkpoints(self) -> Path:
        """What a run can go on from."""
        return self.folder / "checkpoints"

    @property
    def tensorboard(self) -> Path:
        """Event files."""
        return self.folder / "tensorboard"

    @property
    def schedule(self) -> Path:
        """The last steps' schedule, sends and receives included."""
        return self.folder / "schedule.txt"

    @property
    def timeline(self) -> Path:
        """The picture of the last step."""
        return self.folder / "timeline.png"

    @property
    def perfetto(self) -> Path:
        """The last step for ui.perfetto.dev and chrome://tracing."""
        return self.folder / "timeline.json"

    @property
    def comparison(self) -> Path:
        """Seconds per step of one process."""
        return self.folder / "comparison.json"

    @property
    def model(self) -> Path:
        """The final export."""
        return self.folder / "model"

    def model_at(self, step: int) -> Path:
        """The export after some step."""
        return self.folder / f"model-step-{step}"

    def find_earlier_run(self) -> Path | None:
        """Something that a run made, or a model that somebody put here."""
        if not self.folder.is_dir():
            return None
        model_files = [self.folder / "config.json", *sorted(self.folder.glob("*.safetensors"))]
        kept = [*self._exports(), *model_files, self.metrics, self.checkpoints, self.inputs]
        return next((path for path in kept if path.exists()), None)

    def clear(self) -> None:
        """Removes what a run makes, and nothing else."""
        for folder in [*self._exports(), self.inputs, self.checkpoints, self.tensorboard]:
            shutil.rmtree(folder, ignore_errors=True)
        for file in (self.config, self.metrics, self.schedule, self.timeline, self.perfetto, self.comparison):
            file.unlink(missing_ok=True)

    def _exports(self) -> list[Path]:
        return [self.model, *sorted(self.folder.glob("model-step-*"))]
