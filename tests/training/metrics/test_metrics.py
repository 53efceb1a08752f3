"""A step's record has its figures and phases; trackers show every number; slow ranks are named."""

from __future__ import annotations

import importlib.machinery
import json
import math
import random
import resource
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream.errors import SlipstreamError
from slipstream.parallel import GpuMemory, RankGroup
from slipstream.schedule import Action, Op, add_communication, add_recompute, make_schedule, spread_vocabulary
from slipstream.simulator import simulate
from slipstream.simulator.costs import UnitCost
from slipstream.timeline import Span, Timeline
from slipstream.train.metrics.flops import StepFigures
from slipstream.train.metrics.records import (
    NAMES,
    ChangeRecord,
    MetricsFile,
    MetricsRecord,
    Phases,
    StartRecord,
    StepRecord,
    TensorBoard,
    Tracker,
    ValidationRecord,
    as_dictionary,
    check_trackers,
    flat,
    make_trackers,
    peak_memory,
)
from slipstream.train.metrics.stragglers import Stragglers
from slipstream.train.metrics.traffic import Traffic
from slipstream.train.run_folder import RunFolder, TolerantWrites
from support.architectures import ARCHITECTURES, tokens
from support.forked import launch
from support.paths import WORKERS
from support.pipelines import make_pipe
from support.run_folders import RUN
from support.run_folders import step as plain_step
from support.tiny_training import metrics_of

FIGURES = StepFigures(2000.0, 4e9, 5e9, 0.0123, 0.0154, 0.41, 0.5)
STEP = StepRecord(1, 2.5, 0.1, 1.0, 0.5, 2000.0, 0.25, [2**20, 3 * 2**20])
FULL = StepRecord(
    **{**vars(STEP), "figures": FIGURES, "phases": Phases(forward=0.1, idle=0.2), "bytes_sent": {"pp": 8, "dp": 0}}
)


def test_peak_memory_grows_with_what_is_held() -> None:
    before = peak_memory()
    held = bytearray(before + 64 * 2**20)
    held[:: 2**10] = b"x" * len(held[:: 2**10])
    assert peak_memory() >= before + 32 * 2**20


@pytest.mark.parametrize(
    ("record", "line"),
    [
        (ValidationRecord(3, 1.5, 4.5), '{"step": 3, "validation_loss": 1.5, "perplexity": 4.5}\n'),
        # JSON has no number for these.
        (ValidationRecord(3, math.nan, math.inf), '{"step": 3, "validation_loss": null, "perplexity": null}\n'),
    ],
)
def test_lines_are_readable_at_once(tmp_path: Path, record: ValidationRecord, line: str) -> None:
    file = MetricsFile(tmp_path / "metrics.jsonl")
    file.write(record)
    assert (tmp_path / "metrics.jsonl").read_text() == line
    file.close()


def test_lines_for_which_the_disk_has_no_room_come_later(tmp_path: Path) -> None:
    """None is torn, and none is lost."""
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path)
    file.write(ValidationRecord(1, 1.0, 2.0))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 10, limits[1]))
    try:
        for step in (2, 3):
            with pytest.raises(OSError, match=r"File too large|No space left"):
                file.write(ValidationRecord(step, 1.0, 2.0))
            assert len(path.read_text().splitlines()) == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    file.write(ValidationRecord(4, 1.0, 2.0))
    file.close()
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2, 3, 4]


@pytest.mark.parametrize("how", ["the file", "the folder", "edited"])
def test_a_file_that_is_removed_is_made_again_with_all_lines(tmp_path: Path, how: str) -> None:
    path = tmp_path / "run" / "metrics.jsonl"
    path.parent.mkdir()
    file = MetricsFile(path)
    file.write(ValidationRecord(1, 1.0, 2.0))
    if how == "the folder":
        shutil.rmtree(path.parent)
        with pytest.raises(FileNotFoundError):
            file.write(ValidationRecord(2, 1.0, 2.0))
        path.parent.mkdir()
    else:
        text = path.read_text()
        path.unlink()
        if how == "edited":
            path.write_text(text.replace("1.0", "5.0"))
        file.write(ValidationRecord(2, 1.0, 2.0))
    file.write(ValidationRecord(3, 1.0, 2.0))
    file.close()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert [line["validation_loss"] for line in lines] == [5.0 if how == "edited" else 1.0, 1.0, 1.0]
    assert RunFolder(path.parent).listed.has(path)


def test_event_files_go_on_in_a_new_folder(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    board = TensorBoard(tmp_path, {}, 0)
    board.write(ValidationRecord(1, 1.0, 2.0))
    time.sleep(0.5)  # TensorBoard's thread writes the head of the file
    shutil.rmtree(tmp_path / "tensorboard")
    board.write(ValidationRecord(2, 1.0, 2.0))
    board.close()
    assert shown(tmp_path)[0]["validation_loss"] == [(2, 1.0)]


def test_trouble_with_the_disk_is_told_once_until_it_is_over() -> None:
    said = list[str]()
    writes = TolerantWrites(said.append)
    for error in (True, True, False, True):
        with writes.of("metrics.jsonl"):
            if error:
                raise OSError(28, "No space left on device")
    assert said == ["metrics.jsonl can't be written: [Errno 28] No space left on device. Training goes on"] * 2


def test_a_resumed_run_keeps_the_lines_before_and_no_others(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    before = [ValidationRecord(step, 1.0, 2.0) for step in (1, 2, 3)]
    file = MetricsFile(path)
    for line in before:
        file.write(line)
    file.close()
    with path.open("a") as cut_off:
        cut_off.write('{"step": 1, "valid{"step": 1, "validation_loss": 1.0}\n{"step": 4, "valid')
    file = MetricsFile(path, resumed_after=2)
    file.write(ValidationRecord(3, 7.0, 8.0))
    file.close()
    found = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(line["step"], line["validation_loss"]) for line in found] == [(1, 1.0), (2, 1.0), (3, 7.0)]
    MetricsFile(path).close()
    assert path.read_text() == ""
    MetricsFile(tmp_path / "elsewhere.jsonl", resumed_after=2).close()


def test_a_steps_record_has_its_figures_among_its_own() -> None:
    assert as_dictionary(STEP) == {name: value for name, value in vars(STEP).items() if value is not None}
    record = as_dictionary(FULL)
    assert record["mfu"] == 0.41
    assert record["tokens_per_second"] == 2000.0
    assert record["phases"]["idle"] == 0.2
    assert record["bytes_sent"] == {"pp": 8, "dp": 0}
    assert "figures" not in record


def test_phases_add_up_to_the_step() -> None:
    """Two ranks, one microbatch in three slices, all in unit times: R as F, B twice as long."""
    schedule = add_recompute(make_schedule("gpipe", 2, 1, 3))
    timeline = simulate(add_communication(schedule), UnitCost(1, 2))
    phases = Phases.of(timeline, optimizer=5.0, data=7.0)
    assert (phases.forward, phases.backward, phases.recomputation) == (3, 6, 2)
    assert (phases.optimizer, phases.data) == (5, 7)
    assert sum(vars(phases).values()) == pytest.approx(timeline.makespan + 12)
    assert phases.idle == pytest.approx(timeline.makespan * timeline.idle_fraction)


def test_weight_gradients_and_reductions_are_phases_of_their_own() -> None:
    timeline = simulate(add_communication(make_schedule("zb-h1", 2, 2, 2)), UnitCost(1, 1, 1))
    phases = Phases.of(timeline)
    assert (phases.forward, phases.backward, phases.weight_gradients) == (4, 4, 4)
    reduced = Span(0, Action(Op.REDUCE_GRAD, 0), timeline.makespan, timeline.makespan + 3)
    later = Phases.of(Timeline((*timeline.spans, reduced), timeline.num_ranks))
    assert later.gradient_reduction == 1.5  # the mean over two ranks


def test_the_parts_of_a_spread_head_have_phases() -> None:
    timeline = simulate(spread_vocabulary(make_schedule("zb-h1", 2, 1, 2), embedding=True), UnitCost())
    phases = Phases.of(timeline)
    assert phases.forward == 4  # of each rank, F's and V's of two slices; an L, E or EW takes no time
    assert phases.forward + phases.backward + phases.weight_gradients + phases.idle == pytest.approx(timeline.makespan)


def test_waits_for_messages_and_copies_are_told_from_idling() -> None:
    """Rank 1 waits 1 s for rank 0 to compute, then 2 s for the message; and 4 s for a copy before its backward."""
    spans = (
        Span(0, Action(Op.F, 0), 0, 1),
        Span(0, Action(Op.SEND_F, 0), 1, 3),
        Span(1, Action(Op.RECV_F, 1), 0, 3),
        Span(1, Action(Op.F, 1), 3, 4),
        Span(1, Action(Op.RELOAD, 1), 4, 8),
        Span(1, Action(Op.B, 1), 8, 10),
    )
    phases = Phases.of(Timeline(spans, 2))
    assert phases.offload == 4 / 2
    assert phases.forward == 2 / 2
    assert phases.backward == 2 / 2
    assert phases.communication_wait + phases.idle == (3 + 9) / 2
    assert sum(vars(phases).values()) == 10


def test_phases_of_a_measured_step_add_up() -> None:
    pipe = make_pipe(ARCHITECTURES["llama"], schedule="zb-h1", slices=4, num_ranks=2, recompute="stage", offload=0.5)
    inputs = tokens()
    pipe.step(inputs, inputs)
    timeline = pipe.timeline()
    phases = Phases.of(timeline)
    assert sum(vars(phases).values()) == pytest.approx(timeline.makespan)
    assert min(phases.forward, phases.backward, phases.weight_gradients, phases.recomputation, phases.idle) > 0


def test_a_step_in_words() -> None:
    assert "  ".join(STEP.texts()) == "loss 2.500  2,000 tokens/s  500 ms a step  norm 1  lr 0.1  idle 25%  3.15 MB"
    expected = "loss 2.500  2,000 tokens/s  500 ms a step  norm 1  lr 0.1  MFU 41%  idle 25%  3.15 MB"
    assert "  ".join(FULL.texts()) == expected


def step(number: int, loss: float, **others: Any) -> StepRecord:
    figures = StepFigures(512.0, 4e9, 5e9, 0.008, 0.01, 0.25, 0.5)
    known = {"figures": figures, "phases": Phases(forward=0.125), "bytes_sent": {"pp": 64, "tp": 0}}
    return plain_step(number, loss, **known, **others)


def write(trackers: list[Tracker], *records: MetricsRecord) -> None:
    for tracker in trackers:
        for record in records:
            tracker.write(record)
        tracker.close()


def shown(folder: Path) -> tuple[dict[str, list[tuple[int, float]]], dict[str, str]]:
    """Tag -> (step, value) of all event files, and tag -> text, as TensorBoard shows them."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(folder / "tensorboard")).Reload()
    tags = events.Tags()
    texts = {tag: events.Tensors(tag)[0].tensor_proto.string_val[0].decode() for tag in tags["tensors"]}
    return {tag: [(each.step, each.value) for each in events.Scalars(tag)] for tag in tags["scalars"]}, texts


def test_event_files_have_every_number_of_every_step(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    trackers = make_trackers(["tensorboard"], tmp_path, {"training": {"seq_len": 64}}, 0)
    write(trackers, RUN, step(1, 4.0), step(2, 3.5), ValidationRecord(2, 3.75, math.exp(3.75)))
    found, texts = shown(tmp_path)
    assert found["loss"] == [(1, 4.0), (2, 3.5)]
    assert found["mfu"] == [(1, 0.25), (2, 0.25)]
    assert found["phases/forward"] == [(1, 0.125), (2, 0.125)]
    assert found["bytes_sent/pp"] == [(1, 64), (2, 64)]
    assert found["peak_memory/1"] == [(1, 2e7), (2, 2e7)]
    assert found["validation_loss"] == [(2, 3.75)]
    lines = metrics_of(tmp_path)
    assert set(found) == {name for line in lines[1:] for name, _ in flat(line) if name != "step"}
    assert "| training/seq_len | 64 |" in texts["settings/text_summary"]
    assert "| peak_source | measured |" in texts["run/text_summary"]


def test_a_start_a_bad_step_and_slow_ranks_are_texts(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    bad = {"why": "the loss isn't finite", "samples": [3], "done": "skipped"}
    begun = StartRecord.now(0, ["node7"], torch.device("cpu"), {"pp": 2}, 0)
    records = (begun, ChangeRecord(2.5), step(1, 4.0), step(2, math.nan, bad=bad))
    trackers = make_trackers(["tensorboard"], tmp_path, {}, 0)
    write(trackers, *records, step(3, 3.0, stragglers=["step 3: rank 1 (node7) is slow"]))
    found, texts = shown(tmp_path)
    assert texts["bad/why/text_summary"] == "the loss isn't finite"
    assert texts["stragglers/0/text_summary"] == "step 3: rank 1 (node7) is slow"
    assert "| hosts/0 | node7 |" in texts["start/text_summary"]
    assert "| mesh/pp | 2 |" in texts["start/text_summary"]
    assert "| change_seconds | 2.5 |" in texts["change/text_summary"]
    assert f"| versions/torch | {torch.__version__} |" in texts["start/text_summary"]
    assert [number for number, _ in found["lr"]] == [1, 2, 3]
    lines = metrics_of(tmp_path)
    assert lines[0]["started_after"] == 0
    assert (lines[3]["loss"], lines[3]["bad"]) == (None, bad)
    assert lines[4]["stragglers"] == ["step 3: rank 1 (node7) is slow"]


def test_a_resumed_run_shows_what_it_ran_again_once(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    write(make_trackers(["tensorboard"], tmp_path, {}, 0), *(step(number, 1.0) for number in range(1, 5)))
    write(make_trackers(["tensorboard"], tmp_path, {}, resumed_after=2), step(3, 2.0))
    assert shown(tmp_path)[0]["loss"] == [(1, 1.0), (2, 1.0), (3, 2.0)]
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
    record = as_dictionary(step(1, 2.0, gpu_memory=[None, gpu]))
    found = {name: value for name, value in flat(record) if name.startswith("gpu_memory")}
    assert found == {f"gpu_memory/1/{name}": value for name, value in vars(gpu).items()}


WORKER = WORKERS / "training/traffic.py"


def test_collectives_send_what_a_ring_sends() -> None:
    """A layer of tensor parallelism sends 8 b s h (t-1)/t elements (PTD-P section 3.2), replicas (d-1)/d of theirs."""
    ended = launch(2, WORKER)
    assert ended.returncode == 0, ended.stderr[-3000:]
    found = json.loads(ended.stdout)
    layer = 8 * (2 * 24 * 8) * (2 - 1) // 2 * 4
    replicas = (2 * 50 * 8 + 2 * 50 * 4) // 2
    step = {"pp": 7, "dp": replicas, "tp": layer}
    nothing = {"pp": 0, "dp": 0, "tp": 0}
    assert found["rank"] == [step, step, nothing]
    assert found["all"] == [{axis: 2 * size for axis, size in each.items()} for each in (step, step, nothing)]
    assert Traffic({"dp": RankGroup(), "tp": RankGroup()}).of_step(0) == nothing  # of a process alone


HOSTS = ["node0", "node0", "node1", "node1"]
REPLICAS = [[0, 2], [1, 3], [0, 2], [1, 3]]  # two pipelines of two stages
ALONE = [[0], [1], [2], [3]]


def lines_of(peers: list[list[int]], seconds: Callable[[int, int], float], steps: int) -> list[str]:
    watch = Stragglers(peers, HOSTS)
    return [
        each.line
        for step in range(1, steps + 1)
        for each in watch.add(
            step, [{"forward": 0.03, "backward": seconds(rank, step) - 0.03, "data": 0.0} for rank in range(4)]
        )
    ]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("peers", [REPLICAS, ALONE])
def test_no_false_alarm_in_a_thousand_noisy_steps(peers: list[list[int]], seed: int) -> None:
    """Stages differ by half; every step by a fifth; one in twenty of a rank takes up to three times as long, and a
    machine is now and then slower for eight steps."""
    noise = random.Random(seed)
    busy = {step: noise.random() < 0.004 for step in range(1, 1001)}

    def seconds(rank: int, step: int) -> float:
        long = noise.uniform(1, 3) if noise.random() < 0.05 else 1.0
        is_busy = any(busy.get(step - back, False) for back in range(8))
        return (0.08 + 0.04 * (rank % 2)) * noise.uniform(0.9, 1.1) * long * (1.5 if is_busy and rank < 2 else 1)

    assert lines_of(peers, seconds, 1000) == []


@pytest.mark.parametrize(("peers", "against"), [(REPLICAS, "its peers' (rank 0)"), (ALONE, "its own before")])
def test_a_slow_rank_is_named_once(peers: list[list[int]], against: str) -> None:
    noise = random.Random(0)

    def seconds(rank: int, step: int) -> float:
        return 0.1 * noise.uniform(0.9, 1.1) * (1.6 if rank == 2 and step > 200 else 1)

    (line,) = lines_of(peers, seconds, 400)
    assert "rank 2 (node1) is slow in backward: it computes for 0.1" in line
    assert line.endswith(against)
    assert 200 < int(line.removeprefix("step ").partition(":")[0]) < 245


def test_a_rank_that_has_caught_up_is_named_again_when_it_falls_back() -> None:
    lines = lines_of(REPLICAS, lambda rank, step: 0.2 if rank == 2 and step % 100 > 50 else 0.1, 200)
    assert len(lines) == 2
