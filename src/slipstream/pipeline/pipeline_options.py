"""Everything that a Pipeline is given except its model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from slipstream.options import Layers, Memory, Parallelism, Precision, Runtime, check_records
from slipstream.schedule import Schedule

LossFunction = Callable[[Any, Tensor], tuple[Tensor, Tensor]]  # (outputs, targets) -> (sum, count)


@dataclass(frozen=True)
class PipelineOptions:
    """The arguments of the Pipeline, which says what they mean."""

    schedule: str | Schedule = "1f1b"
    num_microbatches: int = 1
    slices: int | Sequence[int] | str | None = None
    stages_per_rank: int = 1
    partition: str | Sequence[float] = "auto"
    seq_len: int | None = None
    loss_fn: LossFunction | None = None
    memory: Memory = Memory()
    parallel: Parallelism = Parallelism()
    precision: Precision = Precision()
    runtime: Runtime = Runtime()
    layers: Layers = Layers()
    mesh: DeviceMesh | None = None
    num_ranks: int | None = None
    device: torch.device | str | None = None

    def __post_init__(self) -> None:
        check_records(vars(self))


def torch_dtype(name: str | None) -> torch.dtype | None:
    """Returns the torch.dtype of this name."""
    dtype: torch.dtype | None = None if name is None else getattr(torch, name)
    return dtype
