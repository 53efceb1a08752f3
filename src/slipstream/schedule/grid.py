"""The rank x step grid that errors print, with the offending actions marked."""

from __future__ import annotations

from collections.abc import Collection
from itertools import pairwise

from slipstream.schedule.action import Schedule

_AROUND = 5  # steps shown to either side of a mark


def grid(schedule: Schedule, marked: Collection[tuple[int, int]]) -> str:
    """Returns one line per rank and one column per step; `marked` holds (rank, step) pairs, shown as `>2B0.3<`.

    Only the steps around the marks are shown, or the first ones if nothing is marked; `..` stands for others.
    """
    num_steps = max(map(len, schedule.actions))
    near = [step for _, step in marked] or [0]
    shown = [step for step in range(num_steps) if min(abs(step - mark) for mark in near) <= _AROUND]
    columns = [["step", *(f"rank {rank}" for rank in range(schedule.num_ranks))]]
    for before, step in pairwise([-1, *shown, num_steps]):
        if step > before + 1:
            columns.append([".."] * (schedule.num_ranks + 1))
        if step < num_steps:
            columns.append([f" {step}", *(_cell(schedule, rank, step, marked) for rank in range(schedule.num_ranks))])
    widths = [max(map(len, column)) for column in columns]
    return "\n".join(
        " ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in zip(*columns, strict=True)
    )


def _cell(schedule: Schedule, rank: int, step: int, marked: Collection[tuple[int, int]]) -> str:
    if step >= len(schedule.actions[rank]):
        return ""
    text = schedule.text(schedule.actions[rank][step])
    return f">{text}<" if (rank, step) in marked else f" {text}"
