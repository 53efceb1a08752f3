"""Finds the checkpoint that a command names: by its own folder, or by its run's and a step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from slipstream.checkpoint import CheckpointFolder, Checkpoints, SavedCheckpoint, require_best, step_named
from slipstream.errors import SlipstreamError
from slipstream.parallel import RankGroup
from slipstream.training.run_folder import RunFolder

Wanted = int | Literal["latest", "last-good", "best"]

_EXAMPLE = "runs/a, or runs/a/checkpoints/step-00000012"


@dataclass(frozen=True)
class ChosenCheckpoint:
    """A run that has checkpoints, and which of them is wanted."""

    run: RunFolder
    wanted: Wanted

    def read(self, say: Callable[[str], None]) -> SavedCheckpoint:
        """Returns the checkpoint, every byte of it verified; `say` gets a line about damaged ones that are passed over.

        Raises SlipstreamError where it isn't there, with the steps that are, or is damaged.
        """
        found = Checkpoints(self.run.checkpoints, RankGroup(), say=say).find(self.wanted)
        if found is None:
            raise SlipstreamError(f"the checkpoints in {self.run.checkpoints} have just been removed; try again")
        return found


def choose_checkpoint(place: Path, step: str | None = None, best: bool = False) -> ChosenCheckpoint:
    """Returns the checkpoint at `place`, or, where a run is there, that of a step, "latest" (the default), "last-good",
    or the `best`, that of the run's lowest validation loss.

    Raises:
        SlipstreamError: where there are no checkpoints, or the step isn't one.
    """
    if best and step is not None:
        raise SlipstreamError(f"--step={step} and --best both choose a checkpoint; give one of the two")
    if not place.is_dir():
        raise SlipstreamError(f"there is no folder {place}; give a run's output folder or a checkpoint: {_EXAMPLE}")
    one = step_named(place.resolve().name)
    run = RunFolder(place) if one is None else _run_of(place)
    option = "--best" if best else f"--step={step}" if step is not None else None
    wanted = ("best" if best else _parse(step)) if one is None else _only(place, one, option)
    if not CheckpointFolder(run.checkpoints).steps():
        raise SlipstreamError(
            f"there are no checkpoints in {run.path}: runs with --checkpoint.every=... leave them in "
            f"{run.checkpoints}. Give a run's output folder or a checkpoint: {_EXAMPLE}"
        )
    if best:
        require_best(CheckpointFolder(run.checkpoints))
    return ChosenCheckpoint(run, wanted)


def _run_of(checkpoint: Path) -> RunFolder:
    """Returns the run in whose folder a checkpoint is."""
    run = RunFolder(checkpoint.resolve().parent.parent)
    if run.checkpoints != checkpoint.resolve().parent:
        raise SlipstreamError(
            f"{checkpoint} isn't in the folder checkpoints/ of a run, next to whose inputs/ the model's configuration "
            f"and tokenizer are; give a run's output folder or a checkpoint in it: {_EXAMPLE}"
        )
    return run


def _only(checkpoint: Path, step: int, option: str | None) -> int:
    """Returns the step of a checkpoint that was given itself."""
    if option is not None:
        raise SlipstreamError(
            f"{option} chooses among the checkpoints of a run, but {checkpoint} is one of them: leave "
            f"{option.partition('=')[0]} out, or give the run's folder"
        )
    return step


def _parse(step: str | None) -> Wanted:
    if step is None or step == "latest":
        return "latest"
    if step == "last-good":
        return "last-good"
    if not step.isdecimal():
        raise SlipstreamError(f"--step={step} isn't a step; give that of a checkpoint, latest or last-good")
    return int(step)
