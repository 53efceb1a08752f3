"""The training loop of one rank: steps, validation, exports, and what is told about them."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from slipstream.errors import SlipstreamError
from slipstream.launch import Progress
from slipstream.parallel import RankGroup, make_mesh
from slipstream.parallel.replicas import LossScale
from slipstream.pipeline import Pipeline
from slipstream.schedule import AUTOMATIC, Schedule, make_schedule, placed_as
from slipstream.timeline import Timeline, draw_timelines, save_trace
from slipstream.training.checkpoint import Checkpoints, RunState, SavedCheckpoint, describe_model, run_shards
from slipstream.training.config import Config, named_schedule
from slipstream.training.data import PackedSequences, TokenBatch, TokenisedText, unigram_entropy
from slipstream.training.metrics import Reporter, StepRecord, ValidationRecord, describe_step
from slipstream.training.optimizer import make_optimizer, make_scheduler
from slipstream.training.run_folder import RunFolder
from slipstream.training.sampling import continue_text
from slipstream.training.training_step import autocast, train_step


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
        "dtype": torch.bfloat16 if config.training.precision == "bf16-weights" else torch.float32,
        "master_dtype": torch.float32 if config.training.precision == "bf16-weights" else None,
        "device": device,
        "fused": config.pipeline.fused,
        "sequence_parallel": config.parallel.sequence,
        "tensor_plan": config.parallel.tensor_plan,
        "shard_optimizer": config.parallel.shard_optimizer,
        "shard_parameters": config.parallel.shard_parameters,
        "mesh": _mesh(config, device),
        "self_check": config.parallel.tensor > 1 and config.pipeline.self_check,  # else done before the ranks started
        **changes,
    }
    if config.model.pretrained:
        return Pipeline.from_pretrained(str(config.model.path), **settings)
    model_config = AutoConfig.from_pretrained(RunFolder(config.training.output).inputs)
    return Pipeline.from_config(model_config, seed=config.training.seed, **settings)


def _mesh(config: Config, device: torch.device) -> DeviceMesh | None:
    """The ranks as configured; one process that is measured for comparison has none."""
    if not dist.is_initialized() or dist.get_world_size() == config.pipeline.num_ranks:
        return None
    return make_mesh(config.pipeline.num_ranks, config.parallel.data, config.parallel.tensor, device.type)


def start(config: Config, device: torch.device, progress: Progress) -> Trainer:
    """This rank's part of a run that begins, or goes on from a checkpoint. Collective."""
    settings = config.checkpoint
    folder, world = RunFolder(config.training.output).checkpoints, RankGroup(dist.group.WORLD)
    checkpoints = Checkpoints(folder, world, settings.keep, settings.keep_every, progress.say)
    if settings.every:
        checkpoints.prepare()
    found = None if settings.resume == "no" else checkpoints.find(settings.resume)
    pipe = make_pipeline(config, device, **_tuned(config, found))
    return Trainer(config, pipe, device, progress, checkpoints, found)


def _tuned(config: Config, found: SavedCheckpoint | None) -> dict[str, Any]:
    """What auto had settled on, where the checkpoint's run had the same ranks, stages and microbatches."""
    tuned = None if found is None else found.facts["tuned"]
    pipeline = config.pipeline
    if tuned is None or not (pipeline.schedule in AUTOMATIC or pipeline.slices == "auto"):
        return {}
    schedule = Schedule.parse(tuned["schedule"])
    name = placed_as(pipeline.schedule, pipeline.stages_per_rank)
    same = (
        schedule.placement == make_schedule(name, pipeline.num_ranks, 1, 1, pipeline.stages_per_rank).placement
        and schedule.num_microbatches == pipeline.num_microbatches
        and sum(tuned["slices"]) == config.training.seq_len
    )
    return {"schedule": schedule, "slices": tuned["slices"], "num_flushes": 1} if same else {}


def count_steps(config: Config, num_sequences: int) -> int:
    """How many steps the run takes, given the sequences of an epoch."""
    if config.training.steps is not None:
        return config.training.steps
    assert config.training.epochs is not None
    return max(1, int(config.training.epochs * num_sequences) // config.training.batch_size)


class Trainer:
    """One rank of a run whose inputs are in the output folder; every rank makes one and calls `run`."""

    def __init__(
        self,
        config: Config,
        pipe: Pipeline,
        device: torch.device,
        progress: Progress,
        checkpoints: Checkpoints,
        found: SavedCheckpoint | None = None,
    ) -> None:
        """Collective. `found` of the checkpoints is the one to go on from."""
        self.config, self.pipe, self.device, self.progress = config, pipe, device, progress
        self.output = RunFolder(config.training.output)
        training = config.training
        train = TokenisedText.load(self.output.inputs, "train")
        self.sequences = PackedSequences(train, training.seq_len, training.seed)
        self.num_steps = count_steps(config, self.sequences.num_sequences)
        self.optimizer: Optimizer = make_optimizer(pipe.parameters(), config.optimizer)
        self.scheduler = make_scheduler(self.optimizer, config.optimizer, self.num_steps)
        self.loss_scale = LossScale() if training.precision == "fp16" else LossScale.fixed()
        self.timeline: Timeline | None = None  # of the last training step
        self.progression = RunState(pipe, self.scheduler, self.loss_scale, self.sequences)
        self.checkpoints = checkpoints
        if found is not None:
            self._go_on_from(found)
        self.reporter = Reporter(config, pipe, device, progress, resumed_after=self.progression.step)

    def run(self) -> None:
        """Trains to the end, then draws the last step, exports the model and lets it write."""
        training, first = self.config.training, self.progression.step + 1
        if self.pipe.is_tuning:
            self.progress.say(
                "auto tries orders or slices in the first steps, 29 at most; the first search of an installation "
                "compiles its code, for half a minute or more"
            )
        with self.progress.training(self.num_steps) as show:
            for step in range(first, self.num_steps + 1):
                tuning = self.pipe.is_tuning
                metrics = self.step(step)
                show(step, describe_step(metrics))
                if tuning and not self.pipe.is_tuning:
                    slices = self.pipe.slices(training.seq_len)
                    self.progress.say(f"step {step}: auto has settled on slices of {slices} tokens")
                self._do_what_is_due(step)
        self.checkpoints.close()
        self.reporter.close()
        self.draw_last_step()
        self.export(self.output.model)
        self.write_sample()

    def _do_what_is_due(self, step: int) -> None:
        training, last = self.config.training, step == self.num_steps
        if training.eval_every and (step % training.eval_every == 0 or last):
            self.validate(step)
        every = self.config.checkpoint.every
        if every and (step % every == 0 or last):
            self.checkpoints.save(step, list(run_shards(self.pipe, self.optimizer)), self.progression.facts())
        if training.export_every and step % training.export_every == 0 and not last:
            self.export(self.output.model_at(step))

    def _go_on_from(self, found: SavedCheckpoint) -> None:
        found.check_model(describe_model(self.pipe.config))
        self.checkpoints.load(found, list(run_shards(self.pipe, self.optimizer)))
        self.progression.go_on(found.facts, self.optimizer)
        self.progress.say(f"going on after step {found.step}, from {found.folder}")

    def step(self, step: int) -> StepRecord:
        """One step of the optimizer, measured."""
        training, progression, trial = self.config.training, self.progression, self.pipe.is_tuning
        began = time.perf_counter()
        batch = self._mine(progression.num_samples)
        lr = float(self.scheduler.get_last_lr()[0])
        started = time.perf_counter()
        updated = train_step(
            self.pipe,
            self.optimizer,
            self.scheduler,
            batch,
            self.config,
            self.device,
            self.loss_scale,
            before_update=self.checkpoints.keep,
        )
        seconds = time.perf_counter() - started
        if training.precision != "fp16" and not math.isfinite(updated.loss + updated.grad_norm):
            raise SlipstreamError(
                f"the loss of step {step} is {updated.loss}, the norm of its gradient {updated.grad_norm}; lower "
                f"optimizer.lr (now {self.config.optimizer.lr}), lengthen optimizer.warmup_steps, or clip with "
                "optimizer.clip_norm"
            )
        progression.step, progression.num_samples = step, progression.num_samples + training.batch_size
        self.timeline = self.pipe.timeline
        return self.reporter.report(step, updated, seconds, started - began, lr, batch, self.timeline, trial)

    def _mine(self, first: int) -> TokenBatch:
        """This replica's rows of the batch that begins with the sequence `first`."""
        each = self.config.training.batch_size // self.pipe.num_replicas
        return self.sequences.batch(first + self.pipe.replica * each, each)

    def _share(self, batch: TokenBatch) -> TokenBatch:
        """This replica's rows."""
        each = self.config.training.batch_size // self.pipe.num_replicas
        return TokenBatch(*(tensor.narrow(0, self.pipe.replica * each, each) for tensor in batch))

    def validate(self, step: int) -> None:
        """Loss and perplexity on the held-out text."""
        training = self.config.training
        text = TokenisedText.load(self.output.inputs, "validation")
        sequences = PackedSequences(text, training.seq_len, seed=None)
        total, count = 0.0, 0
        for batch in sequences.batches(training.batch_size, training.eval_batches):
            mine = self._share(batch)
            with autocast(self.config, self.device):
                loss = self.pipe.evaluate(mine.input_ids, mine.labels, document_ids=mine.document_ids)
            tokens = _count_predicted(batch)
            total, count = total + float(loss) * tokens, count + tokens
        mean = total / count
        self.reporter.write(ValidationRecord(step, mean, math.exp(mean)))
        below = unigram_entropy(text.tokens) - mean
        self.progress.say(
            f"step {step}: validation loss {mean:.3f} nats per token, perplexity {math.exp(mean):.1f}; "
            f"{abs(below):.2f} {'below' if below > 0 else 'above'} the text's unigram entropy"
        )

    def export(self, folder: Path) -> None:
        """The whole model and its tokenizer, as `AutoModelForCausalLM.from_pretrained` loads them."""
        self.pipe.save_pretrained(folder)
        if self.pipe.leads:
            from transformers import AutoTokenizer

            AutoTokenizer.from_pretrained(self.output.inputs).save_pretrained(folder)
            self.progress.say(f"exported to {folder}")

    def draw_last_step(self) -> None:
        """The measured timeline of all ranks as text, picture and trace."""
        if self.pipe.leads and self.timeline is not None:
            draw_timelines(self.output.timeline, self.timeline)
            save_trace(self.output.perfetto, self.timeline)
            self.output.schedule.write_text(f"{self.pipe.last_step.layout.training}\n", encoding="utf-8")
            text = self.timeline.to_text()
            self.progress.say(f"\nthe last step, measured ({self.output.timeline}):\n{text}")

    def write_sample(self) -> None:
        """Rank 0 loads the export and continues the prompt."""
        sample = self.config.sample
        if self.pipe.leads and sample.prompt is not None:
            text = continue_text(self.output.model, sample, self.config.training.seed)
            self.progress.say(f"\nthe exported model continues {sample.prompt!r}:\n{text}\n")


def _count_predicted(batch: TokenBatch) -> int:
    """Tokens that are predicted: all but the first of each document's part in a sequence."""
    return int((batch.document_ids[:, 1:] == batch.document_ids[:, :-1]).sum())
