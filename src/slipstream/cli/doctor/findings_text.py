"""What the doctor has found, as rows or JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING

from slipstream.terminal import make_console

if TYPE_CHECKING:
    from rich.table import Table

    from slipstream.doctor import Examination, Finding


def print_findings(found: Examination, as_json: bool) -> None:
    """Prints all findings, as JSON or as rows."""
    if as_json:
        findings = [asdict(finding) for finding in found.findings]
        print(json.dumps({"can_train": found.can_train, "findings": findings}, indent=2))
        return
    console = make_console()
    if console.is_interactive:
        console.print(_table(found.findings))
        return
    width = max(len(finding.topic) for finding in found.findings)
    for finding in found.findings:  # a table would break long lines
        for topic, text, _ in _lines(finding):
            print(f"{topic:{width}}  {text}")


def complain(found: Examination) -> None:
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
        for topic, text, style in _lines(finding):
            table.add_row(Text(topic), Text(text, style=style))
    return table


def _lines(finding: Finding) -> Iterator[tuple[str, str, str]]:
    """Yields what is printed of a finding: topic, text and style."""
    yield finding.topic, finding.text, ""
    if finding.advice is not None:
        yield "", f"better: {finding.advice}", "yellow"
    if finding.problem is not None:
        yield "", f"fails: {finding.problem}", "red"
