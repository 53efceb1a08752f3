"""Schedules as a Pipeline runs them, made once for all configurations of a search that share them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

from slipstream.schedule import Schedule, add_offload, add_recompute, make_schedule, split_backwards
from slipstream.simulator.compiled_simulation import ActionArrays

_KEPT = 32  # schedules; a large one takes 30 MB


@dataclass(frozen=True, eq=False)
class CachedSchedule:
    """A schedule of compute actions, R, OFFLOAD and RELOAD, also as arrays."""

    schedule: Schedule

    @cached_property
    def arrays(self) -> ActionArrays:
        return ActionArrays.of(self.schedule)


@lru_cache(maxsize=_KEPT)
def cached_schedule(
    name: str,
    num_ranks: int,
    num_microbatches: int,
    num_slices: int,
    stages_per_rank: int,
    recompute: bool = False,
    offload: float = 0.0,
) -> CachedSchedule:
    """Returns a named schedule whose backwards are split where they send their result to another rank."""
    plain = name, num_ranks, num_microbatches, num_slices, stages_per_rank
    if offload:
        return CachedSchedule(add_offload(cached_schedule(*plain, recompute).schedule, offload))
    if recompute:
        return CachedSchedule(add_recompute(cached_schedule(*plain).schedule))
    return CachedSchedule(split_backwards(make_schedule(*plain)))
