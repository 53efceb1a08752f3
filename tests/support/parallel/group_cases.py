"""Runs the cases of a worker program one after the other in all processes of a group, and says which have passed."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from support.timeouts import SOON

Case = Callable[..., object]


def by_name(*cases: Case) -> dict[str, Case]:
    """Cases by the names of their functions, by which tests choose them."""
    return {case.__name__: case for case in cases}


@contextmanager
def shared_folder() -> Iterator[Path]:
    """A new folder for all processes of the group."""
    places = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(places)
    yield Path(places[0])
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(places[0])


def run_cases(cases: dict[str, Case], chosen: Iterable[str] = ()) -> None:
    """Runs the chosen cases, or all; each process runs each case, and rank 0 prints `passed <name>` after it."""
    torch.set_num_threads(1)
    backends = "cpu:gloo,cuda:nccl" if torch.cuda.device_count() > 1 else "gloo"
    dist.init_process_group(backends, timeout=timedelta(seconds=SOON))
    try:
        for name in chosen or cases:
            cases[name]()
            dist.barrier()
            print(f"passed {name}\n" if dist.get_rank() == 0 else "", end="", flush=True)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # others may wait in a collective: the launcher ends them
    dist.destroy_process_group()
