"""The schedules that have a name, with compute actions only; passes in `lowering` add the rest."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from slipstream.errors import did_you_mean
from slipstream.schedule.action import Action, Schedule, ScheduleError
from slipstream.schedule.interleaved import breadth_first, interleaved_one_f_one_b
from slipstream.schedule.rows import alternate, backwards, check_counts, forwards
from slipstream.schedule.v_shape import v_half, v_min, zb_v
from slipstream.schedule.zero_bubble import zb_h1, zb_h2


def gpipe(num_stages: int, num_microbatches: int, num_slices: int = 1) -> Schedule:
    """Returns all forwards, then all backwards: GPipe, and with token slices TeraPipe.

    Microbatches go backward in forward order, the slices of each last in, first out:

        rank 0  F0.0 F0.1 F1.0 F1.1           B0.1 B0.0 B1.1 B1.0
        rank 1       F0.0 F0.1 F1.0 F1.1 B0.1 B0.0 B1.1 B1.0

    With equal times the bubble is (p-1)/(ms+p-1) of the step, and every rank keeps all m microbatches.
    """
    units = num_microbatches * num_slices
    return _one_stage_per_rank("gpipe", num_stages, num_microbatches, num_slices, lambda rank: units)


def one_f_one_b(num_stages: int, num_microbatches: int, num_slices: int = 1) -> Schedule:
    """Returns 1F1B (PipeDream-flush), one forward and one backward alternately; with token slices Seq1F1B.

    A rank first runs one microbatch's slices and one more slice for every rank after it, so that the
    backwards arrive when they are due:

        rank 0  F0.0 F0.1 F1.0      B0.1 F1.1 B0.0      B1.1 B1.0
        rank 1       F0.0 F0.1 B0.1 F1.0 B0.0 F1.1 B1.1 B1.0

    With equal times the bubble is that of `gpipe`; rank r of p keeps min(1 + (p-1-r)/s, m) microbatches.
    """
    return _one_stage_per_rank(
        "1f1b", num_stages, num_microbatches, num_slices, lambda rank: num_slices + num_stages - 1 - rank
    )


def _one_stage_per_rank(
    name: str, num_stages: int, num_microbatches: int, num_slices: int, warmup: Callable[[int], int]
) -> Schedule:
    """Returns a schedule whose rank r runs `warmup(r)` forwards, then backwards and forwards alternately."""
    check_counts(name, num_stages=num_stages, num_microbatches=num_microbatches, num_slices=num_slices)
    microbatches = range(num_microbatches)

    def row(stage: int) -> tuple[Action, ...]:
        forward = forwards(stage, microbatches, num_slices)
        return tuple(alternate(forward, backwards(stage, microbatches, num_slices), warmup(stage)))

    rows = tuple(map(row, range(num_stages)))
    return Schedule(name, rows, tuple(range(num_stages)), num_microbatches, num_slices)


GENERATORS: dict[str, Callable[..., Schedule]] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved-1f1b": interleaved_one_f_one_b,
    "breadth-first": breadth_first,
    "zb-h1": zb_h1,
    "zb-h2": zb_h2,
    "zb-v": zb_v,
    "v-half": v_half,
    "v-min": v_min,
}

_ANY = range(1, sys.maxsize)
STAGES_PER_RANK: dict[str, range] = {
    "gpipe": range(1, 2),
    "1f1b": range(1, 2),
    "interleaved-1f1b": _ANY,
    "breadth-first": _ANY,
    "zb-h1": range(1, 2),
    "zb-h2": range(1, 2),
    "zb-v": range(2, 3),
    "v-half": range(2, 3),
    "v-min": range(2, 3),
}
"""The numbers of stages that a rank can hold under each schedule: `2 in STAGES_PER_RANK["zb-v"]`."""

AUTOMATIC = ("auto", "auto-v")
"""The names of orders that a `Pipeline` searches itself: in the looped placement, and in the V-shaped one."""


def placed_as(name: str, stages_per_rank: int) -> str:
    """Returns the name in `GENERATORS` that has the placement of `name`, which may be one of `AUTOMATIC`.

    Raises:
        ScheduleError: the number of stages per rank does not fit the V-shaped placement.
    """
    if name == "auto":
        return "1f1b" if stages_per_rank == 1 else "interleaved-1f1b"
    if name == "auto-v":
        _check_stages(name, STAGES_PER_RANK["zb-v"], stages_per_rank)
        return "zb-v"
    return name


def check_name(name: str, besides: Sequence[str] = ()) -> None:
    """Raises ScheduleError, with the nearest name, if `name` is neither in `GENERATORS` nor among `besides`."""
    names = (*GENERATORS, *besides)
    if name not in names:
        raise ScheduleError(
            f"schedule={name!r} is not known{did_you_mean(name, names)} Choose one of {', '.join(names)}, or pass a "
            "Schedule."
        )


def _check_stages(name: str, allowed: range, stages_per_rank: int) -> None:
    if stages_per_rank not in allowed:
        number = f"exactly {allowed.start}" if len(allowed) == 1 else f"at least {allowed.start}"
        others = ", ".join(other for other, counts in STAGES_PER_RANK.items() if stages_per_rank in counts)
        raise ScheduleError(
            f"stages_per_rank={stages_per_rank}, but the schedule {name!r} has {number}. Give stages_per_rank="
            f"{allowed.start}{f', or a schedule that can have {stages_per_rank}: {others}' if others else ''}."
        )


def make_schedule(
    name: str, num_ranks: int, num_microbatches: int, num_slices: int = 1, stages_per_rank: int = 1
) -> Schedule:
    """Returns a schedule by its name in `GENERATORS`, with compute actions only.

    Raises:
        ScheduleError: the name is unknown (the message has the nearest one), `STAGES_PER_RANK` doesn't allow the
            number of stages per rank (it has what is allowed), or a count is below 1.
    """
    check_name(name)
    allowed = STAGES_PER_RANK[name]
    _check_stages(name, allowed, stages_per_rank)
    if len(allowed) == 1:
        return GENERATORS[name](num_ranks, num_microbatches, num_slices)
    return GENERATORS[name](num_ranks, num_microbatches, num_slices, stages_per_rank)
