"""A Trainer's checkpoints go on to the bit, with other stages, in processes and on meshes."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Trainer

from slipstream import Pipeline, SlipstreamError
from slipstream.extras.hf_trainer import SlipstreamTrainer
from support.architectures import ARCHITECTURES, BOUND, no_rounding_inside
from support.forked import launch
from support.paths import WORKERS
from support.trainer_resuming import CHECKPOINT, check_end, slipstream_trainer, write_expected
from support.trainers import (
    FULL,
    accuracy,
    arguments,
    check_logs,
    collate,
    history,
    pipeline,
    rows,
    trainer,
    unsplit_model,
    unsplit_trainer,
)


def saving(folder: Path, **changes: Any) -> Any:
    return arguments(folder, **{"save_strategy": "steps", "save_steps": 2, "eval_steps": 2} | changes)


def dropping(**options: Any) -> Pipeline:
    """One with dropout: the same numbers are drawn only where the state is the same."""
    config = copy.deepcopy(ARCHITECTURES["gpt2"])
    config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.1
    return pipeline(config, **options)


def check_saved(folder: Path, pipe: Pipeline) -> None:
    """The folder is a model of transformers with the pipeline's logits."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    batch = collate(rows(3))
    with torch.no_grad():
        expected = model(**batch).logits
    found = pipe.logits({key: value for key, value in batch.items() if key != "labels"})
    assert isinstance(found, torch.Tensor)
    counts = batch["attention_mask"].bool()
    assert (found - expected)[counts].abs().max() < BOUND


@pytest.mark.more
def test_training_goes_on_to_the_bit_and_the_best_model_is_kept(tmp_path: Path) -> None:
    chosen = {"load_best_model_at_end": True, "metric_for_best_model": "loss", "greater_is_better": True}
    whole = trainer(dropping(num_ranks=2), saving(tmp_path, **chosen))
    whole.train()
    best = Path(whole.state.best_model_checkpoint)
    assert best.name == "checkpoint-2"  # the first has the greatest loss
    check_saved(best, whole.pipe)
    again = trainer(dropping(num_ranks=2), saving(tmp_path, **chosen))
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert history(again)[:-1] == history(whole)[:-1]  # the last has the mean of the steps that ran
    again.pipe.load(tmp_path / "checkpoint-6" / "slipstream")
    check_saved(tmp_path / "checkpoint-6", again.pipe)


@pytest.mark.more
def test_dropout_goes_on_with_other_stages(tmp_path: Path) -> None:
    """What is dropped depends on the step, which the checkpoint has, and on the slices, not on the number of stages."""
    equal = [{key: values[:8] for key, values in row.items()} for row in rows()]  # else slices follow from the stages
    whole = trainer(dropping(num_ranks=2), saving(tmp_path), train_dataset=equal)
    whole.train()
    again = trainer(dropping(num_ranks=4, schedule="zb-h1"), saving(tmp_path), train_dataset=equal)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    check_logs(history(again)[:-1], history(whole)[:-1])
    weights = dict(whole.pipe.named_parameters())
    for name, weight in again.pipe.named_parameters():
        torch.testing.assert_close(weight, weights[name], rtol=0, atol=BOUND)


def test_a_checkpoint_without_an_optimizer_is_a_model_alone(tmp_path: Path) -> None:
    first = trainer(pipeline(num_ranks=2), saving(tmp_path, save_only_model=True, max_steps=2, eval_strategy="no"))
    first.train()
    check_saved(tmp_path / "checkpoint-2", first.pipe)
    with pytest.raises(SlipstreamError, match=r"has no folder 'slipstream'.* type Pipeline.from_pretrained\("):
        first.train(resume_from_checkpoint=True)


def test_what_is_overridden_is_there() -> None:
    """One that a version of transformers calls otherwise would never be called."""
    own = {"pipe", "_optimizer", "_correct_speed", "_counts_as_a_pipeline", "_evaluated", "_num_targets"}
    own |= {"_repeats_rows", "_without_repeated", "_checked"}
    assert {name for name in vars(SlipstreamTrainer) if not name.startswith("__")} - own <= {*dir(Trainer)}


@pytest.mark.more
def test_processes_log_what_a_trainer_alone_does_and_go_on_to_the_bit(tmp_path: Path) -> None:
    alone = unsplit_trainer(unsplit_model(), arguments(tmp_path), compute_metrics=accuracy)
    alone.train()
    (tmp_path / "stages.json").write_text(json.dumps(history(alone)))
    twice = {"per_device_train_batch_size": 8, "per_device_eval_batch_size": 8, "gradient_accumulation_steps": 1}
    alone = unsplit_trainer(unsplit_model(), arguments(tmp_path, max_steps=3, **twice), **FULL)
    alone.train()
    (tmp_path / "replicas.json").write_text(json.dumps(history(alone)))
    args = arguments(tmp_path, max_steps=6, **twice)
    alone = unsplit_trainer(unsplit_model(), args, eval_dataset=rows(3), compute_metrics=accuracy)
    alone.train()
    (tmp_path / "repeated.json").write_text(json.dumps(history(alone)))
    ended = launch(2, WORKERS / "transformers_trainer/trainer_processes.py", tmp_path)
    assert ended.returncode == 0, ended.stderr[-3000:]


def run(folder: Path, num_processes: int, *meshes: str) -> None:
    ended = launch(num_processes, WORKERS / "transformers_trainer/trainer_meshes.py", folder, *meshes)
    assert ended.returncode == 0, ended.stderr[-3000:]


@pytest.mark.more
def test_stages_and_tensor_ranks_train_and_other_processes_go_on(tmp_path: Path) -> None:
    """Of two processes' checkpoints two replicas, tensor ranks, ranks that share slices, and one process go on, and two
    replicas of two stages, where ranks that share batches aren't those that share layers."""
    write_expected(tmp_path)
    run(tmp_path, 2, "begin:stages", "begin:tensors", "go-on:replicas", "go-on:tensors", "go-on:slices")
    run(tmp_path, 4, "go-on:both")
    for saved in (CHECKPOINT, "tensors/checkpoint-2"):
        with no_rounding_inside():
            alone = slipstream_trainer(tmp_path / "alone")
            alone.train(resume_from_checkpoint=str(tmp_path / saved))
            check_end(alone, tmp_path, resumed=True)
