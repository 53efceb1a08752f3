"""The process that an output folder belongs to, as other processes and other machines can tell it."""

from __future__ import annotations

import os
import socket
import uuid
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import psutil

_BOOT, _NAMESPACE = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/pid")


@dataclass(frozen=True)
class FolderOwner:
    """A process, where and since when it runs."""

    key: str  # of this owner alone
    host: str
    process: int
    machine: str  # where processes have these numbers: the boot and the namespace; "" where that isn't known
    started: float  # when the process began, by its machine's clock
    since: str  # when it took the folder, for people

    @classmethod
    def here(cls) -> FolderOwner:
        """Returns this process."""
        started = psutil.Process().create_time()
        now = datetime.now().astimezone().isoformat(sep=" ", timespec="seconds")
        return cls(uuid.uuid4().hex, socket.gethostname(), os.getpid(), _machine(), started, now)

    def __str__(self) -> str:
        return f"process {self.process} on host {self.host}, since {self.since}"

    def has_ended(self) -> bool:
        """Returns whether the process is known to have ended; never of one in another machine or container."""
        if not self.machine or self.machine != _machine():
            return False
        try:
            process = psutil.Process(self.process)
            return process.status() == psutil.STATUS_ZOMBIE or abs(process.create_time() - self.started) > 1
        except psutil.NoSuchProcess:
            return True


def _machine() -> str:
    try:
        return f"{_BOOT.read_text().strip()} {os.readlink(_NAMESPACE)}"
    except OSError:
        return ""
