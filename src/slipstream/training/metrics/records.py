"""What is known of a run and of each step, and the file that keeps it."""

from __future__ import annotations

import json
import resource
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from slipstream.training.metrics.flops import RunFigures, StepFigures
from slipstream.training.metrics.phases import Phases

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
class StepRecord:
    """One optimizer step. `loss` is the global mean in nats per token."""

    step: int
    loss: float
    lr: float
    grad_norm: float
    step_seconds: float
    tokens_per_second: float
    idle_fraction: float
    peak_memory: list[int]
    figures: StepFigures | None = None  # None where the model's operations can't be counted
    phases: Phases | None = None
    bytes_sent: dict[str, int] | None = None  # by axis (pp, dp, tp), of all ranks together
    trial: bool | None = None  # True where "auto" was still trying what to run


@dataclass(frozen=True)
class ValidationRecord:
    """Loss (nats per token) and perplexity on the held-out text after some step."""

    step: int
    validation_loss: float
    perplexity: float


MetricsRecord = RunFigures | StepRecord | ValidationRecord


def as_record(line: MetricsRecord) -> dict[str, Any]:
    """A line's values by name, those that are known: a step's figures among its own, its phases in a dictionary."""
    record = {name: value for name, value in asdict(line).items() if value is not None}
    record.update(record.pop("figures", {}))
    return record


class MetricsFile:
    """JSON lines, each readable as soon as it is written."""

    def __init__(self, path: Path, resumed_after: int = 0) -> None:
        """A run that is resumed keeps the lines up to the step it goes on from; what came later runs again."""
        kept = _lines_until(path, resumed_after) if resumed_after else ""
        self._file = path.open("w", encoding="utf-8", buffering=1)
        self._file.write(kept)

    def write(self, line: MetricsRecord) -> None:
        """Appends one line."""
        self._file.write(json.dumps(as_record(line)) + "\n")

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


def _lines_until(path: Path, step: int) -> str:
    """The file's lines up to a step; the last may have been cut off when the run ended."""
    if not path.exists():
        return ""
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    return "".join(line for line in lines if line.endswith("\n") and _step_of(json.loads(line)) <= step)


def _step_of(record: Mapping[str, Any]) -> int:
    return int(record.get("step", 0))
