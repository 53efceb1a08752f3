"""Schedules with one stage a rank: GPipe, 1F1B, and zero-bubble ones, whose weight gradients fill idle time."""

from __future__ import annotations

from slipstream.schedule.action import Action, Op
from slipstream.schedule.rows import Counts, alternate
from slipstream.schedule.schedule import Schedule, SliceCounts


def gpipe(num_stages: int, num_microbatches: int, num_slices: SliceCounts = 1) -> Schedule:
    """Returns all forwards, then all backwards: GPipe, and with token slices TeraPipe.

    Microbatches go backward in forward order, the slices of each last in, first out:

        rank 0  F0.0 F0.1 F1.0 F1.1           B0.1 B0.0 B1.1 B1.0
        rank 1       F0.0 F0.1 F1.0 F1.1 B0.1 B0.0 B1.1 B1.0

    With equal times the bubble is (p-1)/(ms+p-1) of the step, and every rank keeps all m microbatches.
    """
    counts = Counts("gpipe", num_stages, num_microbatches, num_slices)
    return counts.schedule(lambda rank: counts.passes(Op.F, rank) + counts.passes(Op.B, rank))


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

    def row(rank: int) -> list[Action]:
        warmup = counts.most_slices + num_stages - 1 - rank
        return alternate(counts.passes(Op.F, rank), counts.passes(Op.B, rank), warmup)

    return counts.schedule(row)


def zb_h1(num_stages: int, num_microbatches: int, num_slices: SliceCounts = 1) -> Schedule:
    """Returns ZB-H1, 1F1B with delayed weight gradients (Zero Bubble Pipeline Parallelism, section 2.1).

    Rank r runs W of a slice after I of the r-th slice from it, so that all ranks keep what rank 0 of 1F1B keeps:

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

    def row(rank: int) -> list[Action]:
        forward, inputs, weights = (counts.passes(op, rank) for op in (Op.F, Op.I, Op.W))
        after = dict(zip(inputs[lead * rank :], weights, strict=False))  # the last ones find no I to follow
        actions: list[Action] = []
        for action in alternate(forward, inputs, counts.most_slices + lead * (counts.num_ranks - 1 - rank)):
            actions += [action, after[action]] if action in after else [action]
        return actions + weights[len(after) :]

    return counts.schedule(row)
