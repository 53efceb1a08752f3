"""The schedules that have a name: one stage a rank, interleaved, and V-shaped. Passes add communication.

Schedules with V-shaped placement: two stages per rank, the first and the last on rank 0, backwards split.

V-Half and V-Min repeat a building block: one slice's way over the V (Controllable Memory, section 3).
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from itertools import accumulate, pairwise, permutations, starmap
from typing import TYPE_CHECKING, NamedTuple

from slipstream.errors import did_you_mean
from slipstream.schedule.action import NUMBERS, OPS, Op, ScheduleError
from slipstream.schedule.schedule import ActionRows, Schedule, SliceCounts

if TYPE_CHECKING:
    from slipstream.array_types import Floats, Ints

# Here an action is a number, whose digits are its op, stage, microbatch and slice; there are at most so many of each.
_MOST = 2**19


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
        for field in fields(self)[1:]:
            counts = getattr(self, field.name)
            if (count := counts if isinstance(counts, int) else min(counts, default=0)) < 1:
                what = field.name.removeprefix("num_").replace("_", " ")
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

    @cached_property
    def total(self) -> int:
        """The slices of all microbatches."""
        return sum(self.slice_counts)

    @cached_property
    def _slices(self) -> tuple[Ints, Ints]:
        """The slices of one microbatch after another, forward in order, and backward last in, first out."""
        import numpy as np

        counts = np.array(self.slice_counts)
        firsts = np.cumsum(counts) - counts
        microbatch, number = np.repeat([np.arange(len(counts)), firsts], counts, axis=1)
        index = np.arange(len(number)) - number
        return microbatch * _MOST + index, microbatch * _MOST + counts[microbatch] - 1 - index

    def passes(self, op: Op, stage: int) -> Ints:
        """Returns a stage's F, B, I or W of all slices in order."""
        passes: Ints = self._slices[op is not Op.F] + (NUMBERS[op] * _MOST + stage) * _MOST**2
        return passes

    def schedule(self, row: Callable[[int], Ints], v_shaped: bool = False) -> Schedule:
        """Returns the schedule whose ranks run `row(rank)`; a V-shaped placement has stages r and 2p-1-r on rank r."""
        import numpy as np

        ranks = tuple(range(self.num_ranks))
        placement = ranks + ranks[::-1] if v_shaped else ranks * self.stages_per_rank
        rows = [row(rank) for rank in ranks]
        columns = map(np.ascontiguousarray, np.unravel_index(np.concatenate(rows), (len(OPS), _MOST, _MOST, _MOST)))
        actions, counts = ActionRows(np.cumsum([0, *map(len, rows)]), *columns), self.slice_counts
        return Schedule(self.name, actions, placement, self.num_microbatches, self.most_slices, slice_counts=counts)


def _by_time(passes: Sequence[Ints], times: Sequence[Floats | Ints]) -> Ints:
    """Returns the passes of all kinds in the order of their times."""
    import numpy as np

    in_order: Ints = np.concatenate(passes)[np.argsort(np.concatenate(times), kind="stable")]
    return in_order


def _alternate(warmup: int, number: int) -> tuple[Floats, Floats]:
    """Returns the times of so many forwards and backwards: `warmup` forwards, then a backward and a forward in turn."""
    import numpy as np

    numbers = np.arange(float(number))
    return np.maximum(numbers, 2 * numbers - warmup + 1), 2 * numbers + warmup


def gpipe(num_stages: int, num_microbatches: int, num_slices: SliceCounts = 1) -> Schedule:
    """Returns all forwards, then all backwards: GPipe, and with token slices TeraPipe.

    Microbatches go backward in forward order, the slices of each last in, first out:

        rank 0  F0.0 F0.1 F1.0 F1.1           B0.1 B0.0 B1.1 B1.0
        rank 1       F0.0 F0.1 F1.0 F1.1 B0.1 B0.0 B1.1 B1.0

    With equal times the bubble is (p-1)/(ms+p-1) of the step, and every rank keeps all m microbatches.
    """
    import numpy as np

    counts = Counts("gpipe", num_stages, num_microbatches, num_slices)
    return counts.schedule(lambda rank: np.concatenate([counts.passes(Op.F, rank), counts.passes(Op.B, rank)]))


def one_f_one_b(num_stages: int, num_microbatches: int, num_slices: SliceCounts = 1) -> Schedule:
    """Returns 1F1B (PipeDream-flush), one forward and one backward alternately; with token slices Seq1F1B.

    A rank first runs one microbatch's slices and one more slice for every rank after it, so that the
    backwards arrive when they are due:

        rank 0  F0.0 F0.1 F1.0      B0.1 F1.1 B0.0      B1.1 B1.0
        rank 1       F0.0 F0.1 B0.1 F1.0 B0.0 F1.1 B1.1 B1.0

    With equal times the bubble is that of `gpipe`; rank r of p keeps min(1 + (p-1-r)/s, m) microbatches. Where
    microbatches differ in slices, a rank first runs as many as the largest has.
    """
    counts = Counts("1f1b", num_stages, num_microbatches, num_slices)

    def row(rank: int) -> Ints:
        passes = [counts.passes(op, rank) for op in (Op.F, Op.B)]
        return _by_time(passes, _alternate(counts.most_slices + num_stages - 1 - rank, counts.total))

    return counts.schedule(row)


def zb_h1(num_stages: int, num_microbatches: int, num_slices: SliceCounts = 1) -> Schedule:
    """Returns ZB-H1, 1F1B with delayed weight gradients (Zero Bubble Pipeline Parallelism, section 2.1).

    Rank r runs W of a slice after I of the r-th slice from it, so that all ranks keep as much as rank 0 of 1F1B:

        rank 0  F0.0 F0.1 F1.0      I0.1 W0.1 F1.1 I0.0 W0.0 I1.1 W1.1 I1.0 W1.0
        rank 1       F0.0 F0.1 I0.1 F1.0 I0.0 W0.1 F1.1 I1.1 W0.0 I1.0 W1.1 W1.0

    This is the handcrafted schedule of the top of the paper's Figure 3, whose bubble is (p-1)(F+I-W) for F, I and W the
    times of the passes, where ms >= p+s-1 and W is no longer than F or I. Every rank keeps 1 + (p-1)/s
    microbatches, at most m. PyTorch's ScheduleInterleavedZeroBubble with one stage a rank is the same order.
    """
    return _handcrafted(Counts("zb-h1", num_stages, num_microbatches, num_slices), lead=1)


def zb_h2(num_stages: int, num_microbatches: int, num_slices: SliceCounts = 1) -> Schedule:
    """Returns ZB-H1 with twice the lead, which fills the bubble before the first backward (Zero Bubble, section 2.2).

    Rank r first runs two more slices for every rank after it, and W waits for 2r slices:

        rank 0  F0.0 F0.1 F1.0 F1.1 I0.1 W0.1 I0.0 W0.0 I1.1 W1.1 I1.0 W1.0
        rank 1       F0.0 F0.1 I0.1 F1.0 I0.0 F1.1 I1.1 W0.1 I1.0 W0.0 W1.1 W1.0

    This is the handcrafted schedule of the bottom of the paper's Figure 3: where F, I and W take the same time and
    ms >= 2(p-1)+s, no rank waits from its first forward to its last weight gradient, which is a step of
    (p-1)F + ms(F+I+W). Every rank keeps 1 + 2(p-1)/s microbatches, at most m.
    """
    return _handcrafted(Counts("zb-h2", num_stages, num_microbatches, num_slices), lead=2)


def _handcrafted(counts: Counts, lead: int) -> Schedule:
    """Returns Seq1F1B with I for B, `lead` more forwards for every rank after it, and W `lead * rank` slices late."""

    def row(rank: int) -> Ints:
        warmup = counts.most_slices + lead * (counts.num_ranks - 1 - rank)
        forward, inputs = _alternate(warmup, counts.total)
        # The time of W is in the middle between that of an I and of the forward after it.
        times = forward, inputs, inputs + 2 * lead * rank + 0.5
        return _by_time([counts.passes(op, rank) for op in (Op.F, Op.I, Op.W)], times)

    return counts.schedule(row)


def interleaved_one_f_one_b(
    num_ranks: int, num_microbatches: int, num_slices: SliceCounts = 1, stages_per_rank: int = 2, lead: int = 2
) -> Schedule:
    """Returns Megatron's interleaved 1F1B over v stages per rank (PTD-P, section 2.2); with slices SVPP and SlimPipe.

    Stage g is on rank g mod p. A group of microbatches, of at least p slices together, runs through one stage
    of the rank after the other; its backwards take the stages in reverse. A rank runs ahead by `lead` slices
    for every rank after it: 2 leaves every message the time of a pass to arrive (Megatron, SlimPipe), 1 keeps
    the fewest activations (SVPP). Two ranks of two stages, four microbatches of one slice, lead 2:

        rank 0  0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1     2B2     2B3 0B2 0B3
        rank 1      1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3

    With equal times and ms >= p the bubble is (p-1)/(msv+p-1) of the step. With s >= p a group is one microbatch and
    rank r keeps 1 + d(p-1-r)/(sv) microbatches, d the lead; with k microbatches in the first group it keeps 1 +
    (k-1)(v-1)/v + d(p-1-r)/(sv); never more than m. Megatron wants m to be a multiple of p. Here the m microbatches
    form as many groups of at least p slices as they can, of sizes as equal as they can be, the larger ones first; fewer
    than p slices in all are one group. Where microbatches differ in slices, a rank runs ahead as the largest group and
    microbatch need.

    Raises:
        ScheduleError: a count is below 1, or `lead` is neither 1 nor 2.
    """
    import numpy as np

    counts = Counts("interleaved-1f1b", num_ranks, num_microbatches, num_slices, stages_per_rank)
    if lead not in (1, 2):
        raise ScheduleError(f"lead={lead}: give 2, which hides messages behind a pass, or 1, which saves memory.")
    slices = counts.slice_counts
    groups = _groups(slices, at_least=num_ranks)
    # Before a group's first backward its slices have run through the earlier stages, and a microbatch through the last.
    warmup = max((stages_per_rank - 1) * sum(slices[m] for m in g) + max(slices[m] for m in g) for g in groups)

    turns = np.cumsum([sum(slices[m] for m in group) for group in groups])[:-1]

    def in_turn(op: Op, stages: Iterable[int]) -> Ints:
        by_stage = [np.split(counts.passes(op, stage), turns) for stage in stages]
        return np.concatenate([group for of_group in zip(*by_stage, strict=True) for group in of_group])

    # The first rank's; others have those of the same slices on their stages.
    passes = in_turn(Op.F, counts.stages(0)), in_turn(Op.B, reversed(counts.stages(0)))

    def row(rank: int) -> Ints:
        return _by_time(passes, _alternate(warmup + lead * (num_ranks - 1 - rank), len(passes[0]))) + rank * _MOST**2

    return counts.schedule(row)


def breadth_first(
    num_ranks: int, num_microbatches: int, num_slices: SliceCounts = 1, stages_per_rank: int = 2
) -> Schedule:
    """Returns the looped breadth-first schedule: all microbatches through one stage of the rank, then through the next.

    Stage g is on rank g mod p. Backwards run in exactly the opposite order, the last microbatch first:

        rank 0  0F0 0F1 0F2 2F0 2F1 2F2         2B2 2B1 2B0 0B2 0B1 0B0
        rank 1      1F0 1F1 1F2 3F0 3F1 3F2 3B2 3B1 3B0 1B2 1B1 1B0

    With equal times and ms >= p the bubble is (p-1)/(msv+p-1) of the step; every rank keeps all m microbatches.
    A stage's parameters are used in one stretch forward and one backward, so that its gradients can be reduced
    (or its shards gathered) while the other stages compute.

    Raises:
        ScheduleError: a count is below 1.
    """
    import numpy as np

    counts = Counts("breadth-first", num_ranks, num_microbatches, num_slices, stages_per_rank)

    def row(rank: int) -> Ints:
        forward = np.concatenate([counts.passes(Op.F, stage) for stage in counts.stages(rank)])
        return np.concatenate([forward, forward[::-1] + (NUMBERS[Op.B] - NUMBERS[Op.F]) * _MOST**3])

    return counts.schedule(row)


def _groups(slices: Sequence[int], at_least: int) -> list[range]:
    """Returns as many groups of microbatches with at least `at_least` slices as possible, larger groups first.

    They have nearly equal numbers of microbatches, or where that leaves one of them with fewer slices, each as few
    microbatches as it can have, and the last one the rest.
    """
    ends, held = [0], 0
    for end, count in enumerate(slices, start=1):
        held += count
        if held >= at_least:
            ends.append(end)
            held = 0
    ends = [*ends[: max(len(ends) - 1, 1)], len(slices)]
    num_groups = len(ends) - 1
    sizes = [(len(slices) + num_groups - 1 - i) // num_groups for i in range(num_groups)]
    even = [range(first, end) for first, end in pairwise(accumulate(sizes, initial=0))]
    if all(sum(slices[m] for m in group) >= at_least for group in even):
        return even
    return [range(first, end) for first, end in pairwise(ends)]


def zb_v(num_ranks: int, num_microbatches: int, num_slices: SliceCounts = 1) -> Schedule:
    """Returns ZB-V, which has no bubble with the memory of 1F1B (Zero Bubble Pipeline Parallelism, section 6).

    Rank r holds stages r and 2p-1-r, so a microbatch turns around on the last rank and its loss is on rank 0:

        rank 0  0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0I0 0W0 3F2 3I2 3W2 0I1 0W1 0I2 0W2
        rank 1      1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1I1 2I2 1I2 1W1 2W2 1W2

    Where F, I and W take the same time and ms >= p+s, the step takes (p-1)F + 2ms(F+I+W), with F, I and W the times of
    one of the 2p stages; from ms >= 2(p-1)+s on, no rank waits from its first forward to its last weight gradient.
    Every rank keeps 1 + (p-1)/s microbatches at most. With one slice and m >= 2p-1 it is PyTorch's
    ScheduleZBVZeroBubble; with more, s-1 slices pass the V before the first backward and come back after the last
    forward. With fewer than 2(p-1)+s slices in all, they follow each other as the last ones of so many do. Where
    ms <= p+s-1 all slices fit that memory at once: then they follow each other as in `v_half`, in the least time that
    F, I and W of one unit allow.
    """
    counts = Counts("zb-v", num_ranks, num_microbatches, num_slices)
    if counts.total < num_ranks + counts.most_slices:
        block = _half_block(num_ranks)
        return _repeat(block._replace(limits=[counts.total] * 2 * num_ranks, most_held=2 * counts.total), counts)
    num_lacking = 2 * (num_ranks - 1) + counts.most_slices - counts.total
    if num_lacking > 0:
        return _last_of_full_pipeline(counts, num_lacking)

    def row(rank: int) -> Ints:
        return _by_time(_v_passes(counts, rank), [*_places_in_full_row(counts, rank, counts.total)])

    return counts.schedule(row, v_shaped=True)


def _v_passes(counts: Counts, rank: int) -> list[Ints]:
    """Returns F, I and W of a rank's stage on the way down the V, then of the one on the way up."""
    stages = rank, 2 * counts.num_ranks - 1 - rank
    return [counts.passes(op, stage) for stage in stages for op in (Op.F, Op.I, Op.W)]


def _places_in_full_row(counts: Counts, rank: int, num_slices: int) -> Ints:
    """Returns where the passes of `_v_passes` stand in the rank's row of ZB-V, (6, slices), with slices enough to fill
    the pipeline."""
    import numpy as np

    below = counts.num_ranks - rank  # this rank and those after it
    turned = rank + counts.most_slices - 1  # slices on their way up before the first backward starts
    # In small letters the passes of the stage on the way up.
    kinds = "F" * (2 * below - 1) + "fF" * turned + "fiw" * below + "FIWfiw" * (num_slices - turned - below)
    kinds += "Ii" * turned + "IW" * below + "w" * num_slices + "W" * num_slices
    codes = np.frombuffer(kinds.encode(), np.uint8)
    # What is used up is left out.
    marks = np.concatenate([np.flatnonzero(codes == ord(letter))[:num_slices] for letter in "FIWfiw"])
    places: Ints = np.argsort(np.argsort(marks)).reshape(6, num_slices)
    return places


def _last_of_full_pipeline(counts: Counts, num_lacking: int) -> Schedule:
    """Returns the order of the last slices of ZB-V with at least `num_lacking` more before them, each pass as early as
    its rank's memory allows.

    In a full pipeline with equal times no rank waits: a pass starts at its rank's number plus its place in the row.
    """
    import numpy as np

    num_before = -(-num_lacking // counts.most_slices) * counts.most_slices
    ranks = range(counts.num_ranks)
    places = [_places_in_full_row(counts, rank, num_before + counts.total)[:, num_before:] + rank for rank in ranks]
    most_held = 2 * (counts.num_ranks - 1 + counts.most_slices)
    return _due_first(counts, np.concatenate(places), [counts.total] * 2 * counts.num_ranks, most_held)


def v_half(num_ranks: int, num_microbatches: int, num_slices: SliceCounts = 1) -> Schedule:
    """Returns V-Half, with half of 1F1B's activations (Pipeline Parallelism with Controllable Memory, section 3).

    The placement is that of `zb_v`. In the building block a slice goes down the V in steps of two passes and up
    in steps of one:

        rank 0  0F0 0F1 0F2         5F0 5I0 5W0         5F1 5I1 0I0 5W1 0W0 5F2 5I2 0I1 0W1 5W2     0I2 0W2
        rank 1      1F0 1F1     4F0         4I0 4W0 4F1 1F2 1I0 4I1 4W1 4F2 1W0 1I1 4I2 1W1 4W2 1I2 1W2
        rank 2          2F0 3F0 2F1 3F1         3I0 2I0 2W0 2F2 3W0 3F2 3I1 2I1 2W1 3W1 3I2 2I2 2W2 3W2

    A rank keeps at most 1 + floor(p/2)/s microbatches, where rank 0 of 1F1B keeps 1 + (p-1)/s. Where F, I and W of
    each of the 2p stages take one unit and ms >= p+s-1, a rank waits 3p-4 units of the step at most, where it waits
    6(p-1) under 1F1B.
    """
    counts = Counts("v-half", num_ranks, num_microbatches, num_slices)
    return _repeat(_half_block(num_ranks), counts)


def _half_block(num_ranks: int) -> _Block:
    at_loss = 3 if num_ranks % 2 == 0 else 0
    return _building_block(num_ranks, down=2, up=1, at_loss=at_loss, at_turn=1)


def v_min(num_ranks: int, num_microbatches: int, num_slices: SliceCounts = 1) -> Schedule:
    """Returns V-Min, with a third of 1F1B's activations (Pipeline Parallelism with Controllable Memory, section 3).

    The placement is that of `zb_v`. In the building block a slice goes down and up the V without waiting:

        rank 0  0F0 0F1             5F0 5I0 5W0 5F1 0F2 5I1 0I0 5W1 0W0     5F2 5I2 0I1 0W1 5W2     0I2 0W2
        rank 1      1F0 1F1     4F0     4F1 4I0 4W0     1I0 1F2 4I1 1W0 4F2 4W1 1I1 4I2 1W1 4W2 1I2 1W2
        rank 2          2F0 3F0 2F1 3F1         3I0 2I0 2W0 3W0 2F2 3F2 3I1 2I1 2W1 3W1 3I2 2I2 2W2 3W2

    A rank keeps at most 1 + floor((p+1)/3)/s microbatches, where rank 0 of 1F1B keeps 1 + (p-1)/s. Where F, I
    and W of each of the 2p stages take one unit, a rank waits 4p-5 units of the step at most, where it waits 6(p-1)
    under 1F1B. Times that differ cost it more than the other schedules, because no pass is left to
    fill a gap.
    """
    counts = Counts("v-min", num_ranks, num_microbatches, num_slices)
    at_loss = 2 if num_ranks % 3 == 0 else 0
    return _repeat(_building_block(num_ranks, down=1, up=1, at_loss=at_loss, at_turn=0), counts)


_MOST_INTERPRETED = 2000  # passes whose order is found without loading what is compiled
_PERIOD = 6  # units of time: F, I and W of two stages


class _Block(NamedTuple):
    """The way of one slice over the V, which repeats every 6 units."""

    forward: list[int]
    """When each stage runs the slice's F."""
    backward: list[int]
    """When each stage runs its I."""
    limits: list[int]
    """How many slices each stage holds at most."""
    most_held: int
    """How many slices a rank's two stages hold together at most, which may be fewer: they needn't be full at once."""


def _building_block(num_ranks: int, down: int, up: int, at_loss: int, at_turn: int) -> _Block:
    """Returns the way of one slice that can start every 6 units without any rank having two passes at the same time.

    The slice takes `down` units from rank to rank towards the last one and `up` units back, first with its F and
    then, from the last stage, with its I; it rests `at_loss` units between F and I of the last stage and `at_turn`
    between the last rank's two I. They must be such that a rank's four passes differ modulo 6; W takes the two
    units of six that are left. A rank holds its two stages' activations of a slice for about 2(down+up)(p-1) units,
    so a third of that number over p slices: 2p/3 of them with 1 and 1, p with 2 and 1, of 2p under 1F1B.
    """
    ramp = (down + up) * (num_ranks - 1)
    loss = ramp + 1  # F of the last stage
    back = loss + 1 + at_loss  # I of the last stage
    end = back + ramp + 1 + at_turn  # I of stage 0
    passes = [((down * r, end - up * r), (loss - up * r, back + down * r)) for r in range(num_ranks)]
    stages = [lower for lower, _ in passes] + [upper for _, upper in reversed(passes)]
    most_held, lower_limits, upper_limits = zip(*starmap(_least_held, passes), strict=True)
    return _Block(
        forward=[forward for forward, _ in stages],
        backward=[backward for _, backward in stages],
        limits=[*lower_limits, *reversed(upper_limits)],
        most_held=max(most_held),
    )


def _least_held(lower: tuple[int, int], upper: tuple[int, int]) -> tuple[int, int, int]:
    """Returns what a rank's two stages hold at most together, and each by itself, given their F and I, with W in the
    free units in which that is least."""
    free = set(range(_PERIOD)) - {time % _PERIOD for time in (*lower, *upper)}
    choices = []
    for first, second in permutations(free):
        below = [_held(*lower, first, time) for time in range(_PERIOD)]
        above = [_held(*upper, second, time) for time in range(_PERIOD)]
        together = max(map(sum, zip(below, above, strict=True)))
        choices.append((together, max(below), max(above)))
    return min(choices, key=lambda choice: (choice[0], choice[1] + choice[2]))


def _held(forward: int, backward: int, free: int, time: int) -> int:
    """Returns the slices of a stage that are held at a time between the start of F and the end of W, which runs in the
    first free unit after I."""
    weight = backward + 1 + (free - backward - 1) % _PERIOD
    return (time - forward) // _PERIOD - (time - weight - 1) // _PERIOD


def _repeat(block: _Block, counts: Counts) -> Schedule:
    """Returns the block once per slice, each pass as early as its rank's memory allows.

    With s slices, s-1 go over the V before one can go backward: there the block repeats every 2 units instead of
    6, and a stage holds s-1 more slices. W is due when its stage's next forward needs its memory. With one slice every
    pass has a unit of its own, so running the pass that is due first, of those that can run, ends each when it is due
    or earlier: the step is no longer than the blocks in a row. The ranks can't get stuck: a limit is at least a
    microbatch's slices, and a forward leaves room on its rank for those that are due before it.
    """
    import numpy as np

    stages = [stage for rank in range(counts.num_ranks) for stage in (rank, 2 * counts.num_ranks - 1 - rank)]
    forward, backward, limits = (
        np.array(times)[stages, None] for times in (block.forward, block.backward, block.limits)
    )
    numbers, ramp = np.arange(counts.total), counts.most_slices - 1

    def starts(slices: Ints) -> Floats:
        times: Floats = forward + 2.0 * np.minimum(slices, ramp) + _PERIOD * np.maximum(slices - ramp, 0)
        return times

    following = numbers + limits + ramp
    weights = np.where(following < counts.total, starts(following) - 1, np.inf)
    due = np.stack([starts(numbers), backward + 2 * ramp + _PERIOD * numbers, weights], axis=1)
    return _due_first(counts, due, [limit + ramp for limit in limits.ravel()], block.most_held + 2 * ramp)


def _due_first(counts: Counts, due: Floats | Ints, limits: Sequence[int], most_held: int) -> Schedule:
    """Returns the order in which each rank runs, of the passes that can run, the one that is due first.

    Args:
        counts: of the V-shaped schedule.
        due: when each pass is due, in the order of ranks, their stages down and up the V, F, I and W, and slices.
        limits: how many slices each stage holds at most, one rank's two stages after the other's.
        most_held: how many slices the two stages of a rank hold together at most.
    """
    import numpy as np

    from slipstream.schedule.action_arrays import ActionArrays, sweeps  # loads numpy
    from slipstream.schedule.sweep import StageSlots

    arrays = ActionArrays.of(counts.schedule(lambda rank: np.concatenate(_v_passes(counts, rank)), v_shaped=True))
    times = np.asarray(due, float).ravel()
    # A rank's two stages have a queue each of F, I and W, in which one pass follows the other.
    size, number = counts.total, np.arange(len(times))
    queue, earlier = number // size, np.flatnonzero((number + 1) % size)
    forwards = np.arange(0, len(times), 3 * size).reshape(-1, 2)
    held = arrays.is_one_of(Op.F).astype(float), arrays.is_one_of(Op.W).astype(float)
    graph = arrays.graph(
        np.ones(len(times)), chain=queue // 3 % 2, precedence=arrays.precedence.with_pairs(earlier, earlier + 1)
    )._replace(acquired=held[0], released=held[1])
    priority = np.empty(len(times))
    priority[np.lexsort((queue, times))] = number
    slots = StageSlots(
        due=times,
        forwards=forwards,
        ends=forwards + size,
        of_stage=np.array(limits).reshape(-1, 2),
        of_rank=np.full(counts.num_ranks, most_held),
    )
    order = sweeps(compiled=len(times) > _MOST_INTERPRETED).place_due(graph, priority, slots)
    return arrays.only(np.concatenate(order.by_rank()))


class ScheduleKind(NamedTuple):
    """A named schedule: `make(num_ranks, num_microbatches, num_slices)`, which takes the stages of a rank besides where
    that number isn't fixed."""

    make: Callable[..., Schedule]
    stages_per_rank: range = range(1, 2)
    """The numbers of stages that a rank can hold."""
    splits: bool = False
    """Whether all backwards are I and W."""
    dominated_by: str | None = None
    """Another schedule that is as fast with as much memory or less, for up to `dominated_up_to` microbatches."""
    dominated_up_to: int = sys.maxsize
    holds_all: bool = False
    """Whether a rank has the forwards of all microbatches before its first backward."""


_ANY, _TWO = range(1, sys.maxsize), range(2, 3)
SCHEDULES: dict[str, ScheduleKind] = {
    "gpipe": ScheduleKind(gpipe, dominated_by="1f1b", holds_all=True),
    "1f1b": ScheduleKind(one_f_one_b),
    "interleaved-1f1b": ScheduleKind(interleaved_one_f_one_b, _ANY),
    "breadth-first": ScheduleKind(
        breadth_first, _ANY, dominated_by="interleaved-1f1b", dominated_up_to=1, holds_all=True
    ),
    "zb-h1": ScheduleKind(zb_h1, splits=True),
    "zb-h2": ScheduleKind(zb_h2, splits=True),
    "zb-v": ScheduleKind(zb_v, _TWO, splits=True),
    "v-half": ScheduleKind(v_half, _TWO, splits=True),
    "v-min": ScheduleKind(v_min, _TWO, splits=True),
}
"""Every schedule that has a name: `2 in SCHEDULES["zb-v"].stages_per_rank`."""

USUAL_SCHEDULE, USUAL_SLICES = "1f1b", 8
"""The order, and the slices of a causal LM's sequence, where nobody gives them and nothing is planned."""

AUTOMATIC = ("auto", "auto-v")
"""The names of orders that a `Pipeline` searches itself: in the looped placement, and in the V-shaped one."""


def fewest_stages(name: str | Schedule | None) -> int:
    """Returns the least number of stages on a rank of an order by its name."""
    if name == "auto-v":
        return 2
    return SCHEDULES[name].stages_per_rank[0] if isinstance(name, str) and name in SCHEDULES else 1


def placed_as(name: str, stages_per_rank: int) -> str:
    """Returns the name in `SCHEDULES` that has the placement of `name`, which may be one of `AUTOMATIC`.

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
    """Raises ScheduleError, with the nearest name, if `name` is neither in `SCHEDULES` nor among `besides`."""
    names = (*SCHEDULES, *besides)
    if name not in names:
        raise ScheduleError(
            f"schedule={name!r} is not known{schedule_hint(name, names)} Choose one of {', '.join(names)}, or pass a "
            "Schedule."
        )


def schedule_hint(name: str, names: Sequence[str]) -> str:
    """Returns the end of a sentence that says that `name` is unknown: what others call so, or the nearest name."""
    meant = _OTHER_NAMES.get(re.sub(r"[^a-z0-9]|schedule", "", name.lower()))
    return did_you_mean(name, names) if meant is None else f"; did you mean {meant}?"


_OTHER_NAMES = {
    **dict.fromkeys(("zerobubble", "zb", "zb1p", "interleavedzerobubble"), "'zb-h1', or 'zb-v' with 2 stages per rank"),
    **dict.fromkeys(("zbv", "zbvzerobubble", "dualpipev"), "'zb-v'"),
    **dict.fromkeys(("interleaved", "interleaved1f1b", "1f1binterleaved", "vpp"), "'interleaved-1f1b'"),
    **dict.fromkeys(("loopedbfs", "bfs"), "'breadth-first'"),
}
"""What other libraries' and papers' names of schedules, in lower case and without signs, mean here."""


def _check_stages(name: str, like: str, stages_per_rank: int) -> None:
    allowed = SCHEDULES[like].stages_per_rank
    if stages_per_rank not in allowed:
        allowed_text = f"exactly {allowed.start}" if len(allowed) == 1 else f"at least {allowed.start}"
        others = ", ".join(other for other, kind in SCHEDULES.items() if stages_per_rank in kind.stages_per_rank)
        raise ScheduleError(
            f"stages_per_rank={stages_per_rank}, but the schedule {name!r} has {allowed_text}. Give stages_per_rank="
            f"{allowed.start}{f', or a schedule that can have {stages_per_rank}: {others}' if others else ''}."
        )


def make_schedule(
    name: str, num_ranks: int, num_microbatches: int, num_slices: SliceCounts = 1, stages_per_rank: int = 1
) -> Schedule:
    """Returns a schedule by its name in `SCHEDULES`, with compute actions only.

    `num_slices` are those of every microbatch, or a list of each one's; the order is then the one of equal
    microbatches, with the largest number of slices in flight where that number matters.

    Raises:
        ScheduleError: the name is unknown (the message has the nearest one), the schedule doesn't allow the number of
            stages per rank (it has the allowed ones), or a count is below 1.
    """
    check_name(name)
    _check_stages(name, name, stages_per_rank)
    kind = SCHEDULES[name]
    several = () if len(kind.stages_per_rank) == 1 else (stages_per_rank,)
    return kind.make(num_ranks, num_microbatches, num_slices, *several)
