"""What the system says of other processes: whether one lives, is stopped or computes, and when it ends."""

from __future__ import annotations

import mmap
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
    num_bytes: int = 0  # read and written so far, also by page faults

    @property
    def is_stopped(self) -> bool:
        """Whether it runs no code until somebody lets it go on."""
        return self.letter in ("T", "t")


def state_of(process: int) -> ProcessState | None:
    """Returns the state of a process; None where it has gone or nothing is known."""
    stat, transfers = Path(f"/proc/{process}/stat"), Path(f"/proc/{process}/io")
    with suppress(OSError, ValueError, IndexError):
        words = stat.read_text().rpartition(") ")[2].split()
        num_bytes = int(words[9]) * mmap.PAGESIZE
        with suppress(OSError):  # which may belong to root
            num_bytes += sum(int(line.split()[1]) for line in transfers.read_text().splitlines()[:2])
        return ProcessState(words[0], (int(words[11]) + int(words[12])) / _TICKS, num_bytes)
    if Path("/proc/self/stat").exists():
        return None
    with suppress(OSError):  # a system without /proc
        command = ["ps", "-o", "state=", "-p", str(process)]
        if text := subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip():
            return ProcessState(text[0], 0.0)
    return None


def end_of(process: int) -> int | None:
    """Returns a descriptor that can be read once a process has ended; None where there is no such process, or the
    system has none of these."""
    if hasattr(os, "pidfd_open"):
        with suppress(OSError):
            return int(os.pidfd_open(process))
    return None


def num_ended_for_memory() -> int | None:
    """Returns how many processes Linux has ended so far as memory ran out, in whichever container; None where the
    system doesn't say."""
    with suppress(OSError, ValueError):
        counts = dict(line.split() for line in Path("/proc/vmstat").read_text().splitlines())
        return int(counts["oom_kill"]) if "oom_kill" in counts else None
    return None
