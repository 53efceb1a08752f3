"""The schedule CSV of torch.distributed.pipelining, which has one slice per microbatch: a row a rank."""

from __future__ import annotations

import csv
import io

from slipstream.schedule.action import Action, Op, Schedule, ScheduleError
from slipstream.schedule.validation import validate

_COMPUTE = (Op.F, Op.B, Op.I, Op.W)


def to_torch_csv(schedule: Schedule) -> str:
    """Returns the compute actions as PyTorch's "compute_only" CSV; PyTorch adds its communication on loading.

    Raises:
        ScheduleError: the schedule has token slices, which PyTorch can't express.
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
    """Reads a "compute_only" CSV, without empty cells (PyTorch's idle steps) and gradient reductions.

    Stages are placed where their actions stand, and microbatches are counted.

    Raises:
        ScheduleError: a cell is no compute action, with its row and column; or the order can't run, as from `validate`.
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
