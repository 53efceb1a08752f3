"""Schedules with several stages per rank, stage g on rank g mod p: depth first and breadth first."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

from slipstream.schedule.action import Action, Op, ScheduleError
from slipstream.schedule.rows import Counts, alternate
from slipstream.schedule.schedule import Schedule, SliceCounts


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

    With equal times and ms >= p the bubble is (p-1)/(msv+p-1) of the step. With s >= p a group is one microbatch
    and rank r keeps 1 + d(p-1-r)/(sv) microbatches, d the lead; with k microbatches in the first group it keeps
    1 + (k-1)(v-1)/v + d(p-1-r)/(sv); never more than m. Megatron wants m to be a multiple of p. Here the m
    microbatches form as many groups of at least p slices as they can, of sizes as equal as they can be, the
    larger ones first; fewer than p slices in all are one group. Where microbatches differ in slices, a rank runs ahead
    by what the largest group and microbatch need.

    Raises:
        ScheduleError: a count is below 1, or `lead` is neither 1 nor 2.
    """
    counts = Counts("interleaved-1f1b", num_ranks, num_microbatches, num_slices, stages_per_rank)
    if lead not in (1, 2):
        raise ScheduleError(f"lead={lead}: give 2, which hides messages behind a pass, or 1, which saves memory.")
    slices = counts.slice_counts
    groups = _groups(slices, at_least=num_ranks)
    # Before a group's first backward its slices have run through the earlier stages, and a microbatch through the last.
    warmup = max((stages_per_rank - 1) * sum(slices[m] for m in g) + max(slices[m] for m in g) for g in groups)

    def row(rank: int) -> list[Action]:
        stages = counts.stages(rank)
        forward = [a for group in groups for g in stages for a in counts.passes(Op.F, g, group)]
        backward = [a for group in groups for g in reversed(stages) for a in counts.passes(Op.B, g, group)]
        return alternate(forward, backward, warmup + lead * (num_ranks - 1 - rank))

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
    counts = Counts("breadth-first", num_ranks, num_microbatches, num_slices, stages_per_rank)

    def row(rank: int) -> list[Action]:
        stages, last_first = counts.stages(rank), range(num_microbatches)[::-1]
        forward = [a for g in stages for a in counts.passes(Op.F, g)]
        return forward + [a for g in reversed(stages) for a in counts.passes(Op.B, g, last_first)]

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
    number = len(ends) - 1
    sizes = [(len(slices) + number - 1 - i) // number for i in range(number)]
    even = [range(first, end) for first, end in pairwise(accumulate(sizes, initial=0))]
    if all(sum(slices[m] for m in group) >= at_least for group in even):
        return even
    return [range(first, end) for first, end in pairwise(ends)]
