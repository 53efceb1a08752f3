"""What is known of each step, and the file that keeps it."""

from __future__ import annotations

import json
import resource
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")


def peak_memory() -> int:
    """Most bytes this process has held: on its GPU where it has one, else in main memory."""
    if torch.cuda.is_available() and (allocated := torch.cuda.max_memory_allocated()):
        return allocated
    status = Path("/proc/self/status")
    if status.exists():  # Linux's getrusage would count what the launcher held before this process began
        return int(status.read_text().split("VmHWM:")[1].split()[0]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def gather(value: T) -> list[T]:
    """Every rank's value, on every rank."""
    if not dist.is_initialized():
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


@dataclass(frozen=True)
class Step:
    """One optimizer step. `loss` is the global mean in nats per token."""

    step: int
    loss: float
    lr: float
    grad_norm: float
    step_seconds: float
    tokens_per_second: float
    idle_fraction: float
    peak_memory: list[int]


@dataclass(frozen=True)
class Validation:
    """Loss (nats per token) and perplexity on the held-out text after some step."""

    step: int
    validation_loss: float
    perplexity: float


class MetricsFile:
    """JSON lines, each readable as soon as it is written; no path, no file (ranks other than 0)."""

    def __init__(self, path: Path | None) -> None:
        self._file = None if path is None else path.open("w", encoding="utf-8", buffering=1)

    def write(self, line: Step | Validation) -> None:
        """Appends one line."""
        if self._file is not None:
            self._file.write(json.dumps(asdict(line)) + "\n")

    def close(self) -> None:
        """Closes the file."""
        if self._file is not None:
            self._file.close()
