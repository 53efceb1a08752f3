"""A step's record has its figures, and its phases add up to the step."""

from __future__ import annotations

import json
import resource
from pathlib import Path

import pytest

from slipstream.schedule import Action, Op, add_communication, add_recompute, make_schedule, spread_vocabulary
from slipstream.simulator import simulate
from slipstream.simulator.costs import UnitCost
from slipstream.timeline import Span, Timeline
from slipstream.train.metrics.flops import StepFigures
from slipstream.train.metrics.records import (
    MetricsFile,
    Phases,
    StepRecord,
    ValidationRecord,
    as_dictionary,
    peak_memory,
)
from slipstream.train.run_folder import TolerantWrites
from support.architectures import ARCHITECTURES, tokens
from support.pipelines import make_pipe

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


def test_lines_are_readable_at_once(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / "metrics.jsonl")
    file.write(ValidationRecord(3, 1.5, 4.5))
    line = (tmp_path / "metrics.jsonl").read_text()
    assert json.loads(line) == {"step": 3, "validation_loss": 1.5, "perplexity": 4.5}
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


def test_trouble_with_the_disk_is_told_once_until_it_is_over() -> None:
    said = list[str]()
    writes = TolerantWrites(said.append)
    for error in (True, True, False, True):
        with writes.of("metrics.jsonl"):
            if error:
                raise OSError(28, "No space left on device")
    assert said == ["metrics.jsonl can't be written: [Errno 28] No space left on device. Training goes on"] * 2


def test_what_json_has_no_number_for_is_null(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / "metrics.jsonl")
    file.write(ValidationRecord(3, float("nan"), float("inf")))
    file.close()
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 3, "validation_loss": null, "perplexity": null}\n'


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
    assert "  ".join(STEP.texts()) == "loss 2.500  2,000 tokens/s  norm 1  lr 0.1  idle 25%  3.15 MB"
    expected = "loss 2.500  2,000 tokens/s  norm 1  lr 0.1  MFU 41%  idle 25%  3.15 MB"
    assert "  ".join(FULL.texts()) == expected
