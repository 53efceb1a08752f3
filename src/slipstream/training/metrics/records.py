"""The records of a run, its starts, its steps and its validations, and the file that keeps them."""

from __future__ import annotations

import errno
import json
import math
import os
import platform
import resource
import sys
from contextlib import closing
from dataclasses import asdict, dataclass
from datetime import datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from slipstream.parallel import GpuMemory
from slipstream.training.metrics.flops import RunFigures, StepFigures
from slipstream.training.metrics.phases import Phases
from slipstream.training.preferences import describe_rewards
from slipstream.training.run_folder import RunFolder
from slipstream.units import bytes_text
from slipstream.version import __version__


def peak_memory() -> int:
    """Returns the most bytes that this process has held: on its GPU where it uses one, otherwise in main memory."""
    if torch.cuda.is_available() and (allocated := torch.cuda.max_memory_allocated()):
        return allocated
    status = Path("/proc/self/status")
    if status.exists():  # Linux's getrusage would count what the launcher held before this process began
        return int(status.read_text().split("VmHWM:")[1].split()[0]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


@dataclass(frozen=True)
class StartRecord:
    """A start of the run, or of its ranks again: after which step, when, on which machines, and with which versions."""

    started_after: int  # 0 where the run begins
    time: str  # in ISO 8601, with the zone
    hosts: list[str]  # of each rank
    device: str
    versions: dict[str, str]

    @classmethod
    def now(cls, started_after: int, hosts: list[str], device: torch.device) -> StartRecord:
        """Returns the record of a start at this moment."""
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU ({platform.machine()})"
        versions = {"slipstream": __version__, "python": platform.python_version()}
        versions |= {each: metadata.version(each) for each in ("torch", "transformers")}
        time = datetime.now().astimezone().isoformat(timespec="seconds")
        return cls(started_after, time, hosts, name, versions)


@dataclass(frozen=True)
class StepRecord:
    """One step of the optimizer. `loss` is the global mean: in nats per token, or per pair of answers."""

    step: int
    loss: float
    lr: float
    grad_norm: float
    step_seconds: float
    tokens_per_second: float
    idle_fraction: float
    peak_memory: list[int]
    figures: StepFigures | None = None  # of the leading rank; None where the model's operations can't be counted
    phases: Phases | None = None
    bytes_sent: dict[str, int] | None = None  # by axis (pp, dp, tp), of all ranks together
    trial: bool | None = None  # True where "auto" was still to plan what to run
    tokens: int | None = None  # of the whole batch
    rank_phases: list[dict[str, float]] | None = None  # of each rank the seconds that it computed, without waits
    rewards: dict[str, float] | None = None  # of preferences: chosen, rejected, margin, accuracy; means over pairs
    bad: dict[str, Any] | None = None  # why a step didn't update, its samples, and what was done
    stragglers: list[str] | None = None  # a line for each rank that has become slow
    gpu_memory: list[GpuMemory | None] | None = None  # of each rank; None where none computes on a GPU

    def texts(self) -> list[str]:
        """Returns what is shown next to the bar, the figures that are watched most first: a narrow terminal has no room
        for the last ones."""
        parts = [f"loss {self.loss:.3f}", f"{self.tokens_per_second:,.0f} tokens/s"]
        if self.rewards is not None:
            parts.append(describe_rewards(self.rewards))
        parts += [f"norm {self.grad_norm:.3g}", f"lr {self.lr:.2g}"]
        if self.figures is not None:
            parts.append(f"MFU {self.figures.mfu:.0%}")
        return [*parts, f"idle {self.idle_fraction:.0%}", bytes_text(max(self.peak_memory))]


@dataclass(frozen=True)
class ValidationRecord:
    """The loss (nats per token) and the perplexity on the held-out text after a step; of preferences the loss per pair,
    and the mean rewards."""

    step: int
    validation_loss: float
    perplexity: float | None = None
    rewards: dict[str, float] | None = None


@dataclass(frozen=True)
class SaveRecord:
    """A checkpoint that is complete: the step after which it was saved, the seconds of writing it, and its bytes."""

    step: int
    save_seconds: float
    checkpoint_bytes: int


MetricsRecord = StartRecord | RunFigures | StepRecord | ValidationRecord | SaveRecord


def as_dictionary(record: MetricsRecord) -> dict[str, Any]:
    """Returns the known values of a record by name: the figures of a step among its own, its phases in a dictionary."""
    values = {name: value for name, value in asdict(record).items() if value is not None}
    values.update(values.pop("figures", {}))
    return values


def _without_nan(value: Any) -> Any:
    """Returns the value with None for what isn't finite, which JSON has no number for."""
    if isinstance(value, dict):
        return {name: _without_nan(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_without_nan(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


class MetricsFile:
    """A file of JSON lines, each readable as soon as it is written, whole or not at all."""

    name = "metrics.jsonl"

    def __init__(self, path: Path, resumed_after: int = 0) -> None:
        """Opens the file; a run that is resumed keeps the lines up to that step, as the later steps run again."""
        kept = _lines_until(path, resumed_after) if resumed_after and path.exists() else b""
        with RunFolder(path.parent).replaced(path) as part:  # so that what an earlier run still appends is not in it
            self._file = part.open("wb", buffering=0)
            self._file.write(kept)
        self._unwritten = b""  # lines for which the disk had no room

    def write(self, record: MetricsRecord) -> None:
        """Appends a line. Raises OSError where the disk is full or gone: the line then comes with the next one."""
        self._unwritten += (json.dumps(_without_nan(as_dictionary(record)), allow_nan=False) + "\n").encode()
        self._flush()

    def close(self) -> None:
        """Writes what is left, and closes the file. Raises OSError where it can't be written."""
        with closing(self._file):
            self._flush()

    def _flush(self) -> None:
        end = self._file.seek(0, os.SEEK_END)
        try:
            if self._file.write(self._unwritten) < len(self._unwritten):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            self._file.truncate(end)  # half a line would spoil the next
            raise
        self._unwritten = b""


def _lines_until(path: Path, step: int) -> bytes:
    """Returns the lines up to a step, without what is none: the last may have been cut off when the run ended."""
    lines = path.read_bytes().splitlines(keepends=True)
    return b"".join(line for line in lines if line.endswith(b"\n") and _step_of(line) <= step)


def _step_of(line: bytes) -> float:
    """Returns the step of a line; 0 for one without, and infinity for what isn't JSON."""
    try:
        return float(json.loads(line).get("step", 0))
    except (ValueError, AttributeError):
        return math.inf
