"""Checkpoints of a SlipstreamTrainer: training goes on from them to the bit, and transformers loads them."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Trainer

from slipstream import Pipeline, SlipstreamError
from slipstream.extras.hf_trainer import SlipstreamTrainer
from support.architectures import ARCHITECTURES, BOUND
from support.trainers import arguments, check_logs, collate, history, pipeline, rows, trainer


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
    assert {name for name in vars(SlipstreamTrainer) if not name.startswith("__")} - own <= {*dir(Trainer)}
