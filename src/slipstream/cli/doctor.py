"""`slipstream doctor`: what this machine can do, what isn't here, and what would keep a training from running."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Exit, Option

from slipstream.cli.number_options import above_zero
from slipstream.terminal import make_console, spinner

if TYPE_CHECKING:
    from rich.table import Table

    from slipstream.doctor import Examination, Finding

_FILE_COLUMNS = 240  # where the output isn't a terminal: no line is broken


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

    with spinner("looking at this machine") as change:
        found = examine(folder, timeout, lambda topic: change(f"looking at the {topic}"))
    _print(found, as_json) if found.rank == 0 else _complain(found)
    if found.exchange is not None:
        sys.stdout.flush()
        found.exchange.leave(0 if found.can_train else 1)
    if not found.can_train:
        raise Exit(1)


def _print(found: Examination, as_json: bool) -> None:
    if as_json:
        findings = [asdict(finding) for finding in found.findings]
        print(json.dumps({"can_train": found.can_train, "findings": findings}, indent=2))
        return
    console = make_console()
    if not console.is_interactive:
        console.width = _FILE_COLUMNS
    console.print(_table(found.findings))


def _complain(found: Examination) -> None:
    """Says what another rank than 0 has found wrong, as rank 0 may not be able to."""
    for finding in found.findings:
        if finding.problem is not None:
            sys.stderr.write(f"rank {found.rank}: {finding.topic}: {finding.problem}\n")
    sys.stderr.flush()


def _table(findings: list[Finding]) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, show_header=False)
    for finding in findings:
        table.add_row(Text(finding.topic), Text(finding.text))
        if finding.advice is not None:
            table.add_row("", Text(f"better: {finding.advice}", style="yellow"))
        if finding.problem is not None:
            table.add_row("", Text(f"fails: {finding.problem}", style="red"))
    return table
