"""Schedules from the papers, compute actions only; passes in `lowering` add the rest."""

from __future__ import annotations

from collections.abc import Callable

from slipstream.schedule.action import Action, Op, Schedule, ScheduleError


def gpipe(num_stages: int, num_microbatches: int, num_slices: int = 1) -> Schedule:
    """All forwards, then all backwards: GPipe, and with token slices TeraPipe.

    Microbatches go backward in forward order, the slices of each last in, first out:

        rank 0  F0.0 F0.1 F1.0 F1.1           B0.1 B0.0 B1.1 B1.0
        rank 1       F0.0 F0.1 F1.0 F1.1 B0.1 B0.0 B1.1 B1.0

    With equal times the bubble is (p-1)/(ms+p-1) of the step, and every rank keeps all m microbatches.
    """
    units = num_microbatches * num_slices
    return _one_stage_a_rank("gpipe", num_stages, num_microbatches, num_slices, lambda rank: units)


def one_f_one_b(num_stages: int, num_microbatches: int, num_slices: int = 1) -> Schedule:
    """One forward, one backward in turn: 1F1B (PipeDream-flush), and with token slices Seq1F1B.

    A rank first runs one microbatch's slices and one slice more for every rank after it, so that the
    backwards arrive when they are due:

        rank 0  F0.0 F0.1 F1.0      B0.1 F1.1 B0.0      B1.1 B1.0
        rank 1       F0.0 F0.1 B0.1 F1.0 B0.0 F1.1 B1.1 B1.0

    With equal times the bubble is that of `gpipe`; rank r of p keeps min(1 + (p-1-r)/s, m) microbatches.
    """
    return _one_stage_a_rank(
        "1f1b", num_stages, num_microbatches, num_slices, lambda rank: num_slices + num_stages - 1 - rank
    )


GENERATORS: dict[str, Callable[..., Schedule]] = {"gpipe": gpipe, "1f1b": one_f_one_b}


def _one_stage_a_rank(
    name: str, num_stages: int, num_microbatches: int, num_slices: int, warmup: Callable[[int], int]
) -> Schedule:
    """Rank r runs `warmup(r)` forwards, then backwards and forwards in turn until both are used up."""
    for what, count in (("stages", num_stages), ("microbatches", num_microbatches), ("slices", num_slices)):
        if count < 1:
            raise ScheduleError(f"{name} needs at least 1 of {what}, not {count}.")
    microbatches, slices = range(num_microbatches), range(num_slices)

    def row(stage: int) -> tuple[Action, ...]:
        forwards = [Action(Op.F, stage, m, i) for m in microbatches for i in slices]
        backwards = [Action(Op.B, stage, m, i) for m in microbatches for i in reversed(slices)]
        actions = forwards[: warmup(stage)]
        for i, backward in enumerate(backwards, start=len(actions)):
            actions += [backward, *forwards[i : i + 1]]
        return tuple(actions)

    rows = tuple(map(row, range(num_stages)))
    return Schedule(name, rows, tuple(range(num_stages)), num_microbatches, num_slices)
