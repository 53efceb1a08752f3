"""Each of two processes of test_trainer_checkpoints: two stages, then two replicas."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from slipstream import Pipeline, SlipstreamError, make_mesh
from support.architectures import BOUND
from support.trainers import FULL, accuracy, arguments, check_logs, collate, history, pipeline, rows, trainer


def unknown_processes(folder: Path) -> None:
    """On CPUs accelerate knows of one process, unless it is told."""
    with pytest.raises(SlipstreamError, match=r"of the Pipeline's mesh: 2. Give TrainingArguments\(use_cpu=True\)"):
        trainer(pipeline(), arguments(folder, use_cpu=False))


def stages(folder: Path) -> None:
    """Logs are a Trainer's, transformers loads the model, and training goes on from a checkpoint to the bit."""
    expected = json.loads((folder / "stages.json").read_text())
    args = arguments(folder / "stages", save_strategy="steps", save_steps=4)
    whole = trainer(pipeline(), args, compute_metrics=accuracy)
    whole.train()
    check_logs(history(whole), expected)
    whole.save_model()
    check_saved(folder / "stages", whole.pipe)
    again = trainer(pipeline(), args, compute_metrics=accuracy)
    again.train(resume_from_checkpoint=True)
    assert history(again)[:-1] == history(whole)[:-1]  # the last has the mean of the steps that ran
    mine = dict(again.pipe.named_parameters())
    assert all(mine[name].equal(weight) for name, weight in whole.pipe.named_parameters())
    metrics = whole.predict(rows(5)).metrics
    assert round(metrics["test_steps_per_second"] * metrics["test_runtime"]) == 2


def check_saved(folder: Path, pipe: Pipeline) -> None:
    batch = collate(rows(3))
    logits = pipe.logits({key: value for key, value in batch.items() if key != "labels"})
    if isinstance(logits, torch.Tensor):
        with torch.no_grad():
            expected = AutoModelForCausalLM.from_pretrained(folder)(**batch).logits
        assert (logits - expected)[batch["attention_mask"].bool()].abs().max() < BOUND


def replicas(folder: Path) -> None:
    """Each takes its rows of what is one batch of a Trainer alone."""
    expected = json.loads((folder / "replicas.json").read_text())
    pipe = pipeline(mesh=make_mesh(dp=2))
    made = trainer(pipe, arguments(folder / "replicas", max_steps=3, gradient_accumulation_steps=1), **FULL)
    made.train()
    check_logs(history(made), expected, but="total_flos")  # in which padding counts, of which replicas have less


if __name__ == "__main__":
    unknown_processes(Path(sys.argv[1]))
    stages(Path(sys.argv[1]))
    replicas(Path(sys.argv[1]))
