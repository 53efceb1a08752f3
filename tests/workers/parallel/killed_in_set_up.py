"""Rank 1 is killed before it makes a group that rank 0 waits for: killed_in_set_up.py. The tests' launcher would end
rank 0 with it, so a fork of rank 1 stands for it there."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import torch.distributed as dist

from slipstream.parallel import NO_LIMIT, RankGroup, Ranks, watch_group


def main(folder: Path) -> None:
    rank = int(os.environ["RANK"])
    if rank == 1 and os.fork():
        while not (folder / "ended").exists():
            time.sleep(0.05)
        os._exit(0)
    dist.init_process_group("gloo", timeout=NO_LIMIT)
    watch_group(RankGroup(dist.group.WORLD), 500.0)
    ranks = Ranks.of()
    ranks.connect([0, 1])
    if rank == 1:
        time.sleep(1)
        os.kill(os.getpid(), signal.SIGKILL)
    if os.fork() == 0:  # to see when rank 0 ends
        parent, began = os.getppid(), time.monotonic()
        while os.getppid() == parent:
            time.sleep(0.02)
        (folder / "seconds").write_text(str(time.monotonic() - began))
        (folder / "ended").touch()
        os._exit(0)
    ranks.connect([0, 1])  # waits in the store for rank 1
    (folder / "ended").touch()


main(Path(sys.argv[1]))
