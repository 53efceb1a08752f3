"""The faults of a soak, and what each does to a disk."""

from __future__ import annotations

import random
import resource
import socket
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from slipstream.checkpoint import step_named

KINDS = ("slow", "kill", "stop", "full disk", "damaged checkpoint", "TERM", "launcher killed")
KINDS += ("rank and watcher killed", "watcher killed", "watcher stopped", "hub killed", "hub stopped", "hub flooded")
KINDS += ("slow by turns",)
ENDS_THE_LAUNCHER = {"TERM", "launcher killed"}
GOES_ON = {"slow", "slow by turns", "full disk", "hub flooded"}
LOSES_A_HELPER = {"watcher killed", "watcher stopped", "hub killed", "hub stopped"}  # which is started again


@dataclass
class Fault:
    """One fault, and what became of it. Seconds are None where the run just goes on."""

    kind: str
    step: int  # the last one that was complete
    rank: int | None = None
    detected: float | None = None  # seconds until the run said that it had ended
    named: bool | None = None  # whether it said the rank
    again: float | None = None  # seconds until the next step was complete
    lost: int = 0  # steps that ran again


def flood(port: int, dice: random.Random) -> None:
    """Sends the hub what no watcher sends, for a second: random lines, silence, and one without an end."""
    ends = time.monotonic() + 1
    connections = []
    while time.monotonic() < ends:
        connections.append(socket.create_connection(("127.0.0.1", port)))
        with suppress(OSError):
            connections[-1].sendall(dice.choice([b"", dice.randbytes(300) + b"\n", b"[" * 5000 + b"\n", b"x" * 2**18]))
        if len(connections) > 300:
            connections.pop(0).close()
    for each in connections:
        each.close()


def slow_down(rank: psutil.Process, seconds: float) -> None:
    """Lets a rank run for 50 ms of every 100."""
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        rank.suspend()
        time.sleep(0.05)
        rank.resume()
        time.sleep(0.05)


def fill_disk(ranks: list[psutil.Process]) -> None:
    """Lets no file grow for a second, as on a disk without room."""
    for rank in ranks:
        resource.prlimit(rank.pid, resource.RLIMIT_FSIZE, (2048, resource.RLIM_INFINITY))
    time.sleep(1)
    for rank in ranks:
        with suppress(ProcessLookupError):
            resource.prlimit(rank.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def damage(checkpoints: Path, dice: random.Random) -> None:
    """Changes a byte of the newest checkpoint, unless it is the only one."""
    steps = sorted(path for path in checkpoints.iterdir() if step_named(path.name) is not None)
    if len(steps) < 2:
        return
    file = dice.choice(sorted(steps[-1].glob("*.safetensors")))
    data = bytearray(file.read_bytes())
    data[dice.randrange(len(data) // 2, len(data))] ^= 0x10
    file.write_bytes(data)
