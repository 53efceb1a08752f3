"""Gradient accumulation: a batch whose activations don't fit in memory runs in several flushes of the pipeline."""

from __future__ import annotations

from dataclasses import replace

from slipstream.schedule.action import Action, Op, Schedule, ScheduleError


def in_flushes(schedule: Schedule, num_flushes: int) -> Schedule:
    """Returns the schedule repeated `num_flushes` times, with consecutive microbatches (TeraPipe, appendix A).

    Each rank finishes a flush before it starts the next, so it never keeps more activations than one flush has, while
    ranks that finish early start the next flush early. GPipe over two ranks, two flushes of two microbatches:

        rank 0  F0 F1       B0 B1 F2 F3       B2 B3
        rank 1     F0 F1 B0 B1       F2 F3 B2 B3

    REDUCE_GRAD runs after the last flush only; documents (`reach`) repeat with the microbatches.

    Raises:
        ScheduleError: there is less than one flush, or the schedule has sends and receives, which are added later.
    """
    if num_flushes < 1:
        raise ScheduleError(f"num_flushes={num_flushes}: give 1 or more.")
    if schedule.is_lowered:
        raise ScheduleError(f"{schedule.name} has sends and receives already; repeat it before they are added.")

    def renumbered(action: Action, flush: int) -> Action:
        return action._replace(microbatch=flush * schedule.num_microbatches + action.microbatch)

    def row(actions: tuple[Action, ...]) -> tuple[Action, ...]:
        passes = [action for action in actions if action.op is not Op.REDUCE_GRAD]
        reductions = [action for action in actions if action.op is Op.REDUCE_GRAD]
        return (*(renumbered(action, flush) for flush in range(num_flushes) for action in passes), *reductions)

    return replace(
        schedule,
        actions=tuple(map(row, schedule.actions)),
        num_microbatches=num_flushes * schedule.num_microbatches,
        reach=schedule.reach and schedule.reach * num_flushes,
    )
