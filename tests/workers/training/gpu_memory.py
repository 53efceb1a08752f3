"""`slipstream train` on CPUs whose ranks see the statistics of a GPU's allocator, and may run out of its memory:

gpu_memory.py fragmented train config.yaml ...   # rank 1 reserves much more than it needs from step 2 on
gpu_memory.py out train config.yaml ...          # rank 1 has no room in step 2
"""

from __future__ import annotations

import os
import sys
from typing import Any

import torch

from slipstream.cli import main
from slipstream.train.trainer import Trainer

GIGABYTE = 10**9
what, step, take = sys.argv.pop(1), 0, Trainer._train_step


def statistics(*_: Any) -> dict[str, int]:
    worse = os.environ.get("RANK") == "1" and step >= 2
    return {
        "allocated_bytes.all.peak": 10 * GIGABYTE,
        "reserved_bytes.all.peak": (15 if worse else 11) * GIGABYTE,
        "inactive_split_bytes.all.current": 4 * GIGABYTE,
        "num_alloc_retries": 3 if worse else 1,
        "num_ooms": int(worse and what == "out"),
    }


def train_step(self: Trainer, number: int) -> Any:
    global step
    step = number
    if what == "out" and os.environ["RANK"] == "1" and step == 2:
        raise torch.OutOfMemoryError(
            "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 15.00 GiB. If reserved but "
            "unallocated memory is large try setting PYTORCH_ALLOC_CONF=expandable_segments:True to avoid this."
        )
    return take(self, number)


torch.cuda.memory_stats = statistics
Trainer._train_step = train_step  # type: ignore[method-assign]
main()
