"""The checkpoints of a run on the disk: their names, which of them are whole, which stay.

checkpoints/
  step-00000012/            a checkpoint; the folder's name is the sign that all of it is there
    manifest.json             files, tensors and facts
    rank-00000.safetensors    what each rank wrote
  step-00000016.part/       one that is being written, or was when the run ended
  step-00000020.aside/      one of a run that went on from an earlier step since: kept, but never found
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

from slipstream.training.checkpoint.verified_files import sync_folder

_WHOLE = re.compile(r"step-(\d{8,})")


class CheckpointFolder:
    """Its methods raise OSError where the disk doesn't do what it should."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def whole(self, step: int) -> Path:
        """Where a step's checkpoint is when all of it is there."""
        return self.path / f"step-{step:08d}"

    def part(self, step: int) -> Path:
        """Where it is until then."""
        return self.path / f"step-{step:08d}.part"

    def steps(self) -> list[int]:
        """Of the whole checkpoints, the newest first."""
        names = os.listdir(self.path) if self.path.is_dir() else []
        return sorted((int(match[1]) for name in names if (match := _WHOLE.fullmatch(name))), reverse=True)

    def prepare(self) -> None:
        """Makes the folder, sees that it can be written, and removes the parts that an ended run left."""
        self.path.mkdir(parents=True, exist_ok=True)
        for part in self.path.glob("step-*.part"):
            shutil.rmtree(part)
        trial = self.path / "trial.part"
        trial.mkdir(exist_ok=True)
        trial.rmdir()

    def begin(self, step: int) -> None:
        """Makes an empty part."""
        self.discard(step)
        self.part(step).mkdir(parents=True)

    def discard(self, step: int) -> None:
        """Removes a part, where there is one."""
        if self.part(step).exists():
            shutil.rmtree(self.part(step))

    def commit(self, step: int) -> None:
        """The part becomes the checkpoint, at once and for sure.

        Checkpoints of this step and later ones are of a run that this one doesn't go on from: they are set aside
        first, so that the newest is always the one to go on from.
        """
        sync_folder(self.part(step))
        for later in self.steps():
            if later >= step:
                self.whole(later).rename(self._free_name(f"{self.whole(later).name}.aside"))
        self.part(step).rename(self.whole(step))
        sync_folder(self.path)

    def retire(self, keep: int, keep_every: int) -> None:
        """Removes all but the newest `keep` and, unless it is 0, those whose step `keep_every` divides."""
        for step in self.steps()[keep:]:
            if not keep_every or step % keep_every:
                self.whole(step).rename(self.part(step))  # from here on it isn't a checkpoint any more
                shutil.rmtree(self.part(step))

    def _free_name(self, name: str) -> Path:
        taken = sum(1 for path in self.path.iterdir() if path.name.startswith(name))
        return self.path / (f"{name}-{taken + 1}" if taken else name)
