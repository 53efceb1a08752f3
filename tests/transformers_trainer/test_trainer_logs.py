"""A SlipstreamTrainer logs and calls back what a Trainer with the unsplit model does, and ends with its weights."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import TrainerCallback

from support.architectures import BOUND
from support.parameters import first_of
from support.trainers import accuracy, arguments, check_logs, history, pipeline, trainer, unsplit_model, unsplit_trainer


class Recorder(TrainerCallback):  # type: ignore[misc]
    """Notes which events there were, and how many parameters the model was said to have."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.num_parameters = 0

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("on_"):
            return lambda *_, model, **__: self._note(name, model)
        return super().__getattribute__(name)

    def _note(self, name: str, model: Any) -> None:
        self.events.append(name)
        self.num_parameters = model.num_parameters()


def trained(made: Any, **options: Any) -> tuple[list[dict[str, float]], Recorder]:
    recorder = Recorder()
    made.add_callback(recorder)
    made.train()
    return history(made), recorder


@cache
def expected(folder: Path) -> tuple[list[dict[str, float]], Recorder, dict[str, Tensor]]:
    model = unsplit_model()
    logs, recorder = trained(unsplit_trainer(model, arguments(folder), compute_metrics=accuracy))
    return logs, recorder, dict(model.named_parameters())


@pytest.mark.parametrize(
    "options",
    first_of(
        [
            {"num_ranks": 2},
            {"num_ranks": 2, "schedule": "zb-v", "stages_per_rank": 2, "partition": [0.5, 1, 1.5, 1]},
            {"num_ranks": 3, "schedule": "gpipe", "slices": 3},
            {"num_ranks": 1, "num_microbatches": 1, "recompute": "full"},
        ]
    ),
)
def test_logs_callbacks_and_weights_are_those_of_a_trainer(
    options: dict[str, Any], tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    logs, recorder, weights = expected(tmp_path_factory.getbasetemp())
    pipe = pipeline(**options)
    found, mine = trained(trainer(pipe, arguments(tmp_path), compute_metrics=accuracy))
    check_logs(found, logs)
    assert mine.events == recorder.events
    assert mine.num_parameters == recorder.num_parameters
    for name, weight in pipe.named_parameters():
        torch.testing.assert_close(weight, weights[name], rtol=0, atol=BOUND)
