"""Rank 1 is killed before it makes a group that rank 0 waits for: killed_in_set_up.py FOLDER GROUP.

GROUP is `first`, the process group that a Pipeline joins, `mesh`, one that follows a mesh, or `later`. The tests'
launcher would end rank 0 with rank 1, so a fork of rank 1 stands for it there.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from slipstream.parallel import NO_LIMIT, RankGroup, Ranks, join_launched_group, make_mesh, mesh, watch_group


def dies(*_: Any, **__: Any) -> None:
    time.sleep(1)
    os.kill(os.getpid(), signal.SIGKILL)


def make_first(rank: int) -> None:
    if rank == 1:
        dist.init_process_group = dies
    join_launched_group("cpu")


def make_mesh_of_ranks(rank: int) -> None:
    dist.init_process_group("gloo", timeout=NO_LIMIT)
    if rank == 1:
        mesh.init_device_mesh = dies
    Ranks.of(make_mesh(pp=2)).connect([0, 1])


def make_later(rank: int) -> None:
    dist.init_process_group("gloo", timeout=NO_LIMIT)
    watch_group(RankGroup(dist.group.WORLD), 500.0)
    ranks = Ranks.of()
    ranks.connect([0, 1])
    if rank == 1:
        dies()
    ranks.connect([0, 1])  # waits in the store for rank 1


MADE: dict[str, Callable[[int], None]] = {"first": make_first, "mesh": make_mesh_of_ranks, "later": make_later}


def main(folder: Path, group: str) -> None:
    rank = int(os.environ["RANK"])
    if rank == 1 and os.fork():
        while not (folder / "ended").exists():
            time.sleep(0.05)
        os._exit(0)
    os.environ["SLIPSTREAM_STALL_LIMIT"] = "500"
    parent, began = os.getpid(), time.monotonic()
    if rank == 0 and os.fork() == 0:  # to see when rank 0 ends
        while os.getppid() == parent:
            time.sleep(0.02)
        (folder / "written").write_text(str(time.monotonic() - began))
        (folder / "written").rename(folder / "seconds")  # at once: the test may look between the file and its text
        (folder / "ended").touch()
        os._exit(0)
    MADE[group](rank)
    (folder / "ended").touch()


main(Path(sys.argv[1]), sys.argv[2])
