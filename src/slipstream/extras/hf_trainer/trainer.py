"""The Trainer of transformers with a Pipeline in place of its model: the loop stays theirs."""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, Never, Self

import torch
from accelerate import Accelerator
from accelerate.data_loader import IterableDatasetShard
from accelerate.utils import recursively_apply
from torch import Tensor, nn
from torch.optim import Optimizer
from transformers import Trainer, TrainingArguments

from slipstream.checkpoint import CheckpointFolder
from slipstream.errors import SlipstreamError
from slipstream.extras.hf_trainer.arguments import (
    check_accelerator,
    check_arguments,
    check_batches,
    check_derived,
    check_evaluated,
    check_script,
)
from slipstream.model import IGNORED, adapted_model, meta_model
from slipstream.parallel import end_group_at_exit
from slipstream.pipeline import UNSUPPORTED_CALLS, Pipeline

_log = logging.getLogger(__name__)
FOLDER = "slipstream"
"""Where a checkpoint of the Trainer has that of the Pipeline."""


class SlipstreamTrainer(Trainer):  # type: ignore[misc]
    """A `transformers.Trainer` that trains a Pipeline. All ranks make it, with equal arguments, and call its methods,
    which are collective.

    `per_device_train_batch_size` is the rows that one call of `Pipeline.step` takes, in all of its microbatches, on
    each replica. `gradient_accumulation_steps` calls it several times. Checkpoints are folders that `from_pretrained`
    reads, and have everything that training needs to go on.

    Args:
        model: a Pipeline of a causal LM.
        args: as a Trainer's; those that can't be followed exactly are refused.
        options: a Trainer's other arguments. `optimizers` has an optimizer of `pipe.parameters()`.

    Raises:
        SlipstreamError: for arguments that would be ignored or treated otherwise than by a Trainer.
    """

    def __init__(self, model: Pipeline, args: TrainingArguments | None = None, *others: Any, **options: Any) -> None:
        if type(self).compute_loss is not SlipstreamTrainer.compute_loss:
            raise SlipstreamError(
                f"{type(self).__name__}.compute_loss would never be called, as pipe.step computes the loss: give "
                "Pipeline(loss_fn=...), a function that returns (sum, count)."
            )
        # A class between the two may have arguments of its own.
        known = inspect.signature(Trainer)
        trainer_options = {name: value for name, value in options.items() if name in known.parameters}
        arguments = known.bind(model, args, *others, **trainer_options).arguments
        check_script(model, arguments)
        args = args or TrainingArguments()
        check_arguments(args, model, arguments.get("optimizers", (None, None))[0])
        trainers = [kind for kind in type(self).__mro__ if issubclass(kind, Trainer)]
        if all(kind is Trainer or issubclass(kind, SlipstreamTrainer) for kind in trainers):
            # Another trainer, such as axolotl's, reads the arguments that are its own.
            check_derived(args)
        self.pipe = model
        self._has_diverged = False
        super().__init__(PipelineModel(model), args, *others, **options)
        if self.model_accepts_loss_kwargs and not self._counts_as_a_pipeline:
            name = type(self.model.unsplit).__name__
            _log.warning(
                f"losses are divided by the number of all labels that aren't -100, each row's first included, as a "
                f"Trainer does for {name}, whose loss_type it doesn't know"
            )
        end_group_at_exit()

    @property
    def _counts_as_a_pipeline(self) -> bool:
        """Whether a Trainer counts the labels that the tokens of a model predict."""
        labels = torch.zeros((1, 2), dtype=torch.int64, device=self.args.device)
        num_items = self._get_num_items_in_batch([{"labels": labels}], self.args.device)
        return int(num_items) == self.pipe.num_replicas

    def create_accelerator_and_postprocess(self) -> None:
        """Makes the accelerator, one that knows which ranks share the data. Raises SlipstreamError where its settings
        would change more than a Pipeline allows."""
        super().create_accelerator_and_postprocess()
        check_accelerator(self.accelerator)
        PipelineAccelerator.take_over(self.accelerator, self.pipe)

    def training_step(self, model: nn.Module, inputs: Mapping[str, Any], num_items_in_batch: Any = None) -> Tensor:
        """Runs forward and backward of a batch; returns its part of the loss of all that is accumulated."""
        model.train()
        # Optimizers without a learning-rate schedule have a training mode.
        if callable(getattr(self.optimizer, "train", None)):
            self.optimizer.train()
        batch, values = rows_of_pairs(inputs)
        num_targets = self._num_targets(batch, num_items_in_batch, self.current_gradient_accumulation_steps)
        batch = with_rows(batch, self.pipe.order.num_microbatches)
        loss = self.pipe.step(batch, num_targets=num_targets, sequence_values=values).as_subclass(Tensor)
        if not self._has_diverged and not bool(loss.isfinite()):
            self._has_diverged = True
            if self.pipe.leads:
                # A Trainer logs another number in its place, by `logging_nan_inf_filter`.
                _log.warning(
                    f"step {self.state.global_step + 1}: the loss is {float(loss)}. Weights that an update has made "
                    "infinite or no numbers can't be saved: go on from the last checkpoint with a lower learning_rate "
                    "or a smaller max_grad_norm"
                )
        return loss

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], Any]:
        """Returns the next batches and what their losses are divided by, without the rows that accelerate repeats so
        that all replicas have as many."""
        batches, num_items = super().get_batch_samples(epoch_iterator, num_batches, device)
        if batches and self._repeats_rows:
            batches[-1] = self._without_repeated(batches[-1])
            num_items = self._get_num_items_in_batch(batches, device)
        return batches, num_items

    @property
    def _repeats_rows(self) -> bool:
        """Whether the batch that was read last has rows of the first, on some replica."""
        state = self.accelerator.gradient_state
        return self.pipe.num_replicas > 1 and state.end_of_dataloader and state.remainder > 0

    def _without_repeated(self, batch: Any) -> Any:
        """Returns the batch that was read last, in which no label of a repeated row counts.

        Replica r has the rows r*b up to (r+1)*b of the replicas' batch, of which `remainder` are the data set's.
        """
        if not self._repeats_rows or not isinstance(batch, Mapping) or "labels" not in batch:
            return batch
        state = self.accelerator.gradient_state
        num_rows = state.active_dataloader.total_batch_size // self.pipe.num_replicas
        first = max(0, state.remainder - self.pipe.replica * num_rows)
        if first >= num_rows:
            return batch
        labels = batch["labels"].clone()
        positions = batch.get("position_ids")
        if len(labels) == num_rows:
            labels[first:] = IGNORED
        elif positions is not None and int((positions == 0).sum()) == num_rows:  # rows next to each other in one
            labels[(positions == 0).cumsum(-1) > first] = IGNORED
        else:
            raise SlipstreamError(
                f"the collator makes {len(labels)} rows of {num_rows}, so those that are repeated to fill the last "
                f"batch of {self.pipe.num_replicas} replicas can't be found: give dataloader_drop_last=True, or a "
                f"multiple of {num_rows * self.pipe.num_replicas} rows."
            )
        return {**batch, "labels": labels}

    def _num_targets(self, inputs: Mapping[str, Any], num_items: Any, num_batches: int) -> int | None:
        """Returns the divisor of the sum of a batch's losses, as a Trainer has it, where `num_batches` add up; None
        where that is the count of the pipeline's own loss function. Collective where the Trainer hasn't counted.

        A Trainer counts each row's first label too where a model's loss isn't known to shift labels, as of GPT-2, and
        takes the mean of the batches' means where a model doesn't take the number.
        """
        if self.pipe.has_own_loss and num_batches == 1:
            return None
        if num_items is not None and not self.pipe.has_own_loss:
            return int(num_items)
        counted = (inputs["labels"][..., 1:] != IGNORED).sum().to(self.args.device)
        num_targets = int(self.accelerator.gather(counted).sum())
        return num_targets if self.pipe.has_own_loss else num_targets * num_batches

    def compute_loss(self, *args: Any, **options: Any) -> Any:
        """Raises SlipstreamError: a loss of one's own is the Pipeline's."""
        raise SlipstreamError("pipe.step has computed the loss: give Pipeline(loss_fn=...) for one of your own.")

    def prediction_step(
        self,
        model: nn.Module,
        inputs: Mapping[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Returns a batch's loss, and unless only that is wanted, its logits and labels, on every rank."""
        self._num_predictions += 1
        inputs, values = rows_of_pairs(inputs)
        labels = inputs.get("labels")
        counted = self._without_repeated(inputs)
        batch = with_rows(counted, self.pipe.order.num_microbatches)
        loss = None if labels is None else self._evaluated(counted, batch, values)
        if prediction_loss_only:
            return loss, None, None
        logits = replicated_logits(self.pipe, batch)
        return loss, logits[: len(inputs["input_ids"])], labels

    def _evaluated(self, inputs: Mapping[str, Any], batch: Mapping[str, Any], values: Tensor | None) -> Tensor:
        """Returns a batch's loss: no number where none of its labels counts, as a Trainer's."""
        num_targets = self._num_targets(inputs, self._get_num_items_in_batch([inputs], self.args.device), 1)
        if num_targets == 0:
            return torch.full((), math.nan, dtype=torch.float64, device=self.pipe.device)
        return self.pipe.evaluate(batch, num_targets=num_targets, sequence_values=values)

    def evaluation_loop(self, *args: Any, **options: Any) -> Any:
        """Returns the model's outputs and loss on a loader's batches."""
        self._num_predictions = 0
        return super().evaluation_loop(*args, **options)

    def predict(self, *args: Any, **options: Any) -> Any:
        """Returns predictions and metrics of a data set, on every rank."""
        output = super().predict(*args, **options)
        self._correct_speed(output.metrics)
        return output

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Logs on every rank."""
        self._correct_speed(logs)
        super().log(logs, start_time)

    def _correct_speed(self, metrics: dict[str, float]) -> None:
        """Counts an evaluation's steps as they were; a Trainer divides samples by all processes."""
        for name, seconds in [*metrics.items()]:
            if name.endswith("_runtime") and name != "train_runtime" and seconds:
                metrics[name.replace("_runtime", "_steps_per_second")] = round(self._num_predictions / seconds, 3)

    def get_train_dataloader(self) -> Any:
        """Returns the loader of this rank's replica."""
        check_batches(self.pipe, self.train_dataset, self.args)
        loader = super().get_train_dataloader()
        if isinstance(loader.dataset, IterableDatasetShard) and not loader.dataset.drop_last:
            # Nobody knows how many of its last rows would be repeated ones.
            loader.dataset.drop_last = True
            _log.warning(
                "the training data is a stream, of which the last rows are left out where they don't fill a batch of "
                f"each of the {self.pipe.num_replicas} replicas"
            )
        return loader

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """Returns the loader of this rank's replica."""
        return self._checked(super().get_eval_dataloader(eval_dataset))

    def get_test_dataloader(self, test_dataset: Any) -> Any:
        """Returns the loader of this rank's replica."""
        return self._checked(super().get_test_dataloader(test_dataset))

    def _checked(self, loader: Any) -> Any:
        check_evaluated(self.pipe, loader.dataset, self.args)
        return loader

    def get_total_train_batch_size(self, args: TrainingArguments) -> int:
        """Returns the rows of an update: those of all replicas."""
        return int(self._train_batch_size * args.gradient_accumulation_steps * self.pipe.num_replicas)

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """Returns the names of the unsplit model's parameters that have weight decay."""
        names: list[str] = super().get_decay_parameter_names(self.model.unsplit)
        return names

    def floating_point_ops(self, inputs: Mapping[str, Any]) -> float:
        """Returns this rank's share of a batch's operations; a Trainer adds up those of all processes."""
        sharing = self.args.world_size // self.pipe.num_replicas
        return float(super().floating_point_ops(inputs) / max(1, sharing))

    def _set_signature_columns_if_needed(self) -> None:
        """Keeps the columns that the unsplit model takes, so that a Pipeline, which may not take them, can say so."""
        self._signature_columns = [*inspect.signature(self.model.unsplit.forward).parameters, "label", "label_ids"]

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Writes the model for `from_pretrained`. Collective; transformers < 5.23 would call `_save` on one rank."""
        self._save(output_dir)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _save(self, output_dir: str | None = None, state_dict: object = None) -> None:
        """Writes the whole model, the tokenizer and the arguments."""
        folder = output_dir or self.args.output_dir
        self.pipe.save_pretrained(folder)
        if self.args.should_save:
            tokenizer = self.processing_class or getattr(self.data_collator, "tokenizer", None)
            if tokenizer is not None:
                tokenizer.save_pretrained(folder)
            torch.save(self.args, Path(folder, "training_args.bin"))

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        step = self.state.global_step
        states = {"optimizer": self._optimizer, "scheduler": self.lr_scheduler}
        self.pipe.save(Path(output_dir, FOLDER), step, keep=1, replace=True, **states)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """Checks that training can go on from a checkpoint; its weights are loaded together with the optimizer."""
        if not Path(resume_from_checkpoint).is_dir():
            near = sorted(path.name for path in Path(self.args.output_dir).glob("checkpoint-*"))
            there = f"; {self.args.output_dir} has {', '.join(near)}" if near else ""
            raise SlipstreamError(
                f"resume_from_checkpoint={str(resume_from_checkpoint)!r}: there is no such folder{there}."
            )
        if not CheckpointFolder(Path(resume_from_checkpoint, FOLDER)).steps():
            raise SlipstreamError(
                f"{resume_from_checkpoint} has no folder {FOLDER!r}, which a SlipstreamTrainer saves in a checkpoint "
                "unless save_only_model=True: training can't go on from there. To begin with its weights type "
                f"Pipeline.from_pretrained({str(resume_from_checkpoint)!r}), and train() without "
                "resume_from_checkpoint."
            )

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            states = {"optimizer": self._optimizer, "scheduler": self.lr_scheduler}
            self.pipe.load(Path(checkpoint, FOLDER), **states)

    def _load_best_model(self) -> None:
        self.pipe.load(Path(self.state.best_model_checkpoint, FOLDER))

    @property
    def _optimizer(self) -> Optimizer:
        """The optimizer in accelerate's."""
        wrapped: Any = self.optimizer
        optimizer: Optimizer = getattr(wrapped, "optimizer", wrapped)
        return optimizer


class PipelineModel(nn.Module):
    """A module without parameters of its own, that yields those of a Pipeline's rank and can't be called."""

    main_input_name = "input_ids"

    def __init__(self, pipe: Pipeline) -> None:
        super().__init__()
        self.pipe = pipe
        self.config = pipe.config

    @cached_property
    def unsplit(self) -> Any:
        """The unsplit model on the meta device, without memory: for names, which are the Pipeline's, and counts."""
        model = meta_model(self.config)
        return model if self.pipe.adapter is None else adapted_model(model, self.pipe.adapter).get_base_model()

    @property
    def loss_type(self) -> str | None:
        """The unsplit model's, by which a Trainer knows whether each row's first label is one that it divides by."""
        loss_type: str | None = getattr(self.unsplit, "loss_type", None)
        return loss_type

    @property
    def accepts_loss_kwargs(self) -> bool:
        """Whether a Trainer divides by the labels of all batches that it accumulates, as it asks the unsplit model."""
        parameters = inspect.signature(self.unsplit.forward).parameters.values()
        by_signature = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters)
        return bool(getattr(self.unsplit, "accepts_loss_kwargs", by_signature))

    def gradient_checkpointing_enable(self, *_: object, **options: object) -> None:
        """Does nothing: arguments that ask for it are taken of a Pipeline that recomputes activations already."""

    activation_checkpointing_enable = gradient_checkpointing_enable

    def forward(self, labels: object = None, **columns: object) -> Never:
        """Raises SlipstreamError: a Pipeline's forward and backward are one call."""
        raise SlipstreamError(f"the model of a SlipstreamTrainer is cut over the ranks: {UNSUPPORTED_CALLS['forward']}")

    def named_parameters(self, *args: Any, **options: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Yields the parameters that this rank's optimizer updates, under the unsplit model's names."""
        return self.pipe.named_parameters()

    def num_parameters(self, only_trainable: bool = False, exclude_embeddings: bool = False) -> int:
        """Returns the number of the unsplit model's parameters, as a model of transformers does."""
        return int(self.unsplit.num_parameters(only_trainable, exclude_embeddings))

    def train(self, mode: bool = True) -> Self:
        """Sets training mode, or evaluation mode."""
        if mode:
            self.pipe.train()
        else:
            self.pipe.eval()
        return super().train(mode)

    def state_dict(self, *args: Any, **options: Any) -> dict[str, Tensor]:  # type: ignore[override]
        """Returns the whole model's state on rank 0, an empty dict on the others. Collective."""
        return self.pipe.state_dict()

    def save_pretrained(self, folder: str | Path, **options: Any) -> None:
        """Writes the whole model. Collective: call it on every rank."""
        self.pipe.save_pretrained(folder)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError as error:
            if (answer := UNSUPPORTED_CALLS.get(name)) is None:
                raise
            raise AttributeError(f"the model of a SlipstreamTrainer has no attribute {name!r}: {answer}") from error


class PipelineAccelerator(Accelerator):  # type: ignore[misc]
    """An Accelerator that divides data among replicas, and leaves gradients and their norm to the Pipeline."""

    pipe: Pipeline

    @classmethod
    def take_over(cls, accelerator: Accelerator, pipe: Pipeline) -> None:
        """Makes an accelerator one of this class, so that its methods that a Trainer has kept are these too."""
        accelerator.__class__, accelerator.pipe = cls, pipe
        # With the default, rank 0 would deal out a batch's rows.
        if accelerator.dataloader_config.dispatch_batches is None:
            accelerator.dataloader_config.dispatch_batches = False

    @property
    def num_processes(self) -> int:
        """The number of processes among which data is divided: the replicas."""
        return self.pipe.num_replicas

    @property
    def process_index(self) -> int:
        """This process's place among those that share the data: its replica."""
        return self.pipe.replica

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Returns the model as it is: DistributedDataParallel isn't put around it."""
        prepared: nn.Module = super().prepare_model(model, device_placement=False, evaluation_mode=True)
        return prepared

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Tensor:
        """Scales the gradients of all ranks, not of `parameters` alone; returns their norm before. Collective."""
        return self.pipe.clip_grad_norm_(max_norm)

    def gather(self, tensor: Any) -> Any:
        """Returns the tensors of all replicas, one after another along the first dimension. Collective."""
        replicas = self.pipe.axes["dp"]
        if replicas.size == 1:
            return tensor
        return recursively_apply(lambda part: replicas.all_gather(part).flatten(0, min(1, part.dim())), tensor)


def rows_of_pairs(batch: Mapping[str, Any]) -> tuple[Mapping[str, Any], Tensor | None]:
    """Returns a batch of TRL's collator for preferences, all chosen answers and then all rejected ones, as rows of
    which each chosen answer is followed by its rejected one, and their log-probabilities by the reference, (rows,); any
    other batch as it is, and None.

    Raises SlipstreamError where the reference's part isn't in it.
    """
    mask, ids = batch.get("completion_mask"), batch.get("input_ids")
    if mask is None or ids is None:
        return batch, None
    if "label" in batch:
        raise SlipstreamError(
            "a batch of rated answers (KTO), which a SlipstreamTrainer doesn't train: give `slipstream train` the same "
            "rows (prompt, completion, label) with --preference.loss=kto."
        )
    if "ref_chosen_logps" not in batch:
        raise SlipstreamError(
            "a batch of preferences without ref_chosen_logps, what the reference makes of each answer: give "
            "trl.DPOConfig(precompute_ref_log_probs=True), which computes them before the training."
        )
    order = torch.arange(len(ids), device=ids.device).view(2, -1).T.flatten()
    reference = torch.cat([batch["ref_chosen_logps"], batch["ref_rejected_logps"]]).double()
    rows = {"input_ids": ids, "labels": ids.masked_fill(mask == 0, IGNORED), "attention_mask": batch["attention_mask"]}
    return {key: value[order] for key, value in rows.items()}, reference[order]


def with_rows(batch: Mapping[str, Any], num_rows: int) -> Mapping[str, Any]:
    """Returns the batch with at least `num_rows` rows, one for each microbatch: the last of a data set may have fewer.

    Rows that are added have no label that counts, and so no part in the loss or in a gradient.
    """
    rows = len(batch["input_ids"]) if isinstance(batch.get("input_ids"), Tensor) else num_rows
    if rows >= num_rows:
        return batch
    more = {key: value[:1].repeat(num_rows - rows, *[1] * (value.dim() - 1)) for key, value in batch.items()}
    if "labels" in more:
        more["labels"] = torch.full_like(more["labels"], IGNORED)
    return {key: torch.cat([value, more[key]]) for key, value in batch.items()}


def replicated_logits(pipe: Pipeline, batch: Mapping[str, Any]) -> Tensor:
    """Returns the logits of a batch's tokens, (batch, sequence, vocabulary), on every rank. Collective."""
    logits = pipe.logits(batch)
    # A batch is one tensor.
    assert not isinstance(logits, list)
    ranks = pipe.axes["pp"]
    form = next(filter(None, ranks.gather(None if logits is None else (tuple(logits.shape), logits.dtype))))
    return ranks.sum(torch.zeros(form[0], dtype=form[1], device=pipe.device) if logits is None else logits)
