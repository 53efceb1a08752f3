"""The records of a run: its starts, steps, phases and validations, the file that keeps them, and trackers."""

from __future__ import annotations

import errno
import json
import math
import os
import platform
import resource
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass
from datetime import datetime
from functools import partial
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any, TypeAlias

import torch

from slipstream.errors import SlipstreamError, did_you_mean
from slipstream.parallel import GpuMemory
from slipstream.schedule import Op
from slipstream.timeline import Cause, Timeline, idle_by_cause
from slipstream.train.metrics.flops import RunFigures, StepFigures
from slipstream.train.preferences import describe_rewards
from slipstream.train.run_folder import RunFolder, read_lines
from slipstream.units import bytes_text, seconds_text
from slipstream.version import __version__

_PHASE = {
    Op.F: "forward",
    Op.B: "backward",
    Op.I: "backward",
    Op.W: "weight_gradients",
    Op.R: "recomputation",
    Op.REDUCE_GRAD: "gradient_reduction",
    # V also has a part of the backward.
    Op.V: "forward",
    Op.L: "forward",
    Op.VW: "weight_gradients",
    Op.E: "forward",
    Op.EW: "weight_gradients",
}
_WAITS = {Cause.MESSAGE: "communication_wait", Cause.COPY: "offload"}


@dataclass(frozen=True)
class Phases:
    """The seconds of each phase of a step, as the mean over the ranks of a pipeline.

    All but the last two add up to the makespan. Collectives inside a layer (tensor parallelism) are part of the phase
    that runs them.
    """

    forward: float = 0.0
    backward: float = 0.0  # weight gradients included, unless split off
    weight_gradients: float = 0.0
    recomputation: float = 0.0
    communication_wait: float = 0.0  # waits for sent messages
    offload: float = 0.0  # waits for copies to or from host memory; copies during computation cost nothing
    gradient_reduction: float = 0.0
    idle: float = 0.0  # waits for other ranks' computation (the bubble), and time between actions
    optimizer: float = 0.0  # clipping and update
    data: float = 0.0  # preparation of the batch

    @staticmethod
    def computed(timeline: Timeline, rank: int, optimizer: float, data: float) -> dict[str, float]:
        """Returns the seconds of each phase in which a rank computed, without waits for others."""
        seconds = {"optimizer": optimizer, "data": data}
        for span in timeline.compute_spans:
            # Replicas wait for each other in that.
            if span.rank == rank and span.action.op is not Op.REDUCE_GRAD:
                seconds[_PHASE[span.action.op]] = seconds.get(_PHASE[span.action.op], 0.0) + span.seconds
        return seconds

    @classmethod
    def of(cls, timeline: Timeline, optimizer: float = 0.0, data: float = 0.0) -> Phases:
        """Returns the phases of a timeline, and the seconds that the trainer measured outside of it."""
        seconds: Counter[str] = Counter()
        for span in timeline.compute_spans:
            seconds[_PHASE[span.action.op]] += span.seconds  # type: ignore[assignment]  # Counter is typed for int
        for causes in idle_by_cause(timeline):
            for cause, waited in causes.items():
                seconds[_WAITS.get(cause, "idle")] += waited  # type: ignore[assignment]
        means = {name: total / timeline.num_ranks for name, total in seconds.items()}
        return cls(**means, optimizer=optimizer, data=data)


def peak_memory() -> int:
    """Returns the most bytes that this process has held: on its GPU where it uses one, otherwise in main memory."""
    if torch.cuda.is_available() and (allocated := torch.cuda.max_memory_allocated()):
        return allocated
    status = Path("/proc/self/status")
    # On Linux, getrusage would count the launcher's memory before this process began.
    if status.exists():
        return int(status.read_text().split("VmHWM:")[1].split()[0]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


@dataclass(frozen=True)
class StartRecord:
    """A start of the run, or of its ranks again: after which step, when, on which machines, and with which versions."""

    started_after: int  # 0 at the beginning of the run
    time: str  # ISO 8601, zone included
    hosts: list[str]  # host of each rank
    device: str
    versions: dict[str, str]
    mesh: dict[str, int] | None = None  # the ranks of each axis
    repeated_steps: int | None = None  # steps since the checkpoint of the restart, to be run again

    @classmethod
    def now(
        cls, started_after: int, hosts: list[str], device: torch.device, mesh: dict[str, int], repeated_steps: int
    ) -> StartRecord:
        """Returns the record of a start at this moment."""
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU ({platform.machine()})"
        versions = {"slipstream": __version__, "python": platform.python_version()}
        versions |= {package: metadata.version(package) for package in ("torch", "transformers")}
        time = datetime.now().astimezone().isoformat(timespec="seconds")
        return cls(started_after, time, hosts, name, versions, mesh, repeated_steps if started_after else None)


@dataclass(frozen=True)
class ChangeRecord:
    """How long a run that went on from a checkpoint stood still: from the last line of the metrics before to the end of
    its first step since."""

    change_seconds: float


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
    figures: StepFigures | None = None  # figures of the leading rank; None if operations can't be counted
    phases: Phases | None = None
    bytes_sent: dict[str, int] | None = None  # all ranks together, by axis of the mesh
    trial: bool | None = None  # True while "auto" was still to plan
    tokens: int | None = None  # the whole batch
    rank_phases: list[dict[str, float]] | None = None  # each rank's seconds of computing, without waits
    rewards: dict[str, float] | None = None  # chosen, rejected, margin, accuracy; means over pairs
    bad: dict[str, Any] | None = None  # why a step didn't update, its samples, and the remedy
    stragglers: list[str] | None = None  # a line per rank that has become slow
    gpu_memory: list[GpuMemory | None] | None = None  # each rank's GPU memory; None if no rank computes on a GPU

    def texts(self) -> list[str]:
        """Returns the figures next to the bar, the most watched first: a narrow terminal has no room for the last."""
        parts = [f"loss {self.loss:.3f}", f"{self.tokens_per_second:,.0f} tokens/s"]
        parts.append(f"{seconds_text(self.step_seconds)} a step")
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
class SampleRecord:
    """A sample of the model's text after a step: the prompt and its continuation."""

    step: int
    sample: str


@dataclass(frozen=True)
class SaveRecord:
    """A checkpoint that is complete: the step after which it was saved, the seconds of writing it, and its bytes."""

    step: int
    save_seconds: float
    checkpoint_bytes: int


MetricsRecord = StartRecord | ChangeRecord | RunFigures | StepRecord | ValidationRecord | SampleRecord | SaveRecord


def as_dictionary(record: MetricsRecord) -> dict[str, Any]:
    """Returns the known values of a record by name: the figures of a step among its own, its phases in a dictionary."""
    values = {name: value for name, value in asdict(record).items() if value is not None}
    values.update(values.pop("figures", {}))
    return values


def _without_nan(value: Any) -> Any:
    """Returns the value with None for numbers that aren't finite, which JSON doesn't have."""
    if isinstance(value, dict):
        return {name: _without_nan(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_without_nan(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def last_of_before(path: Path, step: int) -> tuple[int, float]:
    """Returns how many steps after this one a metrics file has, and when it was last written."""
    if not path.exists():
        return 0, 0.0
    numbers = [line["step"] for line in read_lines(path) if "loss" in line]
    return max(max(numbers, default=0) - step, 0), path.stat().st_mtime


class MetricsFile:
    """A file of JSON lines, each readable as soon as it is written, whole or not at all.

    Where somebody removes it, with its folder or alone, it is made again with all lines, once the folder is there.
    Where another file has its place, as after an editor, the lines go on in that.
    """

    name = "metrics.jsonl"

    def __init__(self, path: Path, resumed_after: int = 0) -> None:
        """Opens the file; a run that is resumed keeps the lines up to that step, as the later steps run again."""
        earlier = read_lines(path) if resumed_after else ()
        lines = "".join(json.dumps(line) + "\n" for line in earlier if line.get("step", 0) <= resumed_after).encode()
        self._path = path
        self._run = RunFolder(path.parent)
        # Lines that an earlier run still appends are not in a replaced file.
        self._file = self._replace(lines)
        self._unwritten = b""  # lines without room on the disk

    def write(self, record: MetricsRecord) -> None:
        """Appends a line. Raises OSError where the disk is full or gone: the line then comes with the next one."""
        self._unwritten += (json.dumps(_without_nan(as_dictionary(record)), allow_nan=False) + "\n").encode()
        self._flush()

    def close(self) -> None:
        """Writes the remaining lines, and closes the file. Raises OSError where it can't be written."""
        with closing(self._file):
            self._flush()

    def _replace(self, lines: bytes) -> IO[bytes]:
        """Puts a file with these lines in place, and returns it open at its end."""
        with self._run.replaced(self._path) as part:
            file = part.open("w+b", buffering=0)
            file.write(lines)
        return file

    def _make_again(self) -> None:
        """Puts the lines back where the file has been removed or replaced. Raises OSError where there is no folder for
        it yet, or another run has it."""
        lines = None
        with suppress(FileNotFoundError):
            if os.path.samestat(self._path.lstat(), os.fstat(self._file.fileno())):
                return
            lines = self._path.read_bytes()
        if lines is None:
            self._file.seek(0)
            lines = self._file.read()
        file = self._replace(lines)
        self._file.close()
        self._file = file
        self._run.listed.add(self._path)

    def _flush(self) -> None:
        self._make_again()
        end = self._file.seek(0, os.SEEK_END)
        try:
            if self._file.write(self._unwritten) < len(self._unwritten):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            # Half a line would spoil the next one.
            self._file.truncate(end)
            raise
        self._unwritten = b""


_FLUSH_SECONDS = 10  # seconds; short enough to watch a run
_NEVER = 10**9  # seconds


class TensorBoard:
    """A tracker that writes event files: every number as a scalar over the steps, the settings and the run as texts."""

    name = "tensorboard/"

    def __init__(self, folder: Path, settings: Mapping[str, Any], resumed_after: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # Events of later steps, which the run wrote before it was resumed, are not shown.
        purge = resumed_after + 1 if resumed_after else None
        self._run = RunFolder(folder)
        # Its own thread would print a traceback where the folder is gone when it flushes.
        self._make = partial(SummaryWriter, self._run.tensorboard, flush_secs=_NEVER)
        self._flushed = time.monotonic()
        self._writer: Any = self._make(purge_step=purge)
        self._first = resumed_after
        self._add_text("settings", settings)

    def write(self, record: MetricsRecord) -> None:
        """Adds the scalars of a step or a validation, or a text of a start or the run's figures; to a new file where
        somebody has removed the folder."""
        if not self._run.tensorboard.exists() and self._run.work.exists():
            self._writer = self._make()
            self._run.listed.add_folder(self._run.tensorboard)
        values = as_dictionary(record)
        step = values.pop("step", None)
        if step is None:
            names: dict[type, str] = {StartRecord: "start", ChangeRecord: "change"}
            self._add_text(names.get(type(record), "run"), values)
            return
        for name, value in flat(values):
            add = self._writer.add_text if isinstance(value, str) else self._writer.add_scalar
            add(name, value, step)
        if time.monotonic() > self._flushed + _FLUSH_SECONDS:
            self._flushed = time.monotonic()
            self._writer.flush()

    def close(self) -> None:
        """Writes the remaining events."""
        self._writer.close()

    def _add_text(self, name: str, values: Mapping[str, Any]) -> None:
        table = "".join(f"| {key} | {value} |\n" for key, value in flat(values))
        self._writer.add_text(name, f"| | |\n| --- | --- |\n{table}", self._first)


class WeightsAndBiases:
    """A tracker that writes to the server where `wandb` is logged in, or to files with WANDB_MODE=offline."""

    name = "what wandb keeps"

    def __init__(self, folder: Path, settings: Mapping[str, Any], resumed_after: int) -> None:
        import wandb

        project = os.environ.get("WANDB_PROJECT", "slipstream")
        name = folder.name + (f" from step {resumed_after}" if resumed_after else "")
        self._run: Any = wandb.init(project=project, name=name, dir=str(folder), config=dict(settings))

    def write(self, record: MetricsRecord) -> None:
        """Logs the numbers of a step or a validation, or adds the run's figures to its summary."""
        values = as_dictionary(record)
        step = values.pop("step", None)
        if step is None:
            self._run.summary.update(values)
        # The save was of an earlier step, of which wandb takes nothing more.
        elif isinstance(record, SaveRecord):
            self._run.log(dict(flat(values)), commit=False)
        else:
            self._run.log(dict(flat(values)), step=step)

    def close(self) -> None:
        """Waits until everything is sent."""
        self._run.finish()


Tracker: TypeAlias = MetricsFile | TensorBoard | WeightsAndBiases
_TRACKERS: Mapping[str, type[TensorBoard | WeightsAndBiases]] = {"tensorboard": TensorBoard, "wandb": WeightsAndBiases}
NAMES = tuple(_TRACKERS)
"""The names of trackers. Each is a package, and an extra of Slipstream that installs it."""


def check_trackers(names: Sequence[str]) -> None:
    """Raises SlipstreamError for a name that isn't known, or whose package isn't installed."""
    for name in names:
        if name not in NAMES:
            near = did_you_mean(name, NAMES)
            raise SlipstreamError(f"the tracker {name!r} isn't known{near} Known: {', '.join(NAMES)}.")
        if find_spec(name) is None:
            raise SlipstreamError(
                f"the tracker {name!r} needs the package {name}, which isn't installed; type "
                f"pip install 'slipstream[{name}]', or leave {name!r} out: metrics.jsonl is written in any case"
            )


def make_trackers(names: Sequence[str], folder: Path, settings: Mapping[str, Any], resumed_after: int) -> list[Tracker]:
    """Returns the trackers of the first rank: `folder`/metrics.jsonl, and those that are named.

    Args:
        names: some of NAMES.
        folder: the run's folder; event files go to its `tensorboard`.
        settings: the run's settings by section, shown next to its figures.
        resumed_after: the step that the run is resumed from, or 0; lines of later steps are dropped.

    Raises:
        SlipstreamError: for the same reasons as `check_trackers`.
    """
    check_trackers(names)
    others = [_TRACKERS[name](folder, settings, resumed_after) for name in dict.fromkeys(names)]
    return [MetricsFile(folder / "metrics.jsonl", resumed_after), *others]


def flat(record: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the values that are known with their paths as names.

    {"phases": {"idle": 1}, "peak_memory": [2, 3]} gives `phases/idle`, `peak_memory/0` and `peak_memory/1`.
    """
    for key, value in record.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from flat(value, f"{name}/")
        elif isinstance(value, list):
            yield from flat({str(index): item for index, item in enumerate(value)}, f"{name}/")
        elif value is not None:
            yield name, value
