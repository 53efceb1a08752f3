"""The command: runs the checks, has rank 0 print them, and ends with 1 where a training would fail."""

from __future__ import annotations

import os
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

from typer import Exit, Option

from slipstream.cli.doctor.findings_text import complain, print_findings
from slipstream.cli.number_options import above_zero
from slipstream.terminal import spinner


def doctor(
    folder: Annotated[Path, Option(help="The folder that runs go to; it needn't exist.")] = Path("runs"),
    timeout: Annotated[
        float, above_zero("Largest number of seconds that ranks wait for each other.", "seconds", "60")
    ] = 30.0,
    as_json: Annotated[bool, Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    """Show what this machine can do, at which rates, and what isn't here.

    Among the ranks of torchrun or srun, neighbours also exchange in both directions at once, as they will in training.
    Exits with 0 if a training can run here, and with 1 if something would make it fail, which is said with what to do.
    """
    from slipstream.doctor import examine

    is_first = os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")) == "0"  # of ranks that share a terminal
    with spinner("looking at this machine") if is_first else nullcontext(lambda _text: None) as change:
        found = examine(folder, timeout, lambda topic: change(f"looking at the {topic}"))
    print_findings(found, as_json) if found.rank == 0 else complain(found)
    if found.exchange is not None:
        sys.stdout.flush()
        found.exchange.leave(0 if found.can_train else 1)
    if not found.can_train:
        raise Exit(1)
