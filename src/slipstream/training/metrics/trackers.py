"""Where a run's figures go: always to a file of JSON lines, to TensorBoard and Weights & Biases where asked for."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from slipstream.errors import SlipstreamError, did_you_mean
from slipstream.training.metrics.records import MetricsFile, MetricsRecord, as_record

_FLUSH_SECONDS = 10  # so that a run can be watched


class Tracker(Protocol):
    """Takes a run's lines as they come."""

    def write(self, line: MetricsRecord) -> None: ...

    def close(self) -> None: ...


class Trackers:
    """Some sinks that get every line; none on ranks other than the first."""

    def __init__(self, sinks: Sequence[Tracker] = ()) -> None:
        self._sinks = tuple(sinks)

    def write(self, line: MetricsRecord) -> None:
        """To every sink."""
        for sink in self._sinks:
            sink.write(line)

    def close(self) -> None:
        """What was written is kept."""
        for sink in self._sinks:
            sink.close()


class TensorBoard:
    """Event files: every number a scalar over the steps, what holds for the whole run a text."""

    def __init__(self, folder: Path, settings: Mapping[str, Any], resumed_after: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # events that an earlier part of the run wrote of later steps are not shown
        purge = resumed_after + 1 if resumed_after else None
        self._writer: Any = SummaryWriter(folder / "tensorboard", purge_step=purge, flush_secs=_FLUSH_SECONDS)
        self._first = resumed_after
        self._add_text("settings", settings)

    def write(self, line: MetricsRecord) -> None:
        """Scalars of a step or a validation; a text of the run's figures."""
        record = as_record(line)
        step = record.pop("step", None)
        if step is None:
            self._add_text("run", record)
            return
        for name, value in flat(record):
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Writes out what is left."""
        self._writer.close()

    def _add_text(self, name: str, values: Mapping[str, Any]) -> None:
        table = "".join(f"| {key} | {value} |\n" for key, value in flat(values))
        self._writer.add_text(name, f"| | |\n| --- | --- |\n{table}", self._first)


class WeightsAndBiases:
    """A run on the server that the `wandb` command is logged in to, or in files with WANDB_MODE=offline."""

    def __init__(self, folder: Path, settings: Mapping[str, Any], resumed_after: int) -> None:
        import wandb

        project = os.environ.get("WANDB_PROJECT", "slipstream")
        name = folder.name + (f" from step {resumed_after}" if resumed_after else "")
        self._run: Any = wandb.init(project=project, name=name, dir=str(folder), config=dict(settings))

    def write(self, line: MetricsRecord) -> None:
        """Numbers of a step or a validation; the run's figures go to its summary."""
        record = as_record(line)
        step = record.pop("step", None)
        if step is None:
            self._run.summary.update(record)
        else:
            self._run.log(dict(flat(record)), step=step)

    def close(self) -> None:
        """Waits until everything is sent."""
        self._run.finish()


_SINKS: Mapping[str, Callable[[Path, Mapping[str, Any], int], Tracker]] = {
    "tensorboard": TensorBoard,
    "wandb": WeightsAndBiases,
}
NAMES = tuple(_SINKS)
"""What `make_trackers` knows by name. Each is a package, and an extra of Slipstream that installs it."""


def check_trackers(names: Sequence[str]) -> None:
    """Raise SlipstreamError for a name that isn't known, or whose package isn't installed."""
    for name in names:
        if name not in NAMES:
            known = ", ".join(NAMES)
            raise SlipstreamError(f"the tracker {name!r} isn't known{did_you_mean(name, NAMES)} Known: {known}.")
        if find_spec(name) is None:
            raise SlipstreamError(
                f"the tracker {name!r} needs the package {name}, which isn't installed; type "
                f"pip install 'slipstream[{name}]', or leave {name!r} out: metrics.jsonl is written in any case"
            )


def make_trackers(
    names: Sequence[str], folder: Path, settings: Mapping[str, Any] | None = None, resumed_after: int = 0
) -> Trackers:
    """The JSON lines of `folder`/metrics.jsonl, and what is named; for the first rank.

    Args:
        names: of NAMES, each once or more.
        folder: the run's; event files go to its `tensorboard`.
        settings: what the run is told, by section: shown beside its figures.
        resumed_after: the step of the checkpoint that the run goes on from; what was written of later steps is dropped.

    Raises:
        SlipstreamError: as `check_trackers`.
    """
    check_trackers(names)
    others = [_SINKS[name](folder, settings or {}, resumed_after) for name in dict.fromkeys(names)]
    return Trackers([MetricsFile(folder / "metrics.jsonl", resumed_after), *others])


def flat(record: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Values with their path as name: {"phases": {"idle": 1}, "peak_memory": [2, 3]} has `phases/idle`,
    `peak_memory/0` and `peak_memory/1`."""
    for key, value in record.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from flat(value, f"{name}/")
        elif isinstance(value, list):
            yield from flat({str(index): each for index, each in enumerate(value)}, f"{name}/")
        else:
            yield name, value
