"""The training loop of one rank: steps, validations, checkpoints and exports."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import nullcontext

import torch
import torch.distributed as dist

from slipstream.errors import RankFailedError, StoppedRunError
from slipstream.launch import Progress, StopRequest
from slipstream.parallel import RankGroup
from slipstream.parallel.gradients import LossScale
from slipstream.timeline import Timeline
from slipstream.train.bad_steps import BadSteps
from slipstream.train.config import Config
from slipstream.train.configured_pipeline import make_pipeline, tuned_settings
from slipstream.train.corruption import StateCheck
from slipstream.train.cut_advice import CutAdvice
from slipstream.train.data import BatchSize, TokenBatch, TokenisedText, load_texts, sequences_of
from slipstream.train.data.streams import load_sequences
from slipstream.train.metrics import DiskTrouble, Reporter, StepRecord
from slipstream.train.optimizers import make_optimizer, make_scheduler
from slipstream.train.planned_start import earlier_choices, facts_of_documents, record_plan, start_settings
from slipstream.train.preferences import load_with_reference, mean_rewards, reward_sums
from slipstream.train.run_checkpoints import CheckpointedParts, RunCheckpoints
from slipstream.train.run_folder import RunFolder
from slipstream.train.run_results import draw_last_step, export_model, has_room, write_sample
from slipstream.train.run_state import RunState
from slipstream.train.training_step import count_steps, train_step
from slipstream.train.validation import Validator
from slipstream.watchdog import counted_off


class Trainer:
    """One rank of a run whose inputs are in the run folder; every rank makes one and calls `run`."""

    def __init__(self, config: Config, device: torch.device, progress: Progress, stop: StopRequest) -> None:
        """Builds this rank's part of the model, and restores the checkpoint that the run resumes from, if any.

        Collective.
        """
        self._config, self._device, self._progress, self._stop = config, device, progress, stop
        training, world = config.training, RankGroup(dist.group.WORLD)
        self._folder = RunFolder(training.output)
        self._checkpoints = RunCheckpoints(
            config, self._folder, world, progress, written=lambda record: self._reporter.write(record)
        )
        self._disk = DiskTrouble(progress.warn)
        saved = self._checkpoints.find_start()
        self._sequences = load_sequences(config, self._folder.inputs, progress.warn)
        self._batch_size = BatchSize(training.batch_size, training.batch_tokens)
        earlier = earlier_choices(config, saved.facts) if saved else None
        cut_advice = CutAdvice(config)
        resumes = saved is not None
        settings = start_settings(config, self._sequences, progress, earlier, resumes) or tuned_settings(
            config, earlier
        )
        what = "planning: what the model's parts cost, then the search"
        with progress.waiting(what) if "seq_len" in settings else nullcontext():
            self._pipe = make_pipeline(config, device, **settings)
        plan, by_step = record_plan(config, self._pipe, self._sequences, progress), self._sequences.packing == "none"
        if plan is not None and not by_step:
            cut_advice.note(plan)
        self._validator = Validator(config, self._load_held_out(resumes), self._pipe, device, progress.say)
        self._num_steps = count_steps(training, self._sequences)
        optimizer = make_optimizer(self._pipe.parameters(), config.optimizer)
        self._scheduler = make_scheduler(optimizer, config.optimizer, self._num_steps)
        self._loss_scale = LossScale() if training.precision == "fp16" else LossScale.fixed()
        kept = facts_of_documents(self._pipe, settings) if by_step else None
        values = config.model_dump(mode="json")
        self._state = RunState(self._pipe, self._scheduler, self._loss_scale, self._sequences, values, kept)
        has_copies = world.size > self._pipe.axes["pp"].size
        self._bad_steps = BadSteps(config, world, device, has_copies, self._roll_back)
        self._parts = CheckpointedParts(self._pipe, optimizer, self._state, self._bad_steps, self._validator.history)
        takes_majority = training.corrupt_replicas == "majority"
        self._state_check = StateCheck(
            training.check_replicas_every, takes_majority, self._parts.shards, world, progress.warn
        )
        if saved is not None:
            self._checkpoints.resume(saved, self._parts)
        self._reporter = Reporter(
            config,
            self._pipe,
            device,
            progress,
            sequence=self._mean_sequences(),
            resumed_after=self._state.step,
            cut_advice=cut_advice,
        )

    def run(self) -> None:
        """Trains to the end, then draws the last step, exports the model and lets it write. Collective."""
        pipe, timeline, state = self._pipe, None, self._state
        if self._is_tuning:
            self._progress.say(
                "auto plans orders or slices at the first step, or once a few steps were timed where costs can't be "
                "measured; the first search of an installation compiles its code, for half a minute or more"
            )
        self._stop.begin()
        if asked := next(filter(None, RankGroup(dist.group.WORLD).gather(self._stop.name)), ""):
            raise StoppedRunError(f"{asked} ended the run before its first step; nothing new is to be saved")
        failures_noted = self._checkpoints.failures_noted(self._parts)
        with self._progress.training(self._num_steps, state.step) as show, failures_noted:
            if state.step and self._validator.is_due(state.step, self._num_steps):  # the run was asked to stop before
                self._do_what_is_due(state.step)
            for step in self._steps_left():
                was_tuning = self._is_tuning
                record, timeline = self._train_step(step)
                show(step, record.texts())
                if was_tuning and not self._is_tuning:
                    slices = pipe.slices(self._config.training.seq_len)
                    self._progress.say(f"step {step}: auto has settled on slices of {slices} tokens")
                if self._reporter.asked_to_stop:
                    self._save_and_stop(step)
                self._do_what_is_due(step)
            self._checkpoints.close()
        if numbers := self._bad_steps.steps:
            self._progress.warn(f"{len(numbers)} steps did not update: {', '.join(map(str, numbers))}")
        if best := self._validator.history.describe_best():
            self._progress.say_result(best)
        self._reporter.close()
        with counted_off("drawing the last step"), self._disk.tolerated("the last step's timeline"):
            draw_last_step(pipe, timeline, self._folder, self._progress)
        try:
            self._load_what_is_exported()
            export_model(pipe, self._folder, self._folder.model, self._config, self._progress)
        except OSError as error:
            raise RankFailedError(
                f"the trained model can't be written to {self._folder.model}: {error}. Make room, and type the same "
                "command with --checkpoint.resume=latest"
            ) from error
        with counted_off("writing a sample"):
            write_sample(pipe, self._config, self._progress)

    def _load_held_out(self, resumes: bool) -> list[TokenisedText]:
        """Returns the held-out text; of preferences with the reference, which the training text then has, too.
        Collective."""
        config = self._config
        if config.preference is None:
            return load_texts(self._folder.inputs, "validation")
        with counted_off("computing the reference"):
            texts = load_with_reference(config, self._pipe, self._progress, resumes)
        packing, training, weights = config.data.packing, config.training, config.data.weights
        self._sequences = sequences_of(texts["train"], packing, training.seq_len, training.seed, weights)
        return texts["validation"]

    def _mean_sequences(self) -> tuple[float, float]:
        """Returns the mean tokens of what the model sees as a sequence, and the mean number of them in a step."""
        sequences, number = self._sequences, self._sequences.group_size
        return sequences.mean_length / number, self._batch_size.mean(sequences) * number

    def _steps_left(self) -> Iterator[int]:
        """Yields the numbers of the steps to train, until validations don't improve any more."""
        for step in range(self._state.step + 1, self._num_steps + 1):
            if self._validator.history.is_out_of_patience:
                break
            yield step
        if self._validator.history.is_out_of_patience:
            self._progress.say_result(
                f"the run ends after step {self._state.step}: {self._validator.history.describe_end()}"
            )

    def _load_what_is_exported(self) -> None:
        """Loads the best checkpoint where that is to be exported, and says which it is. Collective."""
        history = self._validator.history
        if self._config.training.export == "last" or (history.best and history.best.step == self._state.step):
            return
        step = self._checkpoints.load_best(self._parts)
        self._progress.say_result(f"the model of step {step}, the best that is saved, is exported")

    @property
    def _is_tuning(self) -> bool:
        """Whether order or slices are still to be planned; where lengths differ each step has its own plan."""
        return self._pipe.is_tuning and self._config.data.packing == "fixed"

    def _roll_back(self) -> int | None:
        """Loads the last good checkpoint and returns its step; None where there is none yet. Collective."""
        self._state_check.forget()
        return self._checkpoints.roll_back(self._parts)

    def _save(self, step: int) -> None:
        if self._state_check.compare():
            self._pipe.refresh()
        self._checkpoints.save(step, self._parts)

    def _save_and_stop(self, step: int) -> None:
        """Saves a checkpoint, whether or not one is due, and ends the run by StoppedRunError. Collective."""
        self._save(step)
        self._checkpoints.close()
        self._reporter.close()
        where = self._checkpoints.saved_text(step)
        raise StoppedRunError(f"{self._reporter.asked_to_stop} ended the run after step {step}; {where}")

    def _do_what_is_due(self, step: int) -> None:
        training, section, is_best = self._config.training, self._config.checkpoint, False
        if self._validator.is_due(step, self._num_steps):
            with counted_off("validating"):
                record, is_best = self._validator.validate(step)
            self._reporter.write(record)
        last = step == self._num_steps or self._validator.history.is_out_of_patience
        is_wanted = (is_best and section.keep_best) or (last and (section.every or section.keep_best))
        if self._checkpoints.is_due(step) or is_wanted:
            began = time.perf_counter()
            self._save(step)
            self._checkpoints.note_save(step, time.perf_counter() - began)
        if training.export_every and step % training.export_every == 0 and not last:
            self._export_between(step)

    def _export_between(self, step: int) -> None:
        """Exports the model, unless the disk has no room for that and for the next two checkpoints. Collective."""
        folder = self._folder.model_at(step)
        if has_room(self._folder, folder, 3 * self._checkpoints.newest_bytes(), self._progress):
            with self._disk.tolerated(folder.name):
                export_model(self._pipe, self._folder, folder, self._config, self._progress)

    def _train_step(self, step: int) -> tuple[StepRecord, Timeline]:
        """Takes one step of the optimizer; returns what was measured of it and what ran when. Collective."""
        state, is_trial = self._state, self._is_tuning
        began = time.perf_counter()
        size = self._batch_size.at(self._sequences, state.num_samples)
        batch = self._mine(state.num_samples, size)
        data_seconds = time.perf_counter() - began
        judge = self._bad_steps
        result = train_step(
            self._pipe,
            self._scheduler,
            batch,
            self._config,
            self._device,
            self._loss_scale,
            self._before_update,
            judge.accepts,
        )
        self._checkpoints.note_step(result.seconds)
        bad = judge.act(step, result.loss, result.grad_norm, (state.num_samples, state.num_samples + size))
        result = result._replace(bad=bad, rewards=self._rewards(batch))
        state.step, state.num_samples = step, state.num_samples + size
        if self._state_check.after_step(step):
            self._pipe.refresh()
        timeline = self._pipe.timeline()
        asked = self._stop.name
        return self._reporter.report(step, result, data_seconds, batch, timeline, is_trial, asked), timeline

    def _rewards(self, batch: TokenBatch) -> dict[str, float] | None:
        """Returns the mean rewards of the last step, if it was on preferences. Collective."""
        section = self._config.preference
        if section is None or batch.sequence_values is None:
            return None
        return mean_rewards(reward_sums(self._pipe, batch.sequence_values, section))

    def _before_update(self) -> None:
        self._state_check.before_update()
        self._checkpoints.keep()

    def _mine(self, first: int, size: int) -> TokenBatch:
        """Returns this replica's part of a batch; the batch after it can be planned for."""
        part, after = (self._pipe.replica, self._pipe.num_replicas), first + size
        if self._sequences.packing == "none":
            for each in ((first, size), (after, self._batch_size.at(self._sequences, after))):
                self._pipe.prepare(self._sequences.lengths(*each, *part))
        return self._sequences.batch(first, size, *part)
