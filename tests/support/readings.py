"""What each process of a command reads and makes."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from support.forked import run_alone
from support.paths import TESTS

COUNTED = TESTS / "workers" / "training" / "counted_readings.py"


def counts(folder: Path, *arguments: str | Path) -> list[Counter[str]]:
    """What each process of a command read and made, in the order of their beginnings."""
    log = folder / "log.txt"
    log.unlink(missing_ok=True)
    ended = run_alone(COUNTED, log, f"{folder}/", *arguments)
    assert ended.returncode == 0, ended.stderr[-3000:]
    found: dict[str, Counter[str]] = {}
    for line in log.read_text().splitlines():
        process, _, what = line.partition(" ")
        found.setdefault(process, Counter())[what.removeprefix(f"{folder}/")] += 1
    return [*found.values()]
