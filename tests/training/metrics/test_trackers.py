"""TensorBoard's files have every number of every step, and a missing tracker is refused by name."""

from __future__ import annotations

import importlib.machinery
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream.errors import SlipstreamError
from slipstream.parallel import GpuMemory
from slipstream.train.metrics import StepRecord, ValidationRecord
from slipstream.train.metrics.flops import RunFigures, StepFigures
from slipstream.train.metrics.records import (
    NAMES,
    ChangeRecord,
    MetricsRecord,
    Phases,
    StartRecord,
    Tracker,
    as_dictionary,
    check_trackers,
    flat,
    make_trackers,
)
from support.tiny_training import metrics_of

RUN = RunFigures(1000, 1000, 2, 128, 4e9, 1e12, "measured", 1100.0, 5e9)


def step(number: int, loss: float) -> StepRecord:
    return StepRecord(
        number,
        loss,
        1e-3,
        0.5,
        0.25,
        512.0,
        0.125,
        [10, 20],
        StepFigures(512.0, 4e9, 5e9, 0.008, 0.01, 0.25, 0.5),
        Phases(forward=0.125),
        {"pp": 64, "tp": 0},
    )


def write(trackers: list[Tracker], *records: MetricsRecord) -> None:
    for tracker in trackers:
        for record in records:
            tracker.write(record)
        tracker.close()


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Tag -> (step, value) of all event files, as TensorBoard shows them."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(folder / "tensorboard")).Reload()
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def texts(folder: Path) -> dict[str, str]:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(folder / "tensorboard")).Reload()
    return {tag: events.Tensors(tag)[0].tensor_proto.string_val[0].decode() for tag in events.Tags()["tensors"]}


def test_event_files_have_every_number_of_every_step(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    trackers = make_trackers(["tensorboard"], tmp_path, {"training": {"seq_len": 64}}, 0)
    write(trackers, RUN, step(1, 4.0), step(2, 3.5), ValidationRecord(2, 3.75, math.exp(3.75)))
    found = scalars(tmp_path)
    assert found["loss"] == [(1, 4.0), (2, 3.5)]
    assert found["mfu"] == [(1, 0.25), (2, 0.25)]
    assert found["phases/forward"] == [(1, 0.125), (2, 0.125)]
    assert found["bytes_sent/pp"] == [(1, 64), (2, 64)]
    assert found["peak_memory/1"] == [(1, 20), (2, 20)]
    assert found["validation_loss"] == [(2, 3.75)]
    lines = metrics_of(tmp_path)
    assert set(found) == {name for line in lines[1:] for name, _ in flat(line) if name != "step"}
    shown = texts(tmp_path)
    assert "| training/seq_len | 64 |" in shown["settings/text_summary"]
    assert "| peak_source | measured |" in shown["run/text_summary"]


def test_a_start_a_bad_step_and_slow_ranks_are_texts(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    bad = {"why": "the loss isn't finite", "samples": [3], "done": "skipped"}
    begun = StartRecord.now(0, ["node7"], torch.device("cpu"), {"pp": 2}, 0)
    records = (begun, ChangeRecord(2.5), step(1, 4.0), replace(step(2, math.nan), bad=bad))
    trackers = make_trackers(["tensorboard"], tmp_path, {}, 0)
    write(trackers, *records, replace(step(3, 3.0), stragglers=["step 3: rank 1 (node7) is slow"]))
    shown = texts(tmp_path)
    assert shown["bad/why/text_summary"] == "the loss isn't finite"
    assert shown["stragglers/0/text_summary"] == "step 3: rank 1 (node7) is slow"
    assert "| hosts/0 | node7 |" in shown["start/text_summary"]
    assert "| mesh/pp | 2 |" in shown["start/text_summary"]
    assert "| change_seconds | 2.5 |" in shown["change/text_summary"]
    assert f"| versions/torch | {torch.__version__} |" in shown["start/text_summary"]
    assert [number for number, _ in scalars(tmp_path)["lr"]] == [1, 2, 3]
    lines = metrics_of(tmp_path)
    assert lines[0]["started_after"] == 0
    assert (lines[3]["loss"], lines[3]["bad"]) == (None, bad)
    assert lines[4]["stragglers"] == ["step 3: rank 1 (node7) is slow"]


def test_a_resumed_run_shows_what_it_ran_again_once(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    write(make_trackers(["tensorboard"], tmp_path, {}, 0), *(step(number, 1.0) for number in range(1, 5)))
    write(make_trackers(["tensorboard"], tmp_path, {}, resumed_after=2), step(3, 2.0))
    assert scalars(tmp_path)["loss"] == [(1, 1.0), (2, 1.0), (3, 2.0)]
    lines = metrics_of(tmp_path)
    assert [(line["step"], line["loss"]) for line in lines] == [(1, 1.0), (2, 1.0), (3, 2.0)]


def test_without_names_there_are_json_lines_alone(tmp_path: Path) -> None:
    write(make_trackers([], tmp_path, {}, 0), step(1, 4.0))
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


@pytest.mark.parametrize("name", NAMES)
def test_a_missing_package_is_named_with_how_to_install_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if it were not installed: the package is not where Python looks for it."""
    find = importlib.machinery.PathFinder.find_spec

    def without(fullname: str, *args: Any, **kwargs: Any) -> Any:
        return None if fullname == name else find(fullname, *args, **kwargs)

    monkeypatch.setattr(importlib.machinery.PathFinder, "find_spec", without)
    monkeypatch.delitem(__import__("sys").modules, name, raising=False)
    with pytest.raises(SlipstreamError, match=rf"isn't installed; type pip install 'slipstream\[{name}\]'"):
        check_trackers([name])


def test_an_unknown_tracker_is_named(tmp_path: Path) -> None:
    with pytest.raises(SlipstreamError, match="'tensorbord' isn't known; did you mean 'tensorboard'"):
        make_trackers(["tensorbord"], tmp_path, {}, 0)
    assert not list(tmp_path.iterdir())


def test_weights_and_biases_takes_a_run_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    trackers = make_trackers(["wandb"], tmp_path, {"training": {"seq_len": 64}}, 0)
    write(trackers, RUN, step(1, 4.0), ValidationRecord(1, 3.75, math.exp(3.75)))
    (kept,) = (tmp_path / "wandb").glob("offline-run-*/*.wandb")
    data = kept.read_bytes()
    assert b"validation_loss" in data
    assert b"phases/forward" in data or b"phases" in data


def test_what_a_rank_does_not_know_has_no_number() -> None:
    gpu = GpuMemory(allocated=1, reserved=2, between=3, retries=4, failures=5)
    record = as_dictionary(replace(step(1, 2.0), gpu_memory=[None, gpu]))
    found = {name: value for name, value in flat(record) if name.startswith("gpu_memory")}
    assert found == {f"gpu_memory/1/{name}": value for name, value in vars(gpu).items()}
