"""The faults of a soak: what each does, and what the run has to say about it."""

from __future__ import annotations

import random
import re
import resource
import socket
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from slipstream.checkpoint import step_named

ENDS_THE_RUN = ("TERM", "launcher killed")  # so that it is started anew, from outside
GOES_ON = ("slow", "slow by turns", "full disk", "hub flooded", "delays", "stalls", "corrupt line")
LOSES_A_HELPER = ("watcher killed", "watcher stopped", "hub killed", "hub stopped")  # which is started again
OF_THE_NETWORK = ("link cut", "machine gone", "delays", "stalls", "corrupt line")
GONE_FOR_GOOD = "gone for good"  # the run goes on with fewer ranks, until the lost ones are back
OF_THE_LAUNCHER = ("launcher killed", GONE_FOR_GOOD)
KINDS = ("slow", "kill", "stop", "full disk", "damaged checkpoint", "TERM", "launcher killed")
KINDS += ("rank and watcher killed", "watcher killed", "watcher stopped", "hub killed", "hub stopped", "hub flooded")
KINDS += (GONE_FOR_GOOD, "slow by turns", "link cut", "machine gone", "delays", "stalls", "corrupt line")
_BLAMED = re.compile(r"^(?:error: )?rank (\d+) \(", re.MULTILINE)
_LOST_HELPER = re.compile(
    r"^(the watchers' hub|the watcher of rank \d+) \(process \d+\) (?:was|ended|can't)", re.MULTILINE
)


@dataclass
class Fault:
    """One fault, and what became of it. Seconds are None where the run just goes on."""

    kind: str
    step: int  # the last one that was complete
    rank: int = 0  # whose process, machine or link it was
    host: str = ""
    process: int = 0  # which was the victim
    is_apart: bool = False  # whether the ranks were on several hosts
    detected: float | None = None  # seconds until the run said something
    ended: float | None = None  # seconds until no rank ran any more, or they were started again
    named: bool = False  # whether it said who, where and what, and blamed nobody else
    again: float | None = None  # seconds until the next step was complete
    lost: int = 0  # steps that ran again
    problem: str = ""


def is_named(fault: Fault, text: str, hosts: list[str]) -> bool:
    """Returns whether `text`, which the run has written since, names the fault rightly, and blames nobody for it who
    isn't to blame; `hosts` has that of each rank."""
    who = rf"^(?:error: )?rank {fault.rank} \({re.escape(fault.host)}, process {fault.process}\) "
    blamed, helpers = {int(rank) for rank in _BLAMED.findall(text)}, set(_LOST_HELPER.findall(text))
    if fault.kind in LOSES_A_HELPER:
        helper = "the watchers' hub" if fault.kind.startswith("hub") else f"the watcher of rank {fault.rank}"
        how = "was ended by SIGKILL" if fault.kind.endswith("killed") else "was silent for"
        is_said = re.search(rf"^{helper} \(process {fault.process}\) {how}", text, re.MULTILINE) is not None
        return is_said and helpers == {helper} and not blamed and "error: " not in text
    if helpers:
        return False
    if fault.kind in GOES_ON or fault.kind in ENDS_THE_RUN:
        return not blamed and "\nrestart " not in text and (fault.kind in ENDS_THE_RUN or "error: " not in text)
    if fault.kind == GONE_FOR_GOOD:
        said = re.search(r"^restart in .* with 2 of 4 .*; process(?:es)? ([\d, ]+) (?:is|are) lost: once", text, re.M)
        lost = {int(number) for number in said[1].split(",")} if said else set()
        return fault.rank in blamed <= lost
    if fault.kind in ("link cut", "machine gone"):
        return _is_cut_named(fault, text, hosts, blamed)
    said = {
        "stop": r"has been stopped \(as by SIGSTOP\) for \d+ s",
        "rank and watcher killed": "has ended without a word, and its watcher with it",
    }.get(fault.kind, "has ended without a word")
    return re.search(who + said, text, re.MULTILINE) is not None and blamed == {fault.rank}


def _is_cut_named(fault: Fault, text: str, hosts: list[str], blamed: set[int]) -> bool:
    """Returns whether each side that is left says that it doesn't hear the other: the hub's names the ranks there, the
    other one names the hub."""
    is_at_the_hub = fault.host == hosts[0]
    far = {rank for rank, host in enumerate(hosts) if (host != hosts[0] if is_at_the_hub else host == fault.host)}
    speaks_of = {
        "ranks": not (fault.kind == "machine gone" and is_at_the_hub),
        "hub": not (fault.kind == "machine gone" and not is_at_the_hub),
    }
    unheard = r"^(?:error: )?rank %d \(%s, process \d+\) hasn't answered for \d+ s"
    names_ranks = all(re.search(unheard % (rank, re.escape(hosts[rank])), text, re.MULTILINE) for rank in far)
    hub = r"^error: the watchers' hub, which rank 0 has started at \S+, port \d+, hasn't answered for \d+ s"
    names_hub = re.search(hub, text, re.MULTILINE) is not None
    expected = far if speaks_of["ranks"] else set()
    return names_hub == speaks_of["hub"] and (names_ranks or not expected) and blamed == expected


def flood(listening: tuple[str, int], dice: random.Random) -> None:
    """Sends the hub what no watcher sends, for a second: random lines, silence, and one without an end."""
    ends = time.monotonic() + 1
    connections = []
    while time.monotonic() < ends:
        connections.append(socket.create_connection(listening))
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
