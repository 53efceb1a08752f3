"""The process that an output folder belongs to, as other processes and machines can tell it, and where it writes."""

from __future__ import annotations

import os
import socket
import uuid
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

FOLDER = "slipstream-run"  # visible, so that it is copied with the rest
_BOOT, _NAMESPACE = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/pid")

_held: dict[str, str] = {}  # the keys of the owners as which this process writes, by the output folder


def write_as(key: str | None, output: Path) -> None:
    """Notes as which owner this process writes into an output folder; None: as nobody's."""
    if key is None:
        _held.pop(os.path.abspath(output), None)
    else:
        _held[os.path.abspath(output)] = key


def work_folder(output: Path) -> Path:
    """Returns where this process writes what then gets its place in the output folder by a rename, which fails once
    another run has the folder: the owner's own folder, or the output itself where this process has no owner."""
    key = _held.get(os.path.abspath(output))
    return output if key is None else output / FOLDER / f"owner-{key}.part"


@dataclass(frozen=True)
class FolderOwner:
    """A process, where and since when it runs."""

    key: str  # of this owner alone
    host: str
    process: int
    machine: str  # where processes have these numbers: the boot and the namespace; "" where that isn't known
    started: int  # when the process began, in ticks since its machine's boot: a clock may be set
    since: str  # when it took the folder, for people

    @classmethod
    def here(cls) -> FolderOwner:
        """Returns this process."""
        machine, now = _machine(), datetime.now().astimezone().isoformat(sep=" ", timespec="seconds")
        started = _state_and_start(os.getpid())[1] if machine else 0
        return cls(uuid.uuid4().hex, socket.gethostname(), os.getpid(), machine, started, now)

    def __str__(self) -> str:
        return f"process {self.process} on host {self.host}, since {self.since}"

    def has_ended(self) -> bool:
        """Returns whether the process is known to have ended; never of one in another machine or container."""
        if not self.machine or self.machine != _machine():
            return False
        try:
            state, started = _state_and_start(self.process)
        except (FileNotFoundError, ProcessLookupError):
            return True
        return state in "XZ" or started != self.started  # a zombie, or another process with its number


def _state_and_start(process: int) -> tuple[str, int]:
    """Returns the third and the 22nd field of /proc/PID/stat; the second, in parentheses, may have spaces."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return fields[0], int(fields[19])


def _machine() -> str:
    """Returns the boot and the namespace in which processes have their numbers; "" where Linux doesn't say."""
    try:
        return f"{_BOOT.read_text().strip()} {os.readlink(_NAMESPACE)}"
    except OSError:
        return ""
