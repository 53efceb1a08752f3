"""The schedules that have a name, with compute actions only; passes in `lowering` add the rest."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from slipstream.errors import did_you_mean
from slipstream.schedule.action import ScheduleError
from slipstream.schedule.interleaved import breadth_first, interleaved_one_f_one_b
from slipstream.schedule.one_stage_per_rank import gpipe, one_f_one_b, zb_h1, zb_h2
from slipstream.schedule.schedule import Schedule, SliceCounts
from slipstream.schedule.v_shape import v_half, v_min, zb_v

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

STAGES_PER_RANK: dict[str, range] = {
    **dict.fromkeys(("gpipe", "1f1b", "zb-h1", "zb-h2"), range(1, 2)),
    **dict.fromkeys(("interleaved-1f1b", "breadth-first"), range(1, sys.maxsize)),
    **dict.fromkeys(("zb-v", "v-half", "v-min"), range(2, 3)),
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
        _check_stages(name, "zb-v", stages_per_rank)
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


def _check_stages(name: str, like: str, stages_per_rank: int) -> None:
    allowed = STAGES_PER_RANK[like]
    if stages_per_rank not in allowed:
        number = f"exactly {allowed.start}" if len(allowed) == 1 else f"at least {allowed.start}"
        others = ", ".join(other for other in GENERATORS if stages_per_rank in STAGES_PER_RANK[other])
        raise ScheduleError(
            f"stages_per_rank={stages_per_rank}, but the schedule {name!r} has {number}. Give stages_per_rank="
            f"{allowed.start}{f', or a schedule that can have {stages_per_rank}: {others}' if others else ''}."
        )


def make_schedule(
    name: str, num_ranks: int, num_microbatches: int, num_slices: SliceCounts = 1, stages_per_rank: int = 1
) -> Schedule:
    """Returns a schedule by its name in `GENERATORS`, with compute actions only.

    `num_slices` are those of every microbatch, or a list of each one's; the order is then the one of equal
    microbatches, with the largest number of slices in flight where that number matters.

    Raises:
        ScheduleError: the name is unknown (the message has the nearest one), `STAGES_PER_RANK` doesn't allow the
            number of stages per rank (it has what is allowed), or a count is below 1.
    """
    check_name(name)
    _check_stages(name, name, stages_per_rank)
    several = () if len(STAGES_PER_RANK[name]) == 1 else (stages_per_rank,)
    return GENERATORS[name](num_ranks, num_microbatches, num_slices, *several)
