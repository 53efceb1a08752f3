"""`slipstream doctor`: this machine's abilities, what it lacks, and problems that would keep training from running."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Exit, Option

from slipstream.cli.options import above_zero
from slipstream.terminal import print_table, spinner

if TYPE_CHECKING:
    from rich.table import Table

    from slipstream.extras.doctor import Examination, Finding


def doctor(
    folder: Annotated[Path, Option(help="The folder that runs will write to; it needn't exist yet.")] = Path("runs"),
    timeout: Annotated[
        float, above_zero("Timeout, in seconds, for ranks that wait for each other.", "seconds", "60")
    ] = 30.0,
    as_json: Annotated[bool, Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    """Show what this machine can do, how fast, and what is missing.

    Under torchrun or srun, neighbouring ranks also exchange in both directions at once, as they will in training. Exits
    with 0 if a run can work here, and with 1 if something would make it fail, and says what to do.
    """
    from slipstream.extras.doctor import examine

    # Of ranks that share a terminal the first one speaks.
    is_first = os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")) == "0"
    with spinner("checking this machine") if is_first else nullcontext(lambda _text: None) as change:
        examination = examine(folder, timeout, lambda topic: change(f"checking the {topic}"))
    print_findings(examination, as_json) if examination.rank == 0 else complain(examination)
    if examination.exchange is not None:
        sys.stdout.flush()
        examination.exchange.leave(0 if examination.can_train else 1)
    if not examination.can_train:
        raise Exit(1)


def print_findings(found: Examination, as_json: bool) -> None:
    """Prints all findings, as JSON or as rows."""
    if as_json:
        findings = [asdict(finding) for finding in found.findings]
        print(json.dumps({"can_train": found.can_train, "findings": findings}, indent=2))
        return
    print_table(_table(found.findings))


def complain(found: Examination) -> None:
    """Prints the problems of another rank than 0, as rank 0 may not be able to."""
    for finding in found.findings:
        if finding.problem is not None:
            sys.stderr.write(f"rank {found.rank}: {finding.topic}: {finding.problem}\n")
    sys.stderr.flush()


def _table(findings: list[Finding]) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, show_header=False)
    for finding in findings:
        for topic, text, style in _lines(finding):
            table.add_row(Text(topic), Text(text, style=style))
    return table


def _lines(finding: Finding) -> Iterator[tuple[str, str, str]]:
    """Yields a finding's lines: topic, text and style."""
    yield finding.topic, finding.text, ""
    if finding.advice is not None:
        yield "", f"better: {finding.advice}", "yellow"
    if finding.problem is not None:
        yield "", f"fails: {finding.problem}", "red"
