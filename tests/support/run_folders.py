"""Folders of runs in any state, written through the records and files that training writes."""

from __future__ import annotations

from pathlib import Path

from slipstream.schedule import Op, make_schedule
from slipstream.simulator import TableCost, simulate
from slipstream.timeline import Timeline, save_trace
from slipstream.train.metrics import StepRecord, ValidationRecord
from slipstream.train.metrics.flops import RunFigures
from slipstream.train.metrics.records import MetricsFile, MetricsRecord, Phases, SaveRecord, StartRecord
from slipstream.train.run_folder import RunFolder

SETTINGS = "training:\n  steps: {steps}\n  output: somewhere\noptimizer:\n  clip_norm: 1.0\n"
VERSIONS = {"slipstream": "0.1.0", "torch": "2.13.0"}
RUN = RunFigures(1000, 1000, 2, 128, 4e9, 1e12, "measured", 1100.0, 5e9)


def start(after: int = 0) -> StartRecord:
    return StartRecord(after, "2026-11-25T11:08:00+00:00", ["node<1>", "node<1>"], "CPU (x86_64)", VERSIONS)


def step(number: int, loss: float | None = None, **others: object) -> StepRecord:
    """A step whose loss is 4 minus a tenth of its number."""
    known = {"phases": Phases(forward=0.2, idle=0.05), **others}
    loss = 4 - number / 10 if loss is None else loss
    return StepRecord(number, loss, 1e-3, 0.5, 0.25, 512.0, 0.125, [10_000_000, 20_000_000], **known)  # type: ignore[arg-type]


def measured() -> Timeline:
    """Two ranks that run two microbatches of two slices each."""
    schedule = make_schedule("1f1b", 2, 2, 2)
    times = {(stage, index, op): 1e-3 * (1 + index) for stage in range(2) for index in range(2) for op in Op}
    return simulate(schedule, TableCost(times, latency=1e-4))


def make_run(
    folder: Path,
    steps: int = 6,
    of: int = 6,
    validated: bool = True,
    finished: bool = True,
    extra: tuple[MetricsRecord, ...] = (),
) -> RunFolder:
    """Writes a run of `steps` steps of `of`, which has validated and saved after every third, and then `extra`."""
    run = RunFolder(folder)
    folder.mkdir(parents=True)
    run.config.write_text(SETTINGS.format(steps=of))
    file = MetricsFile(run.metrics)
    records: list[MetricsRecord] = [start(), RUN]
    for number in range(1, steps + 1):
        records.append(step(number))
        if validated and not number % 3:
            records += [ValidationRecord(number, 4 - number / 20, 40.0), SaveRecord(number, 0.5, 1000)]
    for record in (*records, *extra):
        file.write(record)
    file.close()
    save_trace(run.perfetto, measured())
    if finished:
        run.model.mkdir()
    return run
