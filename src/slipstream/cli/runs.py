"""`slipstream runs`: a run, or all runs in a folder, as one HTML page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument, Option


def runs(
    folder: Annotated[Path, Argument(help="A run's output folder, also while it is going on, or a folder of runs.")],
    output: Annotated[
        Path | None, Option(help="The file to write. Default: FOLDER/run.html, and runs.html for a folder of runs.")
    ] = None,
    overwrite: Annotated[
        bool, Option("--overwrite", help="Replace a file that isn't such a page; one that is is replaced in any case.")
    ] = False,
) -> None:
    """Write an HTML page of the runs in FOLDER: curves, the last step, what happened, settings. It needs no network."""
    from slipstream.run_page import write_run_page

    path, number = write_run_page(folder, output, overwrite)
    print(f"wrote {path} ({number} {'run' if number == 1 else 'runs'})")
