"""The schedules of a search, each made once: by their shape, and with what saves memory."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from math import prod
from typing import Any, Generic, NamedTuple, TypeVar

from slipstream.array_types import Flags
from slipstream.cost import BY_LAYER, System
from slipstream.planner.plan import Plan
from slipstream.schedule import (
    Action,
    Op,
    Schedule,
    add_offload,
    add_recompute,
    freeze_stages,
    make_schedule,
    split_backwards,
)
from slipstream.schedule.action_arrays import ActionArrays

_Result = TypeVar("_Result")


class ScheduleShape(NamedTuple):
    """The arguments of `slipstream.make_schedule`, and how many stages have no backwards."""

    name: str
    num_ranks: int
    num_microbatches: int
    num_slices: int
    stages_per_rank: int
    num_frozen_stages: int = 0
    splits: bool = True  # backwards that send their result to another rank, as a Pipeline does
    replays_all: bool = False  # also slices whose backward follows their forward at once

    @classmethod
    def of(cls, plan: Plan, num_microbatches: int, trains: Flags, system: System) -> ScheduleShape:
        """Returns the shape of a plan's schedule; `trains` marks the stages that have backwards."""
        return cls(
            plan.schedule_name,
            plan.pipeline_parallel,
            num_microbatches,
            plan.num_slices,
            plan.stages_per_rank,
            int(trains.argmax()),
            splits=plan.recompute not in BY_LAYER and not system.whole_backwards,
            replays_all=system.whole_backwards,
        )

    @property
    def counts(self) -> tuple[int, int, int, int]:
        """The ranks, microbatches, slices and stages per rank."""
        return self.num_ranks, self.num_microbatches, self.num_slices, self.stages_per_rank

    def with_groups(self, number: int) -> ScheduleShape:
        """Returns the shape with at most so many groups of microbatches, each of as many as pass interleaved stages
        together."""
        group = -(-self.num_ranks // self.num_slices)
        return self._replace(num_microbatches=min(self.num_microbatches, number * group))


class NewestResults(Generic[_Result]):
    """A function of schedules' shapes that keeps its newest results: of at most so many slices of stages in all."""

    def __init__(self, most: int, make: Callable[..., _Result]) -> None:
        self._most, self._make = most, make
        self._kept: dict[tuple[Any, ...], _Result] = {}
        self._num_units = 0  # slices of stages in all kept results

    def __call__(self, shape: ScheduleShape, *saving: Any) -> _Result:
        key = (shape, *saving)
        if key in self._kept:
            self._kept[key] = self._kept.pop(key)
            return self._kept[key]
        self._kept[key] = result = self._make(*key)
        self._num_units += prod(shape.counts)
        while len(self._kept) > 1 and self._num_units > self._most:
            oldest = next(iter(self._kept))
            del self._kept[oldest]
            self._num_units -= prod(oldest[0].counts)
        return result

    def clear(self) -> None:
        """Forgets all results."""
        self._kept.clear()
        self._num_units = 0


def _make_schedule(shape: ScheduleShape, recompute: bool = False, offload: float = 0.0) -> ActionArrays:
    """Returns a schedule of compute actions, R, OFFLOAD and RELOAD.

    Frozen stages have no backwards.
    """
    if recompute and shape.replays_all:
        return with_savings(with_every_replay(cached_schedule(shape).schedule), False, offload)
    if recompute or offload:
        return with_savings(cached_schedule(shape).schedule, recompute, offload)
    schedule = make_schedule(shape.name, *shape.counts)
    schedule = split_backwards(schedule) if shape.splits else schedule
    return ActionArrays.of(freeze_stages(schedule, shape.num_frozen_stages))


def with_every_replay(schedule: Schedule) -> Schedule:
    """Returns the schedule with an R right before each B, without waiting for its gradient."""

    def with_replay(action: Action) -> tuple[Action, ...]:
        return (action.with_op(Op.R), action) if action.op is Op.B else (action,)

    rows = (tuple(each for action in row for each in with_replay(action)) for row in schedule.actions)
    return replace(schedule, actions=tuple(rows))


# Its arrays take up to a kilobyte for each slice of a stage.
cached_schedule = NewestResults(100_000, _make_schedule)


@contextmanager
def working_memory() -> Iterator[None]:
    """Turns garbage collection off for the time of a search, and empties the search's caches at its end.

    It makes many small objects, none of them in a cycle.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        cached_schedule.clear()
        if was_enabled:
            gc.enable()


def with_savings(schedule: Schedule, recompute: bool, offload: float) -> ActionArrays:
    """Returns a valid schedule of compute actions with R, and with OFFLOAD and RELOAD for a share of the slices."""
    schedule = add_recompute(schedule, compiled=True) if recompute else schedule
    return ActionArrays.of(add_offload(schedule, offload, compiled=True) if offload else schedule)
