"""The training loop of one rank: steps, validations, checkpoints and exports."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from typing import Any

from slipstream.errors import RankFailedError, StoppedRunError
from slipstream.launch import StopRequest
from slipstream.number_format import PRECISIONS
from slipstream.timeline import Timeline
from slipstream.train.bad_steps import BadSteps
from slipstream.train.configured_pipeline import make_pipeline
from slipstream.train.corruption import StateCheck
from slipstream.train.data import BatchSize, TokenBatch, TokenisedText, load_texts
from slipstream.train.elastic_mesh import described_change, with_mesh_of
from slipstream.train.loss_scale import LossScale
from slipstream.train.metrics import Reporter, StepRecord
from slipstream.train.optimizers import make_optimizer, make_scheduler
from slipstream.train.preferences import mean_rewards, reward_sums, with_reference_point
from slipstream.train.preflight import simulated_ratio
from slipstream.train.recorded_plan import is_counted_open, record_plan, start_settings
from slipstream.train.reference import load_with_reference
from slipstream.train.run_checkpoints import CheckpointedParts, RunCheckpoints
from slipstream.train.run_context import RunContext
from slipstream.train.run_folder import read_lines
from slipstream.train.run_results import (
    draw_last_step,
    export_model,
    has_room,
    sample_in_training,
    write_sample,
)
from slipstream.train.run_state import RunState
from slipstream.train.training_step import Evaluator, count_steps, train_step
from slipstream.train.validation import Validator
from slipstream.units import numbers_text, plural
from slipstream.watchdog import watchdog_paused

_RECENT = 20  # steps in the reported median
_COMPILES = "the first search of an installation compiles its code, for half a minute or more"


class Trainer:
    """One rank of a run whose inputs are in the run folder; every rank makes one and calls `run`."""

    def __init__(self, run: RunContext, stop: StopRequest) -> None:
        """Builds this rank's part of the model, and restores the checkpoint that the run resumes from, if any.

        Collective.
        """
        self._run = run
        self._stop = stop
        config = run.config
        training = run.config.training
        # 1. The run's beginning, and its training data.
        self._checkpoints = RunCheckpoints(run, written=lambda record: self._reporter.write(record))
        saved = self._checkpoints.find_start()
        self._sequences = run.sequences
        self._batch_size = BatchSize.of(training)
        # 2. The model: as the run planned it before, as it plans now, or as it is given.
        settings = start_settings(run, self._sequences, saved)
        parts = "by counted operations" if is_counted_open(config) else "what the model's parts cost, then the search"
        what = f"planning: {parts}; {_COMPILES}"
        with run.progress.waiting(what) if "seq_len" in settings else nullcontext():
            self._pipe = make_pipeline(config, run.device, run.model, **settings)
        if line := self._pipe.how_planned:
            run.progress.say(line)
        plan = record_plan(run, self._pipe, self._sequences)
        by_step = self._sequences.packing == "none"
        # 3. Validation data, and the optimizer.
        self._validator = Validator(run, self._pipe, self._load_held_out(saved is not None))
        self._num_steps = count_steps(training, self._sequences)
        optimizer = make_optimizer(self._pipe.named_parameters(), config.optimizer)
        self._scheduler = make_scheduler(optimizer, config.optimizer, self._num_steps)
        self._loss_scale = LossScale() if PRECISIONS[training.precision].scales_loss else LossScale.fixed()
        # 4. Checkpoints of all that.
        rates = None if not by_step else settings.get("rates") if plan is None else self._pipe.rates
        self._state = RunState(run, self._pipe, self._scheduler, self._loss_scale, self._sequences, rates)
        has_copies = run.world.size > self._pipe.axes["pp"].size
        self._bad_steps = BadSteps(run, self._pipe.find_non_finite, has_copies)
        self._parts = CheckpointedParts(self._pipe, optimizer, self._state, self._bad_steps, self._validator.history)
        self._state_check = StateCheck(run, self._parts.shards)
        if saved is not None:
            self._checkpoints.resume(saved, self._parts)
            if self._pipe.leads:
                self._say_what_changed(saved.facts)
        # 5. Reports on the steps.
        self._reporter = Reporter(
            run, self._pipe, self._mean_sequences(), self._state.step, plan=None if by_step else plan
        )

    def run(self) -> None:
        """Trains to the end, then draws the last step, exports the model and lets it write. Collective."""
        run = self._run
        pipe = self._pipe
        timeline = None
        state = self._state
        if self._is_tuning:
            run.progress.say(
                "auto plans orders or slices at the first step, or once a few steps were timed where costs can't be "
                f"measured; {_COMPILES}"
            )
        # 1. Whether the run has been asked to stop before it began.
        self._stop.begin()
        if asked := next(filter(None, run.world.gather(self._stop.name)), ""):
            raise StoppedRunError(f"{asked} ended the run before its first step; there is nothing new to save")
        # 2. The steps, each with its validation, checkpoint and export where they are due.
        failures_noted = self._checkpoints.failures_noted(self._parts)
        with run.progress.training(self._num_steps, state.step) as show, failures_noted:
            # An earlier start was asked to stop before it did what was due after its last step.
            if state.step and self._validator.is_due(state.step, self._num_steps):
                self._do_what_is_due(state.step)
            for step in self._steps_left():
                was_tuning = self._is_tuning
                record, timeline = self._train_step(step)
                show(step, record.texts())
                if was_tuning and not self._is_tuning:
                    slices = pipe.slices(run.config.training.seq_len)
                    run.progress.say(f"step {step}: auto has settled on slices of {numbers_text(slices)} tokens")
                if self._reporter.asked_to_stop:
                    self._save_and_stop(step)
                self._do_what_is_due(step)
            self._checkpoints.close()
        # 3. Closing lines on all of them.
        if numbers := self._bad_steps.steps:
            run.progress.warn(f"{plural(len(numbers), 'step')} did not update: {numbers_text(numbers)}")
        if best := self._validator.history.describe_best():
            run.progress.say_result(best)
        self._reporter.close()
        # 4. The run's results.
        with watchdog_paused("drawing the last step"), run.writes.of("the last step's timeline"):
            draw_last_step(run, pipe, timeline)
        try:
            self._load_what_is_exported()
            export_model(run, pipe, run.folder.model)
        except OSError as error:
            raise RankFailedError(
                f"the trained model can't be written to {run.folder.model}: {error}. Make room, and type the same "
                "command with --checkpoint.resume=latest"
            ) from error
        with watchdog_paused("writing a sample"):
            write_sample(run, pipe)
        if not self._checkpoints.has_one_at_the_end:
            run.progress.say_result(
                "with checkpoint.every=0 there is no checkpoint of the last step: this run can't be resumed"
            )

    def _say_what_changed(self, facts: Mapping[str, Any]) -> None:
        """Reports the mesh on which the run goes on, if it is another one, and how long its steps will take."""
        run = self._run
        config = self._run.config
        pipe = self._pipe
        mesh = {axis: group.size for axis, group in pipe.axes.items()}
        if facts["mesh"] == mesh:
            return
        took = [line["step_seconds"] for line in read_lines(run.folder.metrics) if "step_seconds" in line][-_RECENT:]
        ratio = None
        if took and config.training.batch_tokens is None:
            with watchdog_paused("simulating steps of the meshes"):
                ratio = simulated_ratio(with_mesh_of(config, facts), config, pipe.config)
        before = f"{statistics.median(took):.3g}, measured" if took else "unknown"
        now = "unknown" if ratio is None else f"{ratio * statistics.median(took):.3g}, predicted"
        slices = pipe.slices(config.training.seq_len) if self._sequences.packing == "fixed" else config.pipeline.slices
        run.progress.say(
            f"the mesh is another one than before:{described_change(config, facts, mesh, slices, (before, now))}"
        )

    def _load_held_out(self, resumes: bool) -> list[TokenisedText]:
        """Returns the held-out text; of preferences with the reference, which the training text then has, too.
        Collective."""
        config = self._run.config
        if config.preference is None:
            return load_texts(self._run.folder.inputs, "validation")
        with watchdog_paused("computing the reference"):
            texts = load_with_reference(self._run, self._pipe, resumes)
        self._sequences.take(texts["train"])
        return texts["validation"]

    def _mean_sequences(self) -> tuple[float, float]:
        """Returns the mean tokens of the sequences that the model sees, and the mean number of them in a step."""
        sequences = self._sequences
        group_size = self._sequences.group_size
        return sequences.mean_length / group_size, self._batch_size.mean(sequences) * group_size

    def _steps_left(self) -> Iterator[int]:
        """Yields the numbers of the steps to train, until validations don't improve any more."""
        for step in range(self._state.step + 1, self._num_steps + 1):
            if self._validator.history.is_out_of_patience:
                break
            yield step
        if self._validator.history.is_out_of_patience:
            self._run.progress.say_result(
                f"the run ends after step {self._state.step}: {self._validator.history.describe_end()}"
            )

    def _load_what_is_exported(self) -> None:
        """Loads the best checkpoint where that is to be exported, and says which it is. Collective."""
        history = self._validator.history
        if self._run.config.training.export == "last" or (history.best and history.best.step == self._state.step):
            return
        step = self._checkpoints.load_best(self._parts)
        self._run.progress.say_result(f"the model of step {step}, the best that is saved, is exported")

    @property
    def _is_tuning(self) -> bool:
        # Where lengths differ each step has its own plan.
        return self._pipe.is_tuning and self._run.config.data.packing == "fixed"

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
        where = self._checkpoints.stored.saved_text(step)
        raise StoppedRunError(f"{self._reporter.asked_to_stop} ended the run after step {step}; {where}")

    def _do_what_is_due(self, step: int) -> None:
        training = self._run.config.training
        section = self._run.config.checkpoint
        is_best = False
        if self._validator.is_due(step, self._num_steps):
            with watchdog_paused("validating"):
                record, is_best = self._validator.validate(step)
            self._reporter.write(record)
        last = step == self._num_steps or self._validator.history.is_out_of_patience
        is_wanted = (is_best and section.keep_best) or (last and self._checkpoints.has_one_at_the_end)
        if self._checkpoints.interval.is_due(step) or is_wanted:
            began = time.perf_counter()
            self._save(step)
            self._checkpoints.note_save(step, time.perf_counter() - began)
        if (every := self._run.config.sample.every) and step % every == 0 and not last:
            with watchdog_paused("writing a sample"):
                self._reporter.write(sample_in_training(self._run, self._pipe, step))
        if training.export_every and step % training.export_every == 0 and not last:
            self._export_between(step)

    def _export_between(self, step: int) -> None:
        """Exports the model, unless the disk has no room for that and for the next two checkpoints. Collective."""
        folder = self._run.folder.model_at(step)
        if has_room(self._run, folder, 3 * self._checkpoints.stored.newest_bytes()):
            with self._run.writes.of(folder.name):
                export_model(self._run, self._pipe, folder)

    def _train_step(self, step: int) -> tuple[StepRecord, Timeline]:
        """Takes one step of the optimizer; returns its record and its timeline. Collective."""
        run = self._run
        state = self._state
        is_trial = self._is_tuning
        # 1. The batch.
        began = time.perf_counter()
        size = self._batch_size.at(self._sequences, state.num_samples)
        batch = self._mine(state.num_samples, size)
        preference = run.config.preference
        if preference is not None and preference.is_rated:
            batch = with_reference_point(Evaluator(self._pipe, run.config), batch)
        data_seconds = time.perf_counter() - began
        # 2. Forward, backward and update, unless the step is bad.
        result = train_step(
            self._pipe,
            self._scheduler,
            batch,
            run.config,
            run.device,
            self._loss_scale,
            self._before_update,
            self._bad_steps.accepts,
        )
        self._checkpoints.interval.note_step(result.seconds)
        # 3. The remedy for a bad step, and the run's place after it.
        samples = state.num_samples, state.num_samples + size
        bad = self._bad_steps.act(step, result.loss, result.grad_norm, samples, self._roll_back)
        result = result._replace(bad=bad, rewards=self._rewards(batch))
        state.step = step
        state.num_samples = state.num_samples + size
        if self._state_check.after_step(step):
            self._pipe.refresh()
        # 4. Its record.
        timeline = self._pipe.timeline()
        asked = self._stop.name
        return self._reporter.report(step, result, data_seconds, batch, timeline, is_trial, asked), timeline

    def _rewards(self, batch: TokenBatch) -> dict[str, float] | None:
        """Returns the mean rewards of the last step, if it was on preferences. Collective."""
        section = self._run.config.preference
        if section is None or batch.sequence_values is None:
            return None
        return mean_rewards(reward_sums(self._pipe, batch.sequence_values, section))

    def _before_update(self) -> None:
        self._state_check.before_update()
        self._checkpoints.keep()

    def _mine(self, first: int, size: int) -> TokenBatch:
        """Returns this replica's part of a batch; the batch after it can be planned for."""
        replica = self._pipe.replica
        num_replicas = self._pipe.num_replicas
        if self._sequences.packing == "none":
            after = first + size
            after_size = self._batch_size.at(self._sequences, after)
            self._pipe.prepare(self._sequences.lengths(first, size, replica, num_replicas))
            self._pipe.prepare(self._sequences.lengths(after, after_size, replica, num_replicas))
        return self._sequences.batch(first, size, replica, num_replicas)
