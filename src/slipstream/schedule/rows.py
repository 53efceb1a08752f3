"""What generators build a rank's row from: a stage's slices in order, forward and backward, taken in turn."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from slipstream.schedule.action import Action, Op, ScheduleError


def check_counts(name: str, **counts: int) -> None:
    """Raise ScheduleError for a count below 1; keywords are the parameters' names, as `num_stages=4`."""
    for parameter, count in counts.items():
        if count < 1:
            what = parameter.removeprefix("num_").replace("_", " ")
            raise ScheduleError(f"{name} needs at least 1 of {what}, not {count}.")


def forwards(stage: int, microbatches: Iterable[int], num_slices: int) -> list[Action]:
    """Every slice of one microbatch after another."""
    return [Action(Op.F, stage, m, i) for m in microbatches for i in range(num_slices)]


def backwards(stage: int, microbatches: Iterable[int], num_slices: int, op: Op = Op.B) -> list[Action]:
    """One microbatch after another, the slices of each last in, first out; `op` is B, I or W."""
    return [Action(op, stage, m, i) for m in microbatches for i in reversed(range(num_slices))]


def in_turn(forward: Sequence[Action], backward: Sequence[Action], warmup: int) -> list[Action]:
    """`warmup` forwards, then backwards and forwards in turn until both are used up."""
    actions = list(forward[:warmup])
    for i, action in enumerate(backward, start=warmup):
        actions += [action, *forward[i : i + 1]]
    return actions
