"""Checks that a run may write to its output folder: nothing that isn't a run's is replaced, and no result unasked."""

from __future__ import annotations

from slipstream.checkpoint import CheckpointFolder, require_best
from slipstream.errors import SlipstreamError
from slipstream.training.config import Config
from slipstream.training.run_folder import RunFolder


def check_run_folder(config: Config) -> None:
    """Raises SlipstreamError where the run would replace something that isn't its own, or that the configuration
    doesn't allow it to, and where it would resume from a checkpoint that isn't there."""
    folder, resume = RunFolder(config.training.output), config.checkpoint.resume
    if folder.path.exists() and not folder.path.is_dir():
        raise SlipstreamError(f"training.output={folder.path} is a file; name a folder")
    steps = CheckpointFolder(folder.checkpoints).steps()
    if isinstance(resume, int) and resume not in steps:
        there = ", ".join(map(str, steps)) or "none"
        raise SlipstreamError(
            f"there is no checkpoint {resume} in {folder.checkpoints}; give one of its steps ({there}), latest or "
            "last-good"
        )
    if resume == "best" and steps:
        require_best(CheckpointFolder(folder.checkpoints))
    resumes = resume != "no"
    _check_unlisted(folder, steps, adopts_checkpoints=resumes and bool(steps))
    begins_again = resumes and (folder.listed.has(folder.checkpoints) or not folder.exports())
    if not (begins_again or (steps and resumes)):
        _check_results(config, folder, steps)


def _check_unlisted(folder: RunFolder, steps: list[int], adopts_checkpoints: bool) -> None:
    """Raises SlipstreamError where there is something that no run has listed."""
    unlisted = folder.find_unlisted(adopts_checkpoints)
    if unlisted is None and not adopts_checkpoints:
        unlisted = CheckpointFolder(folder.checkpoints).find_other()
    if unlisted is None:
        return
    is_copy = bool(steps) and unlisted.is_relative_to(folder.checkpoints)
    instead = "go on from the checkpoints with --checkpoint.resume=latest, or " if is_copy else ""
    raise SlipstreamError(
        f"training.output={folder.path} already holds {unlisted.relative_to(folder.path)}, which isn't in its list of "
        f"what runs made, and so is never replaced; {instead}choose another folder, such as "
        f"--training.output={folder.path / 'run-1'}, or move it away"
    )


def _check_results(config: Config, folder: RunFolder, steps: list[int]) -> None:
    """Raises SlipstreamError where there are results of an earlier run that the configuration doesn't give up."""
    kept = folder.find_result()
    if kept is None or config.training.overwrite:
        return
    name, resume = kept.relative_to(folder.path), ""
    if steps and config.checkpoint.resume == "no":
        resume = f"go on from its checkpoint of step {steps[0]} with --checkpoint.resume=latest, "
    no_checkpoint = ", and no checkpoint to go on from" if config.checkpoint.resume != "no" else ""
    raise SlipstreamError(
        f"training.output={folder.path} already holds {name}{no_checkpoint}; {resume}choose another folder, or replace "
        "it with --training.overwrite=true"
    )
