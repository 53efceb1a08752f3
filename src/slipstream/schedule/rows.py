"""The counts that a schedule is made for, and the parts of its rows: a stage's passes, and two kinds alternating."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from functools import cached_property

from slipstream.schedule.action import Action, Op, ScheduleError
from slipstream.schedule.schedule import Schedule, SliceCounts


@dataclass(frozen=True)
class Counts:
    """The counts that the schedule `name` is made for.

    Raises:
        ScheduleError: a count is below 1, or there are not as many counts of slices as microbatches.
    """

    name: str
    num_ranks: int
    num_microbatches: int
    num_slices: SliceCounts
    stages_per_rank: int = 1

    def __post_init__(self) -> None:
        for each in fields(self)[1:]:
            given = getattr(self, each.name)
            if (count := given if isinstance(given, int) else min(given, default=0)) < 1:
                what = each.name.removeprefix("num_").replace("_", " ")
                raise ScheduleError(f"{self.name} needs at least 1 of {what}, not {count}.")
        if len(self.slice_counts) != self.num_microbatches:
            raise ScheduleError(
                f"{self.name} has {self.num_microbatches} microbatches, but num_slices={list(self.slice_counts)} are "
                f"{len(self.slice_counts)}: give one number for all of them, or one for each."
            )

    @cached_property
    def slice_counts(self) -> tuple[int, ...]:
        """The slices of each microbatch."""
        if isinstance(self.num_slices, int):
            return (self.num_slices,) * self.num_microbatches
        return tuple(self.num_slices)

    @property
    def most_slices(self) -> int:
        """The most slices that a microbatch has: so many go forward before the first backward of any can start."""
        return max(self.slice_counts)

    def stages(self, rank: int) -> range:
        """Returns the rank's stages in the looped placement: stage g on rank g mod p."""
        return range(rank, self.num_ranks * self.stages_per_rank, self.num_ranks)

    def passes(self, op: Op, stage: int, microbatches: Iterable[int] | None = None) -> list[Action]:
        """Returns a stage's F, B, I or W of one microbatch after another, by default of all.

        Slices go forward in order, and backward last in, first out.
        """
        chosen = range(self.num_microbatches) if microbatches is None else microbatches
        step = 1 if op is Op.F else -1
        return [Action(op, stage, m, i) for m in chosen for i in range(self.slice_counts[m])[::step]]

    def schedule(self, row: Callable[[int], Iterable[Action]], v_shaped: bool = False) -> Schedule:
        """Returns the schedule whose ranks run `row(rank)`; a V-shaped placement has stages r and 2p-1-r on rank r."""
        ranks = tuple(range(self.num_ranks))
        placement = ranks + ranks[::-1] if v_shaped else ranks * self.stages_per_rank
        rows = tuple(tuple(row(rank)) for rank in ranks)
        counts = self.slice_counts
        return Schedule(self.name, rows, placement, self.num_microbatches, self.most_slices, slice_counts=counts)


def alternate(forward: Sequence[Action], backward: Sequence[Action], warmup: int) -> list[Action]:
    """Returns `warmup` forwards, then one backward and one forward alternately until both are used up."""
    actions = list(forward[:warmup])
    for i, action in enumerate(backward, start=warmup):
        actions += [action, *forward[i : i + 1]]
    return actions
