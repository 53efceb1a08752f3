"""The parts of a rank's row of actions: a stage's slices forward and backward, and both alternating."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from slipstream.schedule.action import Action, Op, ScheduleError


def check_counts(name: str, **counts: int) -> None:
    """Raises ScheduleError for a count below 1; keywords are the parameters' names, as in `num_stages=4`."""
    for parameter, count in counts.items():
        if count < 1:
            what = parameter.removeprefix("num_").replace("_", " ")
            raise ScheduleError(f"{name} needs at least 1 of {what}, not {count}.")


def forwards(stage: int, microbatches: Iterable[int], num_slices: int) -> list[Action]:
    """Returns the forwards of every slice of one microbatch after another."""
    return [Action(Op.F, stage, m, i) for m in microbatches for i in range(num_slices)]


def backwards(stage: int, microbatches: Iterable[int], num_slices: int, op: Op = Op.B) -> list[Action]:
    """Returns the backwards of one microbatch after another, slices last in, first out; `op` is B, I or W."""
    return [Action(op, stage, m, i) for m in microbatches for i in reversed(range(num_slices))]


def alternate(forward: Sequence[Action], backward: Sequence[Action], warmup: int) -> list[Action]:
    """Returns `warmup` forwards, then one backward and one forward alternately until both are used up."""
    actions = list(forward[:warmup])
    for i, action in enumerate(backward, start=warmup):
        actions += [action, *forward[i : i + 1]]
    return actions
