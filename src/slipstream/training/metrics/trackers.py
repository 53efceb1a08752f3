"""The trackers of a run: a file of JSON lines, and TensorBoard and Weights & Biases where configured."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeAlias

from slipstream.errors import SlipstreamError, did_you_mean
from slipstream.training.metrics.records import MetricsFile, MetricsRecord, SaveRecord, StartRecord, as_dictionary

_FLUSH_SECONDS = 10  # so that a run can be watched


class TensorBoard:
    """A tracker that writes event files: every number as a scalar over the steps, the settings and the run as texts."""

    name = "tensorboard/"

    def __init__(self, folder: Path, settings: Mapping[str, Any], resumed_after: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # Events of later steps, which the run wrote before it was resumed, are not shown.
        purge = resumed_after + 1 if resumed_after else None
        self._writer: Any = SummaryWriter(folder / "tensorboard", purge_step=purge, flush_secs=_FLUSH_SECONDS)
        self._first = resumed_after
        self._add_text("settings", settings)

    def write(self, record: MetricsRecord) -> None:
        """Adds the scalars of a step or a validation, or a text of a start or the run's figures."""
        values = as_dictionary(record)
        step = values.pop("step", None)
        if step is None:
            self._add_text("start" if isinstance(record, StartRecord) else "run", values)
            return
        for name, value in flat(values):
            add = self._writer.add_text if isinstance(value, str) else self._writer.add_scalar
            add(name, value, step)

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
        elif isinstance(record, SaveRecord):  # of an earlier step, of which wandb takes nothing more
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
        resumed_after: the step that the run is resumed from, or 0; what was written of later steps is dropped.

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
            yield from flat({str(index): each for index, each in enumerate(value)}, f"{name}/")
        elif value is not None:
            yield name, value
