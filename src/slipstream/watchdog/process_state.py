"""What the system says of another process: whether it lives, is stopped or computes."""

from __future__ import annotations

import os
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

_TICKS = os.sysconf("SC_CLK_TCK")


class ProcessState(NamedTuple):
    """`letter` as in ps: R runs, S sleeps, D waits for a disk, T is stopped, t is traced, Z has ended."""

    letter: str
    cpu_seconds: float

    @property
    def is_stopped(self) -> bool:
        """Whether it runs no code until somebody lets it go on."""
        return self.letter in ("T", "t")


def state_of(process: int) -> ProcessState | None:
    """Returns the state of a process; None where it has gone or nothing is known."""
    stat = Path(f"/proc/{process}/stat")
    with suppress(OSError, ValueError, IndexError):
        words = stat.read_text().rpartition(") ")[2].split()
        return ProcessState(words[0], (int(words[11]) + int(words[12])) / _TICKS)
    if Path("/proc/self/stat").exists():
        return None
    with suppress(OSError):  # a system without /proc
        command = ["ps", "-o", "state=", "-p", str(process)]
        if text := subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip():
            return ProcessState(text[0], 0.0)
    return None
