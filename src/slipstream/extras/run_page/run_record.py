"""Reads the files of a run so far; it may be going on, and its last line may be half written."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from slipstream.errors import SlipstreamError, syntax_text
from slipstream.foreign_text import parse_yaml
from slipstream.timeline import Timeline, load_trace
from slipstream.train.folder_lock import FolderLock
from slipstream.train.run_folder import RunFolder, read_lines
from slipstream.units import plural

Record = dict[str, Any]


@dataclass(frozen=True)
class RunRecord:
    """A run as its files tell it. Records are lines of metrics.jsonl, by their names there."""

    path: Path
    name: str
    settings: Record  # config.yaml by section; empty if unreadable
    settings_text: str
    starts: list[Record]
    figures: Record  # figures of the run
    steps: list[Record]  # steps in order, each number once
    validations: list[Record]
    samples: list[Record]
    saves: list[Record]
    failures: list[Record]  # steps with numbers that weren't finite
    timeline: Timeline | None  # timeline of the last step
    is_held: bool  # True while the run goes on
    has_model: bool
    unread: list[str] = field(default_factory=list)  # unreadable files, with the reason

    @property
    def last_step(self) -> int:
        """The number of the last step, 0 before the first."""
        return int(self.steps[-1]["step"]) if self.steps else 0

    @property
    def num_steps(self) -> int | None:
        """How many steps it is to take; None where its epochs say that."""
        steps = (self.settings.get("training") or {}).get("steps")
        return steps if isinstance(steps, int) else None

    @property
    def loss_unit(self) -> str:
        """The unit of a loss."""
        return "per pair" if self.settings.get("preference") else "nats per token"

    @property
    def restarts(self) -> list[Record]:
        """The starts after the first."""
        return self.starts[1:] if self.starts and not self.starts[0].get("started_after") else self.starts

    @property
    def state(self) -> str:
        """Its state: running, finished, failed or ended, and at which step."""
        of_all = f" of {self.num_steps:,}" if self.num_steps is not None else ""
        at = f"step {self.last_step:,}{of_all}"
        if self.is_held:
            return f"running: {at}"
        if self.failures and self.failures[-1]["step"] > self.last_step:
            return f"failed: the numbers of step {self.failures[-1]['step']:,} aren't finite"
        # A run with patience may have ended before its last step.
        has_patience = bool((self.settings.get("training") or {}).get("patience"))
        if self.has_model and (self.last_step >= (self.num_steps or 1) or has_patience):
            return f"finished: {plural(self.last_step, 'step')}"
        return f"ended early: {at}" if self.steps else "ended before its first step"


def is_run(folder: Path) -> bool:
    """Returns whether a run has written to this folder."""
    run = RunFolder(folder)
    return run.metrics.is_file() or (run.config.is_file() and run.inputs.is_dir())


def read_run(folder: Path, name: str) -> RunRecord:
    """Returns the record of a run; files that are missing or damaged are named in `unread`, none is needed."""
    run = RunFolder(folder)
    unread = list[str]()
    lines = list(_lines(run.metrics, unread))
    text = run.config.read_text(encoding="utf-8", errors="replace") if run.config.is_file() else ""
    steps = {line["step"]: line for line in lines if "step_seconds" in line}
    return RunRecord(
        path=folder,
        name=name,
        settings=_settings(text, unread),
        settings_text=text,
        starts=_starts(lines),
        figures=next((line for line in reversed(lines) if "num_parameters" in line), {}),
        steps=[steps[step] for step in sorted(steps)],
        validations=list({line["step"]: line for line in lines if "validation_loss" in line}.values()),
        samples=list({line["step"]: line for line in lines if "sample" in line}.values()),
        saves=[line for line in lines if "save_seconds" in line],
        failures=[line for line in _lines(run.failures, unread) if isinstance(line.get("step"), int)],
        timeline=_timeline(run.perfetto, unread),
        is_held=FolderLock(folder, unread.append).seems_held(),
        has_model=run.model.exists() or run.adapter.exists(),
        unread=unread,
    )


def _lines(path: Path, unread: list[str]) -> Iterator[Record]:
    """Yields the lines of a file, if it is there; the last is left out without a word where it is being written."""
    damaged: list[object] = []
    for record in read_lines(path, damaged):
        if _has_its_step(record):
            yield record
        else:
            damaged.append(record)
    if damaged:
        unread.append(f"{plural(len(damaged), 'line')} of {path.name} can't be read")


def _starts(lines: list[Record]) -> list[Record]:
    """Returns the starts, each with how long the run stood still before its first step."""
    starts: list[Record] = []
    for line in lines:
        if "started_after" in line:
            starts.append(line)
        elif "change_seconds" in line and starts:
            starts[-1] = starts[-1] | line
    return starts


def _has_its_step(record: Record) -> bool:
    needs_one = {"step_seconds", "validation_loss", "save_seconds", "sample"} & record.keys()
    return not needs_one or isinstance(record.get("step"), int)


def _settings(text: str, unread: list[str]) -> Record:
    try:
        values = parse_yaml(text)
    except yaml.YAMLError as error:
        unread.append(f"config.yaml isn't valid YAML: {syntax_text(error)}")
        return {}
    return values if isinstance(values, dict) else {}


def _timeline(path: Path, unread: list[str]) -> Timeline | None:
    if not path.is_file():
        return None
    try:
        return next(iter(load_trace(path)), None)
    except SlipstreamError as error:
        unread.append(str(error))
        return None
