"""Rank 1 is killed in the self-check of tensor parallelism; rank 0 writes what it says then."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import torch.distributed as dist

from slipstream.errors import LostRankError
from slipstream.parallel import RankGroup, check_tensor_parallel
from slipstream.parallel.tensor import TensorParallel
from support.architectures import ARCHITECTURES


def main(said: Path) -> None:
    rank = int(os.environ["RANK"])
    if rank == 1 and os.fork():  # what started the ranks would end rank 0 with the one that is killed
        while not said.exists():
            time.sleep(0.05)
        os._exit(0)
    dist.init_process_group("gloo")
    if rank == 1:
        TensorParallel.begin = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign]
    try:
        check_tensor_parallel(ARCHITECTURES["llama"], None, RankGroup(dist.group.WORLD), sequence=False)
    except LostRankError as error:
        part = said.with_suffix(".part")
        part.write_text(str(error))
        part.replace(said)
    os._exit(0)


main(Path(sys.argv[1]))
