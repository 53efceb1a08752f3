"""PyTorch loads the schedule CSV we write, and we load the one it writes."""

import re
from pathlib import Path
from typing import Any

import pytest

from slipstream.schedule import (
    ScheduleError,
    add_communication,
    check_communication,
    from_torch_csv,
    gpipe,
    one_f_one_b,
    to_torch_csv,
    validate,
)
from support.torch_schedules import torch_schedule


@pytest.mark.parametrize("generator", [gpipe, one_f_one_b])
def test_pytorch_loads_runs_and_writes_back_our_csv(generator: Any, tmp_path: Path) -> None:
    schedule = generator(4, 6)
    path = tmp_path / "schedule.csv"
    path.write_text(to_torch_csv(schedule), newline="")
    runtime = torch_schedule("_PipelineScheduleRuntime", num_ranks=4, num_local_stages=1, num_microbatches=6)
    runtime._load_csv(str(path))  # PyTorch validates it and adds its own communication, or raises
    runtime._dump_csv(str(path), "compute_only")
    assert from_torch_csv(path.read_text(), name=schedule.name) == schedule


@pytest.mark.parametrize(
    ("name", "num_local_stages", "num_microbatches"),
    [
        ("ScheduleInterleaved1F1B", 1, 8),
        ("ScheduleInterleaved1F1B", 2, 8),
        ("ScheduleLoopedBFS", 2, 5),
        ("ScheduleInterleavedZeroBubble", 1, 8),
        ("ScheduleInterleavedZeroBubble", 3, 4),
        ("ScheduleZBVZeroBubble", 2, 8),
    ],
)
def test_pytorchs_own_schedules_are_read_and_lowered(
    name: str, num_local_stages: int, num_microbatches: int, tmp_path: Path
) -> None:
    theirs = torch_schedule(name, 4, num_local_stages, num_microbatches)
    path = tmp_path / "schedule.csv"
    theirs._dump_csv(str(path), "compute_only")
    schedule = from_torch_csv(path.read_text(), name)
    for rank, row in enumerate(schedule.actions):
        assert [schedule.text(a) for a in row] == [str(a) for a in theirs.pipeline_order[rank] if a]
    assert schedule.placement == tuple(theirs.stage_index_to_group_rank[g] for g in range(schedule.num_stages))
    check_communication(add_communication(schedule))


def test_gradient_reductions_and_sends_are_not_exported() -> None:
    schedule = one_f_one_b(2, 2)
    assert to_torch_csv(add_communication(schedule)) == to_torch_csv(schedule)
    text = to_torch_csv(schedule).splitlines()
    assert from_torch_csv(f"{text[0]},0REDUCE_GRAD\n,{text[1]},1REDUCE_GRAD\n", "1f1b") == schedule


def test_slices_are_refused() -> None:
    with pytest.raises(ScheduleError, match=r"2 slices per microbatch; .* export one with num_slices=1"):
        to_torch_csv(gpipe(2, 2, 2))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0,0B0\n1F0,1X0\n", "Row 2, column 2 of the CSV: '1X0' is not an action"),
        ("0F0,(0F1;0B0)OVERLAP_F_B\n", "Row 1, column 2 of the CSV: '(0F1;0B0)OVERLAP_F_B' is not an action"),
        ("0F0,0SEND_F0\n", "Row 1, column 2 of the CSV is 0SEND_F0; only whole-microbatch compute"),
        ("0F0.1\n", "Row 1, column 1 of the CSV is 0F0.1; only whole-microbatch compute"),
        ("0F0,0B0\n2F0,2B0\n", "stages are [0, 2]; they must be numbered from 0"),
        ("", "stages are []"),
        ("0F0,0B0\n1B0,1F0\n", "1B0 (rank 1) waits for 1F0, which comes after it on the same rank"),
        ("0F0,0B0\n1F0,1B0,0F1,0B1", "0F0 stands on rank 0, but stage 0 is placed on rank 1"),
    ],
)
def test_import_refuses(text: str, message: str) -> None:
    with pytest.raises(ScheduleError, match=re.escape(message)):
        from_torch_csv(text)


def test_import_of_an_exported_schedule_is_that_schedule() -> None:
    for schedule in (gpipe(3, 4), one_f_one_b(5, 3)):
        assert from_torch_csv(to_torch_csv(schedule), schedule.name) == schedule
        validate(schedule)
