"""The schedule CSV of torch.distributed.pipelining, which has one slice per microbatch: a row a rank."""

from __future__ import annotations

import csv
import io

from slipstream.schedule.action import Action, Op, Schedule, ScheduleError
from slipstream.schedule.dependencies import validate

_COMPUTE = (Op.F, Op.B, Op.I, Op.W)


def to_torch_csv(schedule: Schedule) -> str:
    """The compute actions as PyTorch's "compute_only" CSV; it adds its own communication on loading.

    Raises ScheduleError for a schedule with token slices, which PyTorch can't express.
    """
    if schedule.num_slices != 1:
        raise ScheduleError(
            f"{schedule.name} has {schedule.num_slices} slices per microbatch; "
            "torch.distributed.pipelining knows only whole microbatches, so export one with num_slices=1."
        )
    text = io.StringIO()
    writer = csv.writer(text)
    for row in schedule.actions:
        writer.writerow(action.text(1) for action in row if action.op in _COMPUTE)
    return text.getvalue()


def from_torch_csv(text: str, name: str = "torch") -> Schedule:
    """Read a "compute_only" CSV; empty cells (PyTorch's idle steps) and gradient reductions are left out.

    Stages are placed where their actions stand, microbatches are counted. Raises ScheduleError, with row and
    column, for a cell that is no compute action, and as `validate` does for an order that can't run.
    """
    cells = list(csv.reader(io.StringIO(text)))
    rows = tuple(
        tuple(
            action
            for column, cell in enumerate(row, start=1)
            if cell.strip() and (action := _read(cell, rank, column)).op is not Op.REDUCE_GRAD
        )
        for rank, row in enumerate(cells)
    )
    ranks = {action.stage: rank for rank, row in enumerate(rows) for action in row}
    if set(ranks) != set(range(len(ranks))) or not ranks:
        raise ScheduleError(f"The CSV's stages are {sorted(ranks)}; they must be numbered from 0 without gaps.")
    placement = tuple(ranks[stage] for stage in range(len(ranks)))
    num_microbatches = 1 + max(action.microbatch for row in rows for action in row)
    schedule = Schedule(name, rows, placement, num_microbatches, num_slices=1)
    validate(schedule)
    return schedule


def _read(cell: str, rank: int, column: int) -> Action:
    try:
        action = Action.parse(cell.strip())
    except ScheduleError as error:
        raise ScheduleError(f"Row {rank + 1}, column {column} of the CSV: {error}") from None
    if action.slice or action.op not in (*_COMPUTE, Op.REDUCE_GRAD):
        raise ScheduleError(
            f"Row {rank + 1}, column {column} of the CSV is {cell.strip()}; only whole-microbatch compute "
            f"actions are read (F, B, I, W, as in 0F0)."
        )
    return action
