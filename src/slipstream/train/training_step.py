"""One training step, and one evaluation: their arithmetic, and their results."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch.optim.lr_scheduler import LRScheduler

from slipstream.model import torch_dtype
from slipstream.number_format import PRECISIONS
from slipstream.pipeline import Pipeline
from slipstream.planner.ragged import StepPlan
from slipstream.schedule import gpipe, slice_lengths
from slipstream.train.config import Config, TrainingSection
from slipstream.train.data import BatchSize, TokenBatch, TrainingSequences
from slipstream.train.loss_scale import LossScale


class StepResult(NamedTuple):
    """The results of one training step, its learning rate and its seconds."""

    loss: float
    grad_norm: float  # the norm of the whole gradient, before clipping
    lr: float
    seconds: float
    optimizer_seconds: float  # seconds of clipping and update among them
    rewards: dict[str, float] | None = None  # means over pairs of preferences
    bad: dict[str, Any] | None = None  # why a step didn't update, its samples, and the remedy


def train_step(
    model: Any,
    scheduler: LRScheduler,
    batch: TokenBatch,
    config: Config,
    device: torch.device,
    loss_scale: LossScale | None = None,
    before_update: Callable[[], None] = lambda: None,
    accepts: Callable[[float, float], bool] = lambda _loss, norm: math.isfinite(norm),
) -> StepResult:
    """Runs forward and backward, clips, calls `before_update`, and lets the scheduler's optimizer update.

    The model is a Pipeline, or has its `step` and `clip_grad_norm_`. Collective where these are. `accepts` gets the
    loss and the norm of the gradient and returns whether to update, on all ranks alike.
    """
    started = time.perf_counter()
    optimizer = scheduler.optimizer
    lr = float(scheduler.get_last_lr()[0])
    optimizer.zero_grad()
    options: dict[str, Any] = {} if loss_scale is None else {"loss_scale": loss_scale.scale}
    if batch.sequence_values is not None:
        options["sequence_values"] = batch.sequence_values
    with autocast(config, device):
        loss = model.step(batch.input_ids, batch.labels, document_ids=batch.document_ids, **options)
    began = time.perf_counter()
    norm = float(model.clip_grad_norm_(config.optimizer.clip_norm or math.inf))
    if accepts(float(loss), norm):
        before_update()
        optimizer.step()
        scheduler.step()
    if loss_scale is not None:
        loss_scale.update(math.isfinite(norm))
    ended = time.perf_counter()
    return StepResult(float(loss), norm, lr, ended - started, ended - began)


def count_steps(training: TrainingSection, sequences: TrainingSequences) -> int:
    """Returns the steps of the optimizer in a whole run."""
    if training.steps is not None:
        return training.steps
    size = BatchSize.of(training)
    visits = training.epochs or 0
    return max(1, sum(1 for _ in size.batches(sequences, int(visits * sequences.num_sequences))))


def autocast(config: Config, device: torch.device) -> torch.autocast:
    """Returns a context of bfloat16 or float16 arithmetic where that is configured; weights and sums stay float32."""
    autocasts = PRECISIONS[config.training.precision].autocasts
    return torch.autocast(device.type, dtype=compute_dtype(config) if autocasts else None, enabled=autocasts)


def compute_dtype(config: Config) -> torch.dtype:
    """Returns the dtype of matrix products."""
    return torch_dtype(PRECISIONS[config.training.precision].computed.name)


class Evaluator:
    """A pipeline as it evaluates held-out batches, in the precision of a training, or without one in the model's own.

    With `slice_len` the documents of a batch form one row, which is computed `slice_len` tokens at a time.
    """

    def __init__(self, pipe: Pipeline, config: Config | None, slice_len: int | None = None) -> None:
        self.pipe = pipe
        self._config = config
        self._slice_len = slice_len

    def loss(self, batch: TokenBatch) -> float:
        """Returns the mean loss of a batch. Collective."""
        documents = batch.document_ids
        values = batch.sequence_values
        plan = None if self._slice_len is None else self._plan(batch, self._slice_len)
        with nullcontext() if self._config is None else autocast(self._config, self.pipe.device):
            loss = self.pipe.evaluate(
                batch.input_ids, batch.labels, document_ids=documents, sequence_values=values, plan=plan
            )
        return float(loss)

    def sum_losses(self, batches: Iterable[tuple[TokenBatch, int]]) -> tuple[float, int]:
        """Returns the sum of the losses of all tokens that are predicted, and how many these are. Collective.

        Of each batch it takes this replica's part, and the number that all replicas predict.
        """
        total, count = 0.0, 0
        for batch, weight in batches:
            if weight:
                total = total + self.loss(batch) * weight
                count = count + weight
        return total, count

    def _plan(self, batch: TokenBatch, slice_len: int) -> StepPlan:
        rows = len(batch.input_ids)
        tokens = sum(map(len, batch.input_ids))
        # A plan takes the two answers of a pair as one row.
        groups = rows if batch.sequence_values is None else rows // 2
        slices = slice_lengths(-(-tokens // slice_len), tokens)
        return StepPlan((tuple(range(groups)),), (tuple(slices),), gpipe(1, 1, len(slices)))
