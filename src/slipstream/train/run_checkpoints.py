"""The checkpoints of a run: when one is due, its contents, and from which the run goes on."""

from __future__ import annotations

import json
import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple

from torch.optim import Optimizer

from slipstream.checkpoint import Checkpoints, SavedCheckpoint, TensorShard
from slipstream.errors import NonFiniteError, RankFailedError
from slipstream.own_files import OwnFolder
from slipstream.parallel import RankGroup
from slipstream.pipeline import Pipeline, describe_model
from slipstream.train.bad_steps import BadSteps
from slipstream.train.metrics import SaveRecord
from slipstream.train.run_context import RunContext
from slipstream.train.run_folder import read_lines
from slipstream.train.run_state import RunState, load_run, run_shards
from slipstream.train.validation import LossHistory
from slipstream.watchdog import watchdog_paused


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
        """Returns the facts that are kept next to the tensors, as JSON can hold them."""
        judged = {"values_of_steps": self.bad_steps.facts(), "validation": self.history.facts()}
        return self.state.facts() | judged

    def load(self, checkpoints: Checkpoints, saved: SavedCheckpoint) -> None:
        """Loads the tensors and goes to the step of a checkpoint; judgements since then stay. Collective."""
        load_run(checkpoints, saved, self.pipe, self.optimizer)
        self.state.restore(saved.facts)


class RunCheckpoints:
    """Saves and loads the checkpoints in the folder of a run. Every rank makes one. Making one is collective.

    `written` gets, on rank 0, the record of each checkpoint that is complete.

    Attributes:
        stored: the checkpoints themselves.
        interval: says when one is due.
        has_one_at_the_end: whether one is due after the last step.
    """

    def __init__(self, run: RunContext, written: Callable[[SaveRecord], None]) -> None:
        section = run.config.checkpoint
        folder = run.folder
        self._run = run
        self._wanted = section.resume
        self._written = written
        self.stored = Checkpoints(
            folder.checkpoints,
            run.world,
            section.keep,
            section.keep_every,
            run.progress.warn,
            self._note_written,
            work=folder.work,
        )
        self.interval = SaveInterval(section.every, section.failures_per_day, run.world)
        self.has_one_at_the_end = self.interval.has_one_at_the_end or section.keep_best
        # Also where none is to be saved, as a run that is asked to stop saves one
        if run.world.rank == 0:
            folder.listed.add_folder(folder.checkpoints)
        if self.has_one_at_the_end:
            self.stored.prepare()
        self._keep_seconds = 0.0  # longest wait of a step for a save, in seconds
        self._failures = FailureLog(folder.failures)

    def find_start(self) -> SavedCheckpoint | None:
        """Returns the checkpoint to resume from, verified, if any. Collective."""
        with watchdog_paused("verifying checkpoints", uses_disk=True):
            before = self._run.world.run_on_leader(self._failures.earlier_than) if self._wanted == "last-good" else None
            if before is not None:
                self._run.progress.warn(
                    f"the same step has failed twice: only a checkpoint before step {before} is good"
                )
            saved = None if self._wanted == "no" else self.stored.find(self._wanted, before)
        if saved is None and self._wanted != "no":
            self._run.progress.say(f"checkpoint.resume={self._wanted}: there is no checkpoint, so step 1 is the first")
        return saved

    def resume(self, saved: SavedCheckpoint, parts: CheckpointedParts) -> None:
        """Goes on from the checkpoint of `find_start`. Collective."""
        saved.check_model(describe_model(parts.pipe.config))
        with watchdog_paused("loading a checkpoint", uses_disk=True):
            parts.load(self.stored, saved)
        parts.bad_steps.restore(saved.facts["values_of_steps"])
        parts.history.restore(saved.facts["validation"])
        self._run.progress.say(f"resumed after step {saved.step}, from {saved.folder}")

    def roll_back(self, parts: CheckpointedParts) -> int | None:
        """Loads the last good checkpoint and returns its step; None where there is none yet. The count of steps and the
        place in the data stay, so that the batches since are passed over. Collective."""
        self.stored.wait()
        saved = self.stored.find("last-good")
        if saved is None:
            return None
        state = parts.state
        step = state.step
        num_samples = state.num_samples
        parts.load(self.stored, saved)
        state.step = step
        state.num_samples = num_samples
        return saved.step

    def load_best(self, parts: CheckpointedParts) -> int:
        """Loads the checkpoint of the best validation, and returns its step. Collective."""
        with watchdog_paused("loading a checkpoint", uses_disk=True):
            saved = self.stored.find("best")
            if saved is None:
                raise RankFailedError("no checkpoint could be saved, so that there is no best model to export")
            parts.load(self.stored, saved)
        return saved.step

    def save(self, step: int, parts: CheckpointedParts) -> None:
        """Begins to save, as `Checkpoints.save`. Collective."""
        folder = self._run.folder
        # Someone has removed the list.
        if self._run.world.rank == 0 and not folder.listed.has(folder.checkpoints):
            with self._run.writes.of("the list of the run's files"):
                folder.listed.add_folder(folder.checkpoints)
        with watchdog_paused("saving", uses_disk=True):
            self.stored.save(step, list(parts.shards()), parts.facts())

    def keep(self) -> None:
        """Lets the tensors change from now on. Not collective."""
        began = time.perf_counter()
        self.stored.keep()
        self._keep_seconds = max(self._keep_seconds, time.perf_counter() - began)

    def close(self) -> None:
        """Waits for the last save. Collective."""
        with watchdog_paused("saving", uses_disk=True):
            self.stored.close()

    def note_save(self, step: int, seconds: float) -> None:
        """Notes for how long training stood still where it began to save after a step. Collective."""
        self.interval.note_save(step, seconds + self._keep_seconds)

    @contextmanager
    def failures_noted(self, parts: CheckpointedParts) -> Iterator[None]:
        """Adds to the list of failures that numbers aren't finite."""
        started_after = parts.state.step
        try:
            yield
        except NonFiniteError:
            if parts.pipe.leads:
                failures = self._run.folder.failures
                with self._run.writes.of(failures.name):
                    self._run.folder.listed.add(failures)
                    self._failures.add(parts.state.step + 1, started_after)
            raise

    def _note_written(self, *figures: Any) -> None:
        record = SaveRecord(*figures)
        self.interval.note_written(record.save_seconds)
        self._written(record)


class FailureLog:
    """The file at `path`, with a line for each failure by numbers that aren't finite. Used on rank 0."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def add(self, step: int, started_after: int) -> None:
        """Appends that a run which began after the step `started_after` has failed in `step`."""
        with OwnFolder(self._path.parent).open(self._path, "a") as file:
            file.write(json.dumps({"step": step, "started_after": started_after}) + "\n")

    def earlier_than(self) -> int | None:
        """Returns the step before which a checkpoint must be to lead elsewhere: that from which the last failure came,
        where it was the second in the same step or more; None where it was the first."""
        lines = [*read_lines(self._path)]
        is_repeated = sum(line["step"] == lines[-1]["step"] for line in lines) > 1
        return int(lines[-1]["started_after"]) if is_repeated else None


_FIRST = 10  # the step of the first checkpoint, before anything is measured
_PATIENCE = 600.0  # seconds of training before the first checkpoint, if no interval is given
_REMEMBERED = 32  # steps and saves in the median of their seconds
_SECONDS_OF_A_DAY = 86400.0


def best_interval(save_seconds: float, seconds_between_failures: float) -> float:
    """Returns the seconds of training between two saves that lose the least time.

    Daly 2006, "A higher order estimate of the optimum checkpoint interval for restart dumps", equation 37, whose first
    term is Young's sqrt(2 * save_seconds * seconds_between_failures).
    """
    if save_seconds >= 2 * seconds_between_failures:
        return seconds_between_failures
    ratio = save_seconds / (2 * seconds_between_failures)
    first = math.sqrt(2 * save_seconds * seconds_between_failures)
    return first * (1 + math.sqrt(ratio) / 3 + ratio / 9) - save_seconds


class SaveInterval:
    """Says after which steps a checkpoint is due. Every rank makes one and calls its methods alike.

    Args:
        every: steps, 0 for never, or "auto": from the seconds that training stands still for a save, but never so often
            that a save would wait for the one before. None: as "auto", of a run that has trained for ten minutes.
        failures_per_day: that are expected of the whole run.
        world: all ranks, which follow the first.
    """

    def __init__(self, every: int | Literal["auto"] | None, failures_per_day: float, world: RankGroup) -> None:
        self._every = every
        self._world = world
        self._between_failures = _SECONDS_OF_A_DAY / failures_per_day
        self._steps, self._costs, self._writes = (deque[float](maxlen=_REMEMBERED) for _ in range(3))
        self._next = 0
        self._trained = 0.0

    def note_step(self, seconds: float) -> None:
        """Notes how long a step took."""
        self._steps.append(seconds)
        self._trained += seconds

    def note_written(self, seconds: float) -> None:
        """Notes how long it took until a checkpoint was complete, while training went on."""
        self._writes.append(seconds)

    def note_save(self, step: int, cost: float) -> None:
        """Notes for how many seconds training stood still for the last save, and decides about the next. Collective
        where the interval is found here."""
        self._costs.append(cost)
        if not isinstance(self._every, int):
            self._next = step + int(self._world.gather(self._best_steps())[0])

    def is_due(self, step: int) -> bool:
        """Returns whether a checkpoint is due after a step. Collective until the first one, where nothing is said."""
        if self._every is None and not self._next:
            return step % _FIRST == 0 and bool(self._world.gather(self._trained >= _PATIENCE)[0])
        if not isinstance(self._every, int):
            return step >= (self._next or _FIRST)
        return self._every > 0 and step % self._every == 0

    @property
    def has_one_at_the_end(self) -> bool:
        """Whether a checkpoint is due after the last step too: unless none are wanted."""
        return self._every != 0

    def _best_steps(self) -> int:
        seconds = best_interval(statistics.median(self._costs), self._between_failures)
        seconds = max(seconds, statistics.median(self._writes) if self._writes else 0.0)
        return max(1, round(seconds / statistics.median(self._steps))) if self._steps else _FIRST
