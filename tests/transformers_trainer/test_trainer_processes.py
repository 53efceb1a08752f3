"""A SlipstreamTrainer on two processes that a launcher started: two stages, and two replicas."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from support.forked import launch
from support.paths import WORKERS
from support.trainers import FULL, accuracy, arguments, history, unsplit_model, unsplit_trainer


@pytest.mark.more
def test_processes_log_what_a_trainer_alone_does_and_go_on_to_the_bit(tmp_path: Path) -> None:
    alone = unsplit_trainer(unsplit_model(), arguments(tmp_path), compute_metrics=accuracy)
    alone.train()
    (tmp_path / "stages.json").write_text(json.dumps(history(alone)))
    twice = {"per_device_train_batch_size": 8, "per_device_eval_batch_size": 8, "gradient_accumulation_steps": 1}
    alone = unsplit_trainer(unsplit_model(), arguments(tmp_path, max_steps=3, **twice), **FULL)
    alone.train()
    (tmp_path / "replicas.json").write_text(json.dumps(history(alone)))
    ended = launch(2, WORKERS / "transformers_trainer/trainer_processes.py", tmp_path)
    assert ended.returncode == 0, ended.stderr[-3000:]
