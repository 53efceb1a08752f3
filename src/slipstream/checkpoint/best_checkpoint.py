"""The best checkpoint of a run: that of its lowest validation loss, among those that are there.

A run that keeps it lists in the facts of every checkpoint, under `validation`, each validation that was the best so
far. Of these the newest that was saved is the best: a save that fails doesn't cost the one before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from slipstream.checkpoint.checkpoint_folder import CheckpointFolder
from slipstream.checkpoint.manifest import Manifest
from slipstream.checkpoint.verified_files import DamagedError
from slipstream.errors import SlipstreamError


class Improvement(NamedTuple):
    """A validation after a step whose loss was below that of all before."""

    step: int
    loss: float


def improvements_of(facts: Mapping[str, Any]) -> list[Improvement]:
    """Returns the improvements whose checkpoints a run keeps, the newest last; none where it doesn't."""
    return [Improvement(*each) for each in facts.get("validation", {}).get("improvements", ())]


def newest_saved(folder: CheckpointFolder, improvements: Sequence[Improvement]) -> Improvement | None:
    """Returns the newest of the improvements that has a complete checkpoint."""
    steps = folder.steps()
    saved = (each for each in reversed(improvements) if each.step in steps and _may_be_of(folder, each))
    return next(saved, None)


def find_best(folder: CheckpointFolder) -> Improvement | None:
    """Returns the best checkpoint by what the newest readable manifest says; None where the run keeps none."""
    facts = next((facts for step in folder.steps() if (facts := _facts(folder, step)) is not None), {})
    return newest_saved(folder, improvements_of(facts))


def require_best(folder: CheckpointFolder) -> Improvement:
    """Returns the best checkpoint. Raises SlipstreamError, with what to type instead, where there is none."""
    best = find_best(folder)
    if best is None:
        there = ", ".join(map(str, folder.steps())) or "none"
        raise SlipstreamError(
            f"there is no best checkpoint in {folder.path}: runs with --checkpoint.keep_best=true keep that of their "
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
