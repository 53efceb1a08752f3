"""The training loop of one rank: steps, validation, exports, and what is told about them."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from slipstream.errors import SlipstreamError
from slipstream.pipeline.pipeline import Pipeline
from slipstream.timeline import Timeline
from slipstream.training.config import Config, named_schedule
from slipstream.training.data import Batch, PackedSequences, TokenisedText, unigram_entropy
from slipstream.training.metrics import MetricsFile, Step, Validation, gather, peak_memory
from slipstream.training.optimizer import make_optimizer, make_scheduler
from slipstream.training.output import Output
from slipstream.training.progress import Progress
from slipstream.training.sampling import continue_text


def make_pipeline(config: Config, device: torch.device, **changes: Any) -> Pipeline:
    """This rank's share of the model; `changes` replace settings of the pipeline."""
    from transformers import AutoConfig

    settings: dict[str, Any] = {
        "schedule": named_schedule(config.pipeline),
        "num_microbatches": config.pipeline.num_microbatches,
        "num_flushes": config.pipeline.num_flushes,
        "slices": config.pipeline.slices,
        "stages_per_rank": config.pipeline.stages_per_rank,
        "recompute": config.pipeline.recompute,
        "offload": config.pipeline.offload,
        "memory_limit": config.pipeline.memory_limit,
        "partition": config.pipeline.partition,
        "seq_len": config.training.seq_len,
        "dtype": torch.float32,
        "device": device,
        "self_check": False,  # done before the ranks started
        **changes,
    }
    if config.model.pretrained:
        return Pipeline.from_pretrained(str(config.model.path), **settings)
    model_config = AutoConfig.from_pretrained(Output(config.training.output).inputs)
    return Pipeline.from_config(model_config, seed=config.training.seed, **settings)


class Trained(Protocol):
    """What the loop needs of a model: a Pipeline's, or one that a Pipeline is compared with."""

    def step(self, inputs: Tensor, targets: Tensor, *, document_ids: Tensor | None = None) -> Tensor:
        """Forward and backward; adds to the parameters' gradients and returns the mean loss."""
        ...

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scales the gradients to a norm of at most `max_norm` and returns what it was."""
        ...


def update(
    model: Trained,
    optimizer: Optimizer,
    scheduler: LRScheduler,
    batch: Batch,
    config: Config,
    device: torch.device,
) -> tuple[float, float]:
    """Forward, backward, clip, update. Returns the loss and the whole gradient's norm before clipping."""
    optimizer.zero_grad()
    with autocast(config, device):
        loss = model.step(batch.input_ids, batch.labels, document_ids=batch.document_ids)
    norm = model.clip_grad_norm_(config.optimizer.clip_norm or math.inf)
    optimizer.step()
    scheduler.step()
    return float(loss), float(norm)


def autocast(config: Config, device: torch.device) -> torch.autocast:
    """bfloat16 arithmetic where it is asked for; weights and sums stay float32."""
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=config.training.precision == "bf16")


def count_steps(config: Config, num_sequences: int) -> int:
    """How many steps the run takes, given the sequences of an epoch."""
    if config.training.steps is not None:
        return config.training.steps
    assert config.training.epochs is not None
    return max(1, int(config.training.epochs * num_sequences) // config.training.batch_size)


class Trainer:
    """One rank of a run whose inputs are in the output folder; every rank makes one and calls `run`."""

    def __init__(self, config: Config, pipe: Pipeline, device: torch.device, progress: Progress) -> None:
        self.config, self.pipe, self.device, self.progress = config, pipe, device, progress
        self.output = Output(config.training.output)
        training = config.training
        train = TokenisedText.load(self.output.inputs, "train")
        self.sequences = PackedSequences(train, training.seq_len, training.seed)
        self.num_steps = count_steps(config, self.sequences.num_sequences)
        self.optimizer: Optimizer = make_optimizer(pipe.parameters(), config.optimizer)
        self.scheduler = make_scheduler(self.optimizer, config.optimizer, self.num_steps)
        self.timeline: Timeline | None = None  # of the last training step
        self.metrics = MetricsFile(self.output.metrics if pipe.rank == 0 else None)

    def run(self) -> None:
        """Trains to the end, then draws the last step, exports the model and lets it write."""
        training = self.config.training
        with self.progress.training(self.num_steps) as show:
            for step in range(1, self.num_steps + 1):
                tuning = self.pipe.is_tuning
                metrics = self.step(step)
                show(step, _state(metrics))
                if tuning and not self.pipe.is_tuning:
                    slices = self.pipe.slices(training.seq_len)
                    self.progress.say(f"step {step}: auto has settled on slices of {slices} tokens")
                last = step == self.num_steps
                if training.eval_every and (step % training.eval_every == 0 or last):
                    self.validate(step)
                if training.export_every and step % training.export_every == 0 and not last:
                    self.export(self.output.model_at(step))
        self.draw_last_step()
        self.metrics.close()
        self.export(self.output.model)
        self.write_sample()

    def step(self, step: int) -> Step:
        """One step of the optimizer, measured."""
        training = self.config.training
        batch = self.sequences.batch((step - 1) * training.batch_size, training.batch_size)
        lr = float(self.scheduler.get_last_lr()[0])
        started = time.perf_counter()
        loss, grad_norm = update(self.pipe, self.optimizer, self.scheduler, batch, self.config, self.device)
        seconds = time.perf_counter() - started
        if not math.isfinite(loss):
            raise SlipstreamError(
                f"the loss of step {step} is {loss}; lower optimizer.lr (now {self.config.optimizer.lr}), "
                f"lengthen optimizer.warmup_steps, or clip with optimizer.clip_norm"
            )
        self.timeline = self.pipe.timeline
        metrics = Step(
            step=step,
            loss=loss,
            lr=lr,
            grad_norm=grad_norm,
            step_seconds=seconds,
            tokens_per_second=batch.input_ids.numel() / seconds,
            idle_fraction=self.timeline.idle_fraction,
            peak_memory=gather(peak_memory()),
        )
        self.metrics.write(metrics)
        return metrics

    def validate(self, step: int) -> None:
        """Loss and perplexity on the held-out text."""
        training = self.config.training
        text = TokenisedText.load(self.output.inputs, "validation")
        sequences = PackedSequences(text, training.seq_len, seed=None)
        total, count = 0.0, 0
        for batch in sequences.batches(training.batch_size, training.eval_batches):
            with autocast(self.config, self.device):
                loss = self.pipe.evaluate(batch.input_ids, batch.labels, document_ids=batch.document_ids)
            tokens = _count_predicted(batch)
            total, count = total + float(loss) * tokens, count + tokens
        mean = total / count
        self.metrics.write(Validation(step, mean, math.exp(mean)))
        below = unigram_entropy(text.tokens) - mean
        self.progress.say(
            f"step {step}: validation loss {mean:.3f} nats per token, perplexity {math.exp(mean):.1f}; "
            f"{abs(below):.2f} {'below' if below > 0 else 'above'} the text's unigram entropy"
        )

    def export(self, folder: Path) -> None:
        """The whole model and its tokenizer, as `AutoModelForCausalLM.from_pretrained` loads them."""
        self.pipe.save_pretrained(folder)
        if self.pipe.rank == 0:
            from transformers import AutoTokenizer

            AutoTokenizer.from_pretrained(self.output.inputs).save_pretrained(folder)
            self.progress.say(f"exported to {folder}")

    def draw_last_step(self) -> None:
        """The measured timeline of all ranks as text, picture and trace."""
        if self.pipe.rank == 0 and self.timeline is not None:
            self.timeline.draw(self.output.timeline)
            self.timeline.save_perfetto(self.output.perfetto)
            self.output.schedule.write_text(f"{self.pipe.layout.training}\n", encoding="utf-8")
            text = self.timeline.to_text()
            self.progress.say(f"\nthe last step, measured ({self.output.timeline}):\n{text}")

    def write_sample(self) -> None:
        """Rank 0 loads the export and continues the prompt."""
        sample = self.config.sample
        if self.pipe.rank == 0 and sample.prompt is not None:
            text = continue_text(self.output.model, sample, self.config.training.seed)
            self.progress.say(f"\nthe exported model continues {sample.prompt!r}:\n{text}\n")


def _count_predicted(batch: Batch) -> int:
    """Tokens that are predicted: all but the first of each document's part in a sequence."""
    return int((batch.document_ids[:, 1:] == batch.document_ids[:, :-1]).sum())


def _state(step: Step) -> str:
    memory = max(step.peak_memory) / 2**20
    return (
        f"loss {step.loss:.3f}  {step.tokens_per_second:,.0f} tokens/s  "
        f"idle {step.idle_fraction:.0%}  {memory:,.0f} MiB"
    )
