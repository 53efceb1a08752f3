"""Checks that a run's folder can be written, and that nothing is replaced there that isn't given up."""

from __future__ import annotations

import os
from pathlib import Path

from slipstream.checkpoint import CheckpointFolder, require_best
from slipstream.errors import SlipstreamError
from slipstream.own_files import link_advice
from slipstream.train.config import Config
from slipstream.train.run_folder import RunFolder


def check_place(output: Path) -> None:
    """Raises SlipstreamError where no folder can be made or written here, and OSError where that can't be found out."""
    there = next(parent for parent in (output.absolute(), *output.absolute().parents) if parent.exists())
    if there != output.absolute() and not there.is_dir():
        raise SlipstreamError(f"training.output={output}: {there} is a file; name a folder")
    if there.is_dir() and not os.access(there, os.W_OK | os.X_OK, effective_ids=True):
        raise SlipstreamError(f"training.output={output}: nothing can be written in {there}; name a folder of your own")


def check_run_folder(config: Config) -> None:
    """Raises SlipstreamError where the run would replace something that isn't its own, or that the configuration
    doesn't allow it to, and where it would resume from a checkpoint that isn't there."""
    folder = config.folder
    resume = config.checkpoint.resume
    if folder.path.exists() and not folder.path.is_dir():
        raise SlipstreamError(f"training.output={folder.path} is a file; name a folder")
    if (link := folder.find_link()) is not None:
        raise SlipstreamError(f"training.output={folder.path}: {link_advice(link)}")
    steps = CheckpointFolder(folder.checkpoints).steps()
    if isinstance(resume, int) and resume not in steps:
        if not steps:
            raise SlipstreamError(
                f"checkpoint.resume={resume}: there is no checkpoint at all in {folder.checkpoints}; leave "
                "checkpoint.resume out to begin at step 1, or name the run's folder with --training.output=..."
            )
        raise SlipstreamError(
            f"there is no checkpoint {resume} in {folder.checkpoints}; give one of its steps "
            f"({', '.join(map(str, steps))}), latest or last-good"
        )
    if resume == "best" and steps:
        require_best(CheckpointFolder(folder.checkpoints))
    resumes = resume != "no"
    _check_unlisted(folder, steps, adopts_checkpoints=resumes and bool(steps))
    # A run that ended before its first checkpoint begins again in its folder, unless it has come to its end.
    begins_again = folder.finished_model() is None and folder.listed.has(folder.checkpoints)
    if not (resumes and (steps or begins_again or not folder.exports())):
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
    result = folder.find_result()
    if result is None or config.training.overwrite:
        return
    name = result.relative_to(folder.path)
    resume = ""
    if steps and config.checkpoint.resume == "no":
        resume = f"go on from its checkpoint of step {steps[0]} with --checkpoint.resume=latest, "
    no_checkpoint = ", and no checkpoint to go on from" if config.checkpoint.resume != "no" else ""
    raise SlipstreamError(
        f"training.output={folder.path} already holds {name}{no_checkpoint}; {resume}choose another folder, or replace "
        "it with --training.overwrite=true"
    )
