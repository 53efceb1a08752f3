"""What a SlipstreamTrainer would ignore, or do otherwise than a Trainer, is refused by name before anything runs."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch import nn
from transformers import TrainingArguments

from slipstream import Pipeline, SlipstreamError
from slipstream.extras.hf_trainer import SlipstreamTrainer
from slipstream.extras.hf_trainer.arguments import NOT_REFUSED, REFUSED
from support.trainers import accuracy, arguments, data, pipeline, rows, trainer, unsplit_model


@pytest.fixture(scope="module")
def pipe() -> Pipeline:
    return pipeline(num_ranks=2)


def test_every_argument_is_known() -> None:
    """One that comes with a new version of transformers is to be looked at; until then it is refused where given."""
    names = {field.name for field in fields(TrainingArguments)}
    assert names <= NOT_REFUSED | REFUSED.keys()
    assert not NOT_REFUSED & REFUSED.keys()


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize(
    ("given", "answer"),
    [
        ({"bf16": True}, r"bf16=True .*precision=slipstream.Precision\(dtype='bfloat16', master_dtype='float32'\)"),
        ({"gradient_checkpointing": True}, r"memory=slipstream.Memory\(recompute='full'\)"),
        ({"neftune_noise_alpha": 5.0}, r"neftune_noise_alpha=5.0 .*add_embedding_noise"),
        ({"label_smoothing_factor": 0.1}, r"label_smoothing_factor=0.1 .* give Pipeline\(loss_fn=...\)"),
        ({"use_liger_kernel": True}, r"use_liger_kernel=True .*Runtime\(fused=True\)"),
        ({"auto_find_batch_size": True}, r"Memory\(limit=...\)"),
        ({"save_on_each_node": True}, r"save_on_each_node=True"),
        ({"ddp_find_unused_parameters": True}, r"sums gradients over replicas itself"),
        ({"ddp_timeout": 60}, r"ddp_timeout=60: give .*stall_limit"),
        ({"optim": "lomo"}, r"optim=.*lomo.*: give one of adamw_torch, "),
        ({"train_sampling_strategy": "batch_rebalance"}, r"give one of random, sequential, group_by_length"),
        ({"label_names": ["targets"]}, r"labels are called 'labels'"),
        ({"accelerator_config": {"dispatch_batches": True}}, r"dispatch_batches=True: leave it out"),
        (
            {"load_best_model_at_end": True, "save_only_model": True, "save_strategy": "steps", "save_steps": 3},
            r"load_best_model_at_end=True with save_only_model=True",
        ),
    ],
)
def test_arguments_that_would_be_ignored(pipe: Pipeline, given: dict[str, Any], answer: str, tmp_path: Path) -> None:
    with pytest.raises(SlipstreamError, match=answer):
        trainer(pipe, arguments(tmp_path / "new", **given))
    assert not (tmp_path / "new").exists()


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing` is deprecated:FutureWarning")
def test_checkpointing_is_taken_of_a_pipeline_that_recomputes(tmp_path: Path) -> None:
    """A Trainer asks the model for it as it begins to train."""
    pipe = pipeline(num_ranks=2, recompute="full")
    made = trainer(pipe, arguments(tmp_path, gradient_checkpointing=True, max_steps=1))
    made.train()
    assert made.state.global_step == 1
    with pytest.raises(AttributeError, match=r"leave it out, memory\.recompute='full' recomputes activations already"):
        pipe.gradient_checkpointing_enable()


@pytest.mark.parametrize(
    ("variable", "value", "answer"),
    [
        ("ACCELERATE_DYNAMO_BACKEND", "EAGER", r"Runtime\(fused=True\)"),
        ("ACCELERATE_MIXED_PRECISION", "bf16", r"Precision\(dtype='bfloat16'"),
        ("ACCELERATE_USE_FSDP", "true", r"Parallelism\(shard='optimizer'\)"),
        ("ACCELERATE_USE_DEEPSPEED", "1", r"Parallelism\(shard='optimizer'\)"),
        ("ACCELERATE_USE_MEGATRON_LM", "true", r"layers are split by the Pipeline"),
        ("ACCELERATE_USE_PARALLELISM_CONFIG", "true", r"mesh=slipstream.make_mesh"),
    ],
)
def test_what_a_launcher_switches_on(
    pipe: Pipeline, variable: str, value: str, answer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = arguments(tmp_path)  # some of the variables end its own checks already
    monkeypatch.setenv(variable, value)
    with pytest.raises(SlipstreamError, match=rf"{variable}={value} in a SlipstreamTrainer, set by .*{answer}"):
        trainer(pipe, args)
    for off in ("false", "0", "") if "USE" in variable else ("no", "NO"):
        monkeypatch.setenv(variable, off)
        trainer(pipe, args)


def test_an_accelerator_that_the_script_has_made(pipe: Pipeline, tmp_path: Path) -> None:
    """All Accelerators of a process share one state."""
    args = arguments(tmp_path)
    AcceleratorState._reset_state(True)
    try:
        Accelerator(cpu=True, dynamo_backend="eager")
        with pytest.raises(SlipstreamError, match="the Accelerator of this process has TorchDynamo's backend EAGER"):
            trainer(pipe, args)
    finally:
        AcceleratorState._reset_state(True)


def test_all_that_is_wrong_is_said_at_once(pipe: Pipeline, tmp_path: Path) -> None:
    with pytest.raises(SlipstreamError, match=r"(?s)ddp_static_graph=True .*label_names"):
        trainer(pipe, arguments(tmp_path, ddp_static_graph=True, label_names=["y"]))


def test_an_argument_of_a_later_version(pipe: Pipeline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slipstream.extras.hf_trainer.arguments.NOT_REFUSED", NOT_REFUSED - {"run_name"})
    trainer(pipe, arguments(tmp_path))
    with pytest.raises(SlipstreamError, match=r"run_name='one': a SlipstreamTrainer doesn't know it"):
        trainer(pipe, arguments(tmp_path, run_name="one"))


@pytest.mark.parametrize(
    ("given", "answer"),
    [
        ({"model_init": unsplit_model}, r"model_init=... .*Pipeline.from_config\(config, seed=...\)"),
        ({"compute_loss_func": lambda outputs, labels: 0}, r"compute_loss_func=... .*Pipeline\(loss_fn=...\)"),
        ({"optimizer_cls_and_kwargs": (lambda: None, {})}, r"give a subclass of torch.optim.Optimizer"),
        ({"optimizers": (torch.optim.SGD([nn.Parameter(torch.ones(1))], 0.1), None)}, r"optimizer of pipe.parameters"),
    ],
)
def test_functions_that_would_not_be_called(pipe: Pipeline, given: dict[str, Any], answer: str, tmp_path: Path) -> None:
    with pytest.raises(SlipstreamError, match=answer):
        trainer(pipe, arguments(tmp_path), **given)


def test_a_loss_of_a_subclass(pipe: Pipeline, tmp_path: Path) -> None:
    class Own(SlipstreamTrainer):
        def compute_loss(self, *args: Any, **options: Any) -> Any:
            return 0

    with pytest.raises(SlipstreamError, match=r"Own.compute_loss would never be called"):
        Own(pipe, arguments(tmp_path), **data())


@pytest.mark.parametrize(
    ("model", "answer"),
    [
        (lambda: None, r"model= is a NoneType: give slipstream.Pipeline.from_pretrained\("),
        (unsplit_model, r"model= is a GPT2LMHeadModel: .* or slipstream.Pipeline\(model, slices=8\)"),
        (lambda: Pipeline(nn.Sequential(nn.Linear(2, 2)), loss_fn=lambda a, b: (a.sum(), a)), r"an nn.Sequential"),
    ],
)
def test_models_that_are_no_pipeline_of_a_causal_lm(model: Any, answer: str, tmp_path: Path) -> None:
    with pytest.raises(SlipstreamError, match=answer):
        trainer(model(), arguments(tmp_path))


def test_metrics_of_logits_that_no_rank_has(tmp_path: Path) -> None:
    spread = pipeline("llama", num_ranks=2, vocabulary="spread")
    with pytest.raises(SlipstreamError, match=r"compute_metrics=... needs .* give Pipeline\(vocabulary='whole'\)"):
        trainer(spread, arguments(tmp_path), compute_metrics=accuracy)
    trainer(spread, arguments(tmp_path, max_steps=1, eval_steps=1)).train()


def test_batches_that_are_too_small(pipe: Pipeline, tmp_path: Path) -> None:
    with pytest.raises(SlipstreamError, match=r"per_device_train_batch_size=2, .* num_microbatches=3: give at least 3"):
        trainer(pipe, arguments(tmp_path, per_device_train_batch_size=2)).train()
    experts = pipeline("mixtral", num_ranks=2)
    with pytest.raises(SlipstreamError, match=r"last batch of a mixture of experts .* dataloader_drop_last=True"):
        trainer(experts, arguments(tmp_path)).train()


def test_columns_that_a_pipeline_does_not_take(pipe: Pipeline, tmp_path: Path) -> None:
    """GPT-2 takes token_type_ids: they aren't dropped as an unknown column would be."""
    given = [{**row, "token_type_ids": row["labels"], "source": "a file"} for row in rows()]
    with pytest.raises(SlipstreamError, match=r"the batch has 'token_type_ids'; a Pipeline takes"):
        trainer(pipe, arguments(tmp_path), train_dataset=given, data_collator=_all_columns).train()


def _all_columns(chosen: list[dict[str, list[int]]]) -> dict[str, Any]:
    assert all("source" not in each for each in chosen)
    return {key: torch.tensor([each[key][:8] for each in chosen]) for key in chosen[0]}


def test_a_model_that_is_cut_says_what_to_call(pipe: Pipeline, tmp_path: Path) -> None:
    made = trainer(pipe, arguments(tmp_path))
    with pytest.raises(SlipstreamError, match=r"is cut over the ranks: call pipe.step"):
        made.model(torch.ones(1, 2, dtype=torch.int64))
    with pytest.raises(AttributeError, match=r"no attribute 'generate': save_pretrained"):
        made.model.generate()
    with pytest.raises(AttributeError, match="'nonsense'"):
        made.model.nonsense  # noqa: B018
    assert made.model.state_dict().keys() == unsplit_model().state_dict().keys()


def test_a_checkpoint_that_is_not_there(pipe: Pipeline, tmp_path: Path) -> None:
    (tmp_path / "checkpoint-4").mkdir()
    made = trainer(pipe, arguments(tmp_path))
    with pytest.raises(SlipstreamError, match=r"checkpoint-5'?: there is no such folder; .* has checkpoint-4"):
        made._load_from_checkpoint(str(tmp_path / "checkpoint-5"))


def test_a_training_that_diverges_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The Trainer logs another number in place of the loss, and weights that aren't finite can't be saved."""
    diverging = {"learning_rate": 1e30, "max_grad_norm": 0, "warmup_steps": 0, "max_steps": 3, "eval_strategy": "no"}
    trainer(pipeline(num_ranks=2), arguments(tmp_path, **diverging)).train()
    said = [record.message for record in caplog.records if "the loss is" in record.message]
    assert len(said) == 1
    assert said[0].startswith("step 3: the loss is nan")
