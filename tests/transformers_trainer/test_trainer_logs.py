"""A SlipstreamTrainer logs and calls back what a Trainer with the unsplit model does, and ends with its weights."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import GPT2LMHeadModel, Trainer, TrainerCallback

from slipstream import SlipstreamError
from slipstream.model import causal_cross_entropy
from support.adapters import PREFIX, adapted, lora
from support.architectures import BOUND, no_rounding_inside
from support.parameters import first_of
from support.pipelines import make_pipe
from support.trainers import (
    accuracy,
    arguments,
    check_logs,
    collate,
    data,
    float64_loss,
    history,
    pipeline,
    rows,
    trainer,
    unsplit_model,
    unsplit_trainer,
)


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


def counted_rows(number: int = 22, unlabelled: tuple[int, ...] = ()) -> list[dict[str, list[int]]]:
    """Rows whose first labels count, but for those that have none."""
    return [
        {**row, "labels": [-100] * len(row["labels"]) if place in unlabelled else row["input_ids"]}
        for place, row in enumerate(rows(number))
    ]


@pytest.mark.parametrize(("name", "is_known"), first_of([("gpt2", False), ("llama", True)]))
def test_losses_are_divided_as_by_a_trainer(
    name: str, is_known: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """GPT-2 has no loss_type, and a Trainer divides its losses by each row's first label too."""
    given = {"train_dataset": counted_rows(), "eval_dataset": counted_rows(7)}
    args = arguments(tmp_path, num_train_epochs=1)
    with no_rounding_inside():
        model = unsplit_model(name)
        logs, _ = trained(unsplit_trainer(model, args, **given))
        made = trainer(pipeline(name, num_ranks=2), args, **given)
        found, _ = trained(made)
    check_logs(found, logs)
    assert ("the number of all labels that aren't -100, each row's first included" in caplog.text) != is_known


@pytest.mark.more
def test_batches_without_labels_end_no_training(tmp_path: Path) -> None:
    """One of the two of an update, in the order of the rows; one of an evaluation has no loss."""
    given = {"train_dataset": counted_rows(16, (4, 5, 6, 7)), "eval_dataset": counted_rows(12, (4, 5, 6, 7))}
    args = arguments(tmp_path, num_train_epochs=1, train_sampling_strategy="sequential", eval_strategy="no")
    with no_rounding_inside():
        alone = unsplit_trainer(unsplit_model("llama"), args, **given)
        logs, _ = trained(alone)
        made = trainer(pipeline("llama", num_ranks=2), args, **given)
        found, _ = trained(made)
        check_logs(found, logs)
        # whether the mean has the loss that is no number, a version of transformers decides
        wanted = alone.evaluate()["eval_loss"]
        assert made.evaluate()["eval_loss"] == pytest.approx(wanted, rel=1e-6, nan_ok=True)
        loss, _, _ = made.prediction_step(made.model, collate(given["eval_dataset"][4:8]), True)
        assert loss is not None
        assert math.isnan(loss)


@pytest.mark.more
def test_means_of_the_means_of_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A Trainer takes them where a model's forward doesn't take the number of labels."""
    monkeypatch.setattr(GPT2LMHeadModel, "accepts_loss_kwargs", False, raising=False)
    args = arguments(tmp_path, num_train_epochs=1)
    with no_rounding_inside():
        logs, _ = trained(Trainer(unsplit_model(), args, **data()))
        found, _ = trained(trainer(pipeline(num_ranks=2), args))
    for mine, other in zip(found, logs, strict=True):  # the model's own loss is of float32
        assert mine == pytest.approx(other, rel=1e-5)


def test_a_divisor_of_the_loss_function(tmp_path: Path) -> None:
    """An update of one batch is divided by it; of several, a Trainer doesn't know it."""

    def weighted(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        total, count = causal_cross_entropy(outputs, targets)
        return 2 * total, 2.5 * count

    def wanted(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
        return float64_loss(outputs, labels, 2.5 / 2 * (labels[:, 1:] != -100).sum())

    args = arguments(tmp_path, num_train_epochs=1, gradient_accumulation_steps=1)
    with no_rounding_inside():
        logs, _ = trained(Trainer(unsplit_model(), args, compute_loss_func=wanted, **data()))
        found, _ = trained(trainer(pipeline(num_ranks=2, loss_fn=weighted), args))
    check_logs(found, logs)
    made = trainer(pipeline(num_ranks=2, loss_fn=weighted), arguments(tmp_path))
    with pytest.raises(SlipstreamError, match="A SlipstreamTrainer can't: give gradient_accumulation_steps=1"):
        made.train()


class Stream(torch.utils.data.IterableDataset[dict[str, list[int]]]):
    """Rows without a known number."""

    def __iter__(self) -> Iterator[dict[str, list[int]]]:
        return iter(rows(16))


@pytest.mark.parametrize(
    "changes",
    first_of(
        [
            {"optim": "sgd", "optim_args": "momentum=0.9", "max_grad_norm": 0.0, "lr_scheduler_type": "constant"},
            {"train_sampling_strategy": "group_by_length"},
            {"optim": "adafactor"},
            {"eval_strategy": "steps", "lr_scheduler_type": "reduce_lr_on_plateau", "metric_for_best_model": "loss"},
            {"train_dataset": Stream()},
        ],
        0,
    ),
)
def test_other_arguments_do_what_they_do_in_a_trainer(changes: dict[str, Any], tmp_path: Path) -> None:
    given = {name: changes.pop(name) for name in ("train_dataset",) if name in changes}
    args = arguments(tmp_path, **{"max_steps": 2, "eval_strategy": "no", "eval_steps": 1} | changes)
    logs, _ = trained(unsplit_trainer(unsplit_model(), args, **given))
    found, _ = trained(trainer(pipeline(num_ranks=2), args, **given))
    check_logs(found, logs)


@pytest.mark.more
def test_an_adapter_is_trained_as_by_a_trainer(tmp_path: Path) -> None:
    """Its names in PEFT's model are others: weight decay goes by names."""
    model = adapted(lora())
    args = arguments(tmp_path, num_train_epochs=1, weight_decay=1.0)
    with no_rounding_inside():
        alone = unsplit_trainer(copy.deepcopy(model), args)
        logs, _ = trained(alone)
        pipe = make_pipe(model, num_ranks=2, num_microbatches=3, slices=2)
        made = trainer(pipe, args)
        found, _ = trained(made)
    check_logs(found, logs)
    weights = {name.removeprefix(PREFIX): weight for name, weight in alone.model.named_parameters()}
    for name, weight in pipe.named_parameters():
        torch.testing.assert_close(weight, weights[name], rtol=0, atol=BOUND)
    made.save_model()
    assert (tmp_path / "adapter_model.safetensors").is_file()
