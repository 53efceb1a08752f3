"""Schedules as a Pipeline runs them, made once for all configurations of a search that share them."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from slipstream.schedule import Schedule, add_offload, add_recompute, freeze_stages, make_schedule, split_backwards
from slipstream.simulator.action_graph import ActionArrays

_KEPT = 32  # schedules; a large one takes 30 MB


class ScheduleShape(NamedTuple):
    """The arguments of `slipstream.make_schedule`, and how many stages have no backwards."""

    name: str
    num_ranks: int
    num_microbatches: int
    num_slices: int
    stages_per_rank: int
    num_frozen: int = 0  # the first stages, of which nothing is trained

    @property
    def counts(self) -> tuple[int, int, int, int]:
        """The ranks, microbatches, slices and stages per rank."""
        return self.num_ranks, self.num_microbatches, self.num_slices, self.stages_per_rank


@lru_cache(maxsize=_KEPT)
def cached_schedule(shape: ScheduleShape, recompute: bool = False, offload: float = 0.0) -> ActionArrays:
    """Returns a schedule of compute actions, R, OFFLOAD and RELOAD.

    Its backwards are split where they send their result to another rank; frozen stages have none.
    """
    if offload:
        return with_savings(cached_schedule(shape, recompute).schedule, offload=offload)
    if recompute:
        return with_savings(cached_schedule(shape).schedule, recompute)
    schedule = split_backwards(make_schedule(shape.name, *shape.counts))
    return ActionArrays.of(freeze_stages(schedule, shape.num_frozen) if shape.num_frozen else schedule)


def with_savings(schedule: Schedule, recompute: bool = False, offload: float = 0.0) -> ActionArrays:
    """Returns a schedule of compute actions with R, and with OFFLOAD and RELOAD for a share of the slices."""
    schedule = add_recompute(schedule) if recompute else schedule
    return ActionArrays.of(add_offload(schedule, offload) if offload else schedule)
