"""The checkpoints of a run: when one is due, what is in it, and from which the run goes on."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch.optim import Optimizer

from slipstream.checkpoint import Checkpoints, SavedCheckpoint, SaveInterval, TensorShard
from slipstream.errors import NonFiniteError, RankFailedError
from slipstream.launch import Progress
from slipstream.parallel import RankGroup
from slipstream.pipeline import Pipeline
from slipstream.pipeline.saving import describe_model
from slipstream.training.bad_steps import BadSteps
from slipstream.training.config import Config
from slipstream.training.metrics import DiskTrouble, SaveRecord
from slipstream.training.resuming import RunState, load_run, run_shards
from slipstream.training.run_folder import RunFolder
from slipstream.training.saving.failure_log import FailureLog
from slipstream.training.validation import LossHistory
from slipstream.watchdog import counted_off


class CheckpointedParts(NamedTuple):
    """The parts of a run that are in its checkpoints."""

    pipe: Pipeline
    optimizer: Optimizer
    state: RunState
    bad_steps: BadSteps
    history: LossHistory

    def shards(self) -> Iterator[TensorShard]:
        """Yields this rank's tensors, as `run_shards`."""
        return run_shards(self.pipe, self.optimizer)

    def facts(self) -> dict[str, Any]:
        """Returns what is kept next to the tensors, as JSON can hold it."""
        judged = {"values_of_steps": self.bad_steps.facts(), "validation": self.history.facts()}
        return self.state.facts() | judged

    def load(self, checkpoints: Checkpoints, saved: SavedCheckpoint) -> None:
        """Loads the tensors and goes to the step of a checkpoint; what was judged since stays. Collective."""
        load_run(checkpoints, saved, self.pipe, self.optimizer)
        self.state.restore(saved.facts)


class RunCheckpoints:
    """Saves and loads the checkpoints in the folder of a run. Every rank makes one. Making one is collective.

    Args:
        config: has the sections `checkpoint` and `training`.
        folder: the run's.
        world: all ranks.
        progress: gets lines about what is found and loaded.
        written: gets, on rank 0, the record of each checkpoint that is complete.
    """

    def __init__(
        self,
        config: Config,
        folder: RunFolder,
        world: RankGroup,
        progress: Progress,
        written: Callable[[SaveRecord], None],
    ) -> None:
        section = config.checkpoint
        self._wanted, self._folder, self._world = section.resume, folder, world
        self._progress, self._written = progress, written
        self._checkpoints = Checkpoints(
            folder.checkpoints,
            world,
            section.keep,
            section.keep_every,
            progress.warn,
            self._note_written,
            work=folder.work,
        )
        if world.rank == 0:  # also where none is to be saved: a run that is asked to stop saves one
            folder.listed.add_folder(folder.checkpoints)
        if section.every or section.keep_best:
            self._checkpoints.prepare()
        self._interval = SaveInterval(section.every, section.failures_per_day, world)
        self._keep_seconds = 0.0  # the longest that a step has waited for what was being saved
        self._failures = FailureLog(folder.failures)

    def find_start(self) -> SavedCheckpoint | None:
        """Returns the checkpoint to resume from, verified, if any. Collective."""
        with counted_off("verifying checkpoints", uses_disk=True):
            if self._wanted != "last-good":
                return None if self._wanted == "no" else self._checkpoints.find(self._wanted)
            before = self._world.decided(self._failures.earlier_than)
            if before is not None:
                self._progress.warn(f"the same step has failed twice: only a checkpoint before step {before} is good")
            return self._checkpoints.find(self._wanted, before)

    def resume(self, saved: SavedCheckpoint, parts: CheckpointedParts) -> None:
        """Goes on from what `find_start` returned. Collective."""
        saved.check_model(describe_model(parts.pipe.config))
        with counted_off("loading a checkpoint", uses_disk=True):
            parts.load(self._checkpoints, saved)
        parts.bad_steps.restore(saved.facts.get("values_of_steps", {}))
        parts.history.restore(saved.facts.get("validation", {}), saved.step)
        self._progress.say(f"resumed after step {saved.step}, from {saved.folder}")

    def roll_back(self, parts: CheckpointedParts) -> int | None:
        """Loads the last good checkpoint and returns its step; None where there is none yet. The count of steps and the
        place in the data stay, so that the batches since are passed over. Collective."""
        self._checkpoints.wait()
        saved = self._checkpoints.find("last-good")
        if saved is None:
            return None
        state = parts.state
        step, num_samples = state.step, state.num_samples
        parts.load(self._checkpoints, saved)
        state.step, state.num_samples = step, num_samples
        return saved.step

    def load_best(self, parts: CheckpointedParts) -> int:
        """Loads the checkpoint of the best validation, and returns its step. Collective."""
        with counted_off("loading a checkpoint", uses_disk=True):
            saved = self._checkpoints.find("best")
            if saved is None:
                raise RankFailedError("no checkpoint could be saved, so that there is no best model to export")
            parts.load(self._checkpoints, saved)
        return saved.step

    def is_due(self, step: int) -> bool:
        """Returns whether `checkpoint.every` asks for a checkpoint after a step."""
        return self._interval.is_due(step)

    def save(self, step: int, parts: CheckpointedParts) -> None:
        """Begins to save, as `Checkpoints.save`. Collective."""
        with counted_off("saving", uses_disk=True):
            self._checkpoints.save(step, list(parts.shards()), parts.facts())

    def keep(self) -> None:
        """Lets the tensors change from now on. Not collective."""
        began = time.perf_counter()
        self._checkpoints.keep()
        self._keep_seconds = max(self._keep_seconds, time.perf_counter() - began)

    def close(self) -> None:
        """Waits for the last save. Collective."""
        with counted_off("saving", uses_disk=True):
            self._checkpoints.close()

    def note_step(self, seconds: float) -> None:
        """Notes how long a step took, by which the interval of `checkpoint.every=auto` is found."""
        self._interval.note_step(seconds)

    def note_save(self, step: int, seconds: float) -> None:
        """Notes for how long training stood still where it began to save after a step. Collective."""
        self._interval.note_save(step, seconds + self._keep_seconds)

    def newest_bytes(self) -> int:
        """Returns the size of the newest complete checkpoint, 0 where there is none. Collective."""
        return self._checkpoints.newest_bytes()

    def saved_text(self, step: int) -> str:
        """Returns whether the checkpoint of a step is there, and how to go on from it. Collective."""
        return self._checkpoints.saved_text(step)

    @contextmanager
    def failures_noted(self, parts: CheckpointedParts) -> Iterator[None]:
        """Adds to the list of failures that numbers aren't finite."""
        started_after = parts.state.step
        try:
            yield
        except NonFiniteError:
            if parts.pipe.leads:
                with DiskTrouble(self._progress.warn).tolerated(self._folder.failures.name):
                    self._folder.listed.add(self._folder.failures)
                    self._failures.add(parts.state.step + 1, started_after)
            raise

    def _note_written(self, *figures: Any) -> None:
        record = SaveRecord(*figures)
        self._interval.note_written(record.save_seconds)
        self._written(record)
