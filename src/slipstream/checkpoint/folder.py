"""The folder of a run's checkpoints: their names, which are complete, which is the best, and which are removed.

checkpoints/
  step-00000012/            a checkpoint; the folder's name shows that it is complete
    manifest.json             files, tensors and facts
    rank-00000.safetensors    the file of each rank
  step-00000016.part/       a checkpoint that is being written, or was when the run ended
  step-00000020.aside/      one that is set aside, as the run was resumed from an earlier step since

The best checkpoint of a run: that of its lowest validation loss, among those that are there.

A run that keeps it lists in the facts of every checkpoint, under `validation`, each validation that was the best so
far. Of these the newest that was saved is the best: a save that fails doesn't cost the one before.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from slipstream.checkpoint.files import DamagedError, sync_folder
from slipstream.checkpoint.manifest import Manifest
from slipstream.errors import SlipstreamError
from slipstream.own_files import OwnFolder

_COMPLETE = re.compile(r"step-(\d{8,})")
_PART = re.compile(r"step-.*\.part")
MOST_ASIDE = 4  # replaced or damaged checkpoints kept, which may still tell something
_OWN = re.compile(r"step-\d{8,}(\.part|\.aside(-\d+)?)?|trial\.part")


def step_named(name: str) -> int | None:
    """Returns the step of which a folder of this name has the checkpoint; None for another name."""
    match = _COMPLETE.fullmatch(name)
    return None if match is None else int(match[1])


class CheckpointFolder:
    """The folder at `path`, in which the newest `keep` stay and, unless it is 0, those whose step `keep_every` divides.

    Its methods raise OSError where the disk fails. Where they have a folder for their `work`, on the same disk, they
    write there, and change nothing in the folder at `path` but by a rename from or to it: who moves the work away keeps
    them from publishing, setting aside and removing anything.
    """

    def __init__(self, path: str | Path, keep: int = 2, keep_every: int = 0, work: Path | None = None) -> None:
        if keep < 1 or keep_every < 0:
            raise SlipstreamError(f"{keep=}, {keep_every=}: give keep from 1, and keep_every from 0 (none)")
        self.path = Path(path)
        self._keep = keep
        self._keep_every = keep_every
        self._work, self._owns_work = (self.path, False) if work is None else (work, True)
        self._own = OwnFolder(Path(os.path.commonpath([self.path, self._work])))

    def complete(self, step: int) -> Path:
        """Returns where the checkpoint of a step is when it is complete."""
        return self.path / f"step-{step:08d}"

    def part(self, step: int) -> Path:
        """Returns where the checkpoint of a step is while it is written."""
        return self._work / f"step-{step:08d}.part"

    def steps(self) -> list[int]:
        """Returns the steps of the complete checkpoints, the newest first."""
        names = os.listdir(self.path) if self.path.is_dir() else []
        return sorted((step for name in names if (step := step_named(name)) is not None), reverse=True)

    def find_other(self) -> Path | None:
        """Returns something in the folder that isn't a checkpoint, complete or not; None where there is nothing."""
        names = sorted(os.listdir(self.path)) if self.path.is_dir() else []
        return next((self.path / name for name in names if not (_OWN.fullmatch(name) or name.startswith("."))), None)

    def size(self, step: int) -> int:
        """Returns the bytes of the checkpoint of a step, 0 where it has gone."""
        try:
            return sum(file.stat().st_size for file in self.complete(step).iterdir())
        except FileNotFoundError:
            return 0

    def prepare(self) -> None:
        """Makes the folder, checks that it can be written, and removes incomplete checkpoints."""
        self.path.mkdir(parents=True, exist_ok=True)
        for folder in dict.fromkeys([self._work, self.path]):
            for name in self._own.names(folder):
                if _PART.fullmatch(name):
                    self._remove(folder / name)
        trial = self._work / "trial.part"
        trial.mkdir(exist_ok=True)
        self._own.remove_empty(self._own.move(trial, self.path / trial.name))

    def begin(self, step: int) -> None:
        """Makes an empty folder for the checkpoint of a step."""
        self.discard(step)
        self.make_part(step)

    def make_part(self, step: int) -> None:
        """Makes the folder for the checkpoint of a step, unless it is there."""
        self.part(step).mkdir(parents=not self._owns_work, exist_ok=True)

    def discard(self, step: int) -> None:
        """Removes the incomplete checkpoint of a step, if there is one."""
        # A file of that name wasn't left by a save.
        if self.part(step).is_dir():
            self._own.remove(self.part(step))

    def commit(self, step: int) -> None:
        """Turns the written files into the checkpoint of a step, in one atomic rename.

        Checkpoints of this step and later ones were saved before the run was resumed from an earlier one: they are set
        aside first, so that the newest checkpoint is always the one to resume from.
        """
        sync_folder(self.part(step))
        self.path.mkdir(parents=True, exist_ok=True)
        for later in self.steps():
            if later >= step:
                name = f"{self.complete(later).name}.aside"
                # the earlier ones may have been removed, so the last number counts
                taken = [int(path.name.rpartition("aside")[2][1:] or 1) for path in self.path.glob(f"{name}*")]
                aside = self._work / (f"{name}-{max(taken) + 1}" if taken else name)
                self._own.move(self._own.move(self.complete(later), aside), self.path / aside.name)
        self._own.move(self.part(step), self.complete(step))
        sync_folder(self.path)

    def retire(self, best: int | None = None) -> None:
        """Removes all checkpoints but those that are to stay, and of those set aside all but the last four.

        That of the step `best` stays, and doesn't count as one of the newest.
        """
        aside = sorted(self.path.glob("step-*.aside*"), key=lambda folder: folder.lstat().st_mtime)
        for folder in aside[:-MOST_ASIDE]:
            self._remove(folder)
        for step in [step for step in self.steps() if step != best][self._keep :]:
            if not self._keep_every or step % self._keep_every:
                self._remove(self.complete(step))

    def _remove(self, folder: Path) -> None:
        """Removes a folder, which no longer counts as a checkpoint from the first moment on."""
        self._own.remove(self._own.move(folder, self._work / f"{folder.name.removesuffix('.part')}.part"))


class Improvement(NamedTuple):
    """A validation after a step whose loss was below that of all before."""

    step: int
    loss: float


def improvements_of(facts: Mapping[str, Any]) -> list[Improvement]:
    """Returns the improvements whose checkpoints a run keeps, the newest last; none where it doesn't."""
    return [Improvement(*fields) for fields in facts.get("validation", {}).get("improvements", ())]


def newest_saved(folder: CheckpointFolder, improvements: Sequence[Improvement]) -> Improvement | None:
    """Returns the newest of the improvements that has a complete checkpoint."""
    steps = folder.steps()
    return next((item for item in reversed(improvements) if item.step in steps and _may_be_of(folder, item)), None)


def find_best(folder: CheckpointFolder) -> Improvement | None:
    """Returns the best checkpoint by the newest readable manifest; None where the run keeps none."""
    facts = next((facts for step in folder.steps() if (facts := _facts(folder, step)) is not None), {})
    return newest_saved(folder, improvements_of(facts))


def require_best(folder: CheckpointFolder) -> Improvement:
    """Returns the best checkpoint. Raises SlipstreamError, with the setting to type, where there is none."""
    best = find_best(folder)
    if best is None:
        there = ", ".join(map(str, folder.steps())) or "none"
        raise SlipstreamError(
            f"there is no best checkpoint in {folder.path}: runs with checkpoint.keep_best: true keep that of their "
            f"lowest validation loss. Take the newest, or one of the steps that are there ({there})"
        )
    return best


def _may_be_of(folder: CheckpointFolder, improvement: Improvement) -> bool:
    """Returns whether the checkpoint of this step is this improvement's, and not one that a run left there which was
    resumed from an earlier step since. A damaged one may be: whoever verifies it says so."""
    facts = _facts(folder, improvement.step)
    return facts is None or improvements_of(facts)[-1:] == [improvement]


def _facts(folder: CheckpointFolder, step: int) -> dict[str, Any] | None:
    """Returns the facts of a checkpoint; None where its manifest can't be read."""
    try:
        return Manifest.read(folder.complete(step)).facts
    except DamagedError:
        return None
