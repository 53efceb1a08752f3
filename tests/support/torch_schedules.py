"""PyTorch's own pipeline schedules, on stages that only know their numbers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from torch.distributed.pipelining import schedules as torch_schedules


def torch_schedule(name: str, num_ranks: int, num_local_stages: int, num_microbatches: int) -> Any:
    """One of PyTorch's multi-stage schedules."""
    stages = [
        SimpleNamespace(
            stage_index=local * num_ranks,
            num_stages=num_ranks * num_local_stages,
            group_size=num_ranks,
            group_rank=0,
            is_first=local == 0,
            is_last=local == num_local_stages - 1,
            submod=None,
        )
        for local in range(num_local_stages)
    ]
    return getattr(torch_schedules, name)(stages, num_microbatches)
