"""`slipstream export`: the model of a checkpoint, as transformers loads it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from slipstream.cli.model_options import Best, TrustRemoteCode
from slipstream.terminal import make_console


def export(
    checkpoint: Annotated[Path, Argument(help="A run's output folder, or one of its checkpoints.")],
    output: Annotated[Path, Option(help="The folder to write: a new one, or an empty one.")],
    step: Annotated[
        str | None,
        Option(
            help="Of a run: the step of a checkpoint, latest, or last-good, which passes over damaged ones. "
            "Default: latest."
        ),
    ] = None,
    best: Best = False,
    remote_code: TrustRemoteCode = False,
) -> None:
    """Write the whole model of CHECKPOINT and its tokenizer, as transformers loads them.

    Runs in this process alone, whichever mesh trained the model.
    """
    from slipstream.launch import Progress
    from slipstream.training.exports import check_export_folder, choose_checkpoint, export_checkpoint

    progress, chosen = Progress(make_console()), choose_checkpoint(checkpoint, step, best)
    check_export_folder(output, chosen.run)
    with progress.waiting("reading the checkpoint"):
        saved = chosen.read(progress.warn)
        export_checkpoint(chosen.run, saved, output, remote_code)
    progress.say_result(f"exported step {saved.step} of {chosen.run.path} to {output}")
