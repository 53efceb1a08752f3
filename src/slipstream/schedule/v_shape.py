"""Schedules with V-shaped placement: two stages per rank, the first and the last on rank 0, backwards split."""

from __future__ import annotations

from collections import deque

from slipstream.schedule.action import Action, Op, Schedule
from slipstream.schedule.building_block import building_block, repeat_block, v_shaped
from slipstream.schedule.rows import backwards, check_counts, forwards


def zb_v(num_ranks: int, num_microbatches: int, num_slices: int = 1) -> Schedule:
    """Returns ZB-V, which has no bubble with the memory of 1F1B (Zero Bubble Pipeline Parallelism, section 6).

    Rank r holds stages r and 2p-1-r, so a microbatch turns around on the last rank and its loss is on rank 0:

        rank 0  0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0I0 0W0 3F2 3I2 3W2 0I1 0W1 0I2 0W2
        rank 1      1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1I1 2I2 1I2 1W1 2W2 1W2

    Where F, I and W take the same time and ms >= 2(p-1)+s, no rank waits from its first forward to its last weight
    gradient: the step takes (p-1)F + 2ms(F+I+W), with F, I and W the times of one of the 2p stages. Every rank
    keeps 1 + (p-1)/s microbatches, at most m. With one slice it is PyTorch's ScheduleZBVZeroBubble; with more, s-1
    slices pass the V before the first backward and come back after the last forward.
    """
    check_counts("zb-v", num_ranks=num_ranks, num_microbatches=num_microbatches, num_slices=num_slices)
    # With too few slices to fill the pipeline, the order is that of more microbatches without the additional ones.
    padded = max(num_microbatches, -(-(2 * (num_ranks - 1) + num_slices) // num_slices))

    def row(rank: int) -> tuple[Action, ...]:
        down, up = (_Stage(stage, padded, num_slices) for stage in (rank, 2 * num_ranks - 1 - rank))
        below = num_ranks - rank  # this rank and those after it
        turned = rank + num_slices - 1  # slices on their way up before the first backward starts
        actions = down.take("F" * (2 * below - 1))
        for _ in range(turned):
            actions += up.take("F") + down.take("F")
        for _ in range(below):
            actions += up.take("FIW")
        for _ in range(padded * num_slices - turned - below):
            actions += down.take("FIW") + up.take("FIW")
        for _ in range(turned):
            actions += down.take("I") + up.take("I")
        for _ in range(below):
            actions += down.take("IW")
        actions += [*up.weights, *down.weights]
        return tuple(action for action in actions if action.microbatch < num_microbatches)

    return v_shaped("zb-v", tuple(map(row, range(num_ranks))), num_microbatches, num_slices)


class _Stage:
    """The passes of one stage that have not been taken, each kind in its order."""

    def __init__(self, stage: int, num_microbatches: int, num_slices: int) -> None:
        microbatches = range(num_microbatches)
        self.weights = deque(backwards(stage, microbatches, num_slices, Op.W))
        self._passes = {
            "F": deque(forwards(stage, microbatches, num_slices)),
            "I": deque(backwards(stage, microbatches, num_slices, Op.I)),
            "W": self.weights,
        }

    def take(self, ops: str) -> list[Action]:
        """Returns the next pass of every kind in `ops`, without kinds that are used up."""
        return [self._passes[op].popleft() for op in ops if self._passes[op]]


def v_half(num_ranks: int, num_microbatches: int, num_slices: int = 1) -> Schedule:
    """Returns V-Half, with half of 1F1B's activations (Pipeline Parallelism with Controllable Memory, section 3).

    The placement is that of `zb_v`. In the building block a slice goes down the V in steps of two passes and up
    in steps of one:

        rank 0  0F0 0F1 0F2         5F0 5I0 5W0         5F1 5I1 0I0 5W1 0W0 5F2 5I2 0I1 0W1 5W2     0I2 0W2
        rank 1      1F0 1F1 1F2 4F0         4I0 4W0 4F1 1I0 1W0 4I1 4W1 4F2     1I1 4I2 1W1 4W2 1I2 1W2
        rank 2          2F0 3F0 2F1 3F1         3I0 2I0 2W0 2F2 3W0 3F2 3I1 2I1 2W1 3W1 3I2 2I2 2W2 3W2

    A rank keeps at most 1 + floor(p/2)/s microbatches, where rank 0 of 1F1B keeps 1 + (p-1)/s. Where F, I and W of
    each of the 2p stages take one unit and ms >= p+s-1, a rank waits 3p-4 units of the step at most, where it waits
    6(p-1) under 1F1B.
    """
    check_counts("v-half", num_ranks=num_ranks, num_microbatches=num_microbatches, num_slices=num_slices)
    at_loss = 3 if num_ranks % 2 == 0 else 0
    block = building_block(num_ranks, down=2, up=1, at_loss=at_loss, at_turn=1)
    return repeat_block("v-half", block, num_microbatches, num_slices)


def v_min(num_ranks: int, num_microbatches: int, num_slices: int = 1) -> Schedule:
    """Returns V-Min, with a third of 1F1B's activations (Pipeline Parallelism with Controllable Memory, section 3).

    The placement is that of `zb_v`. In the building block a slice goes down and up the V without waiting:

        rank 0  0F0 0F1 0F2         5F0 5I0 5W0 5F1 5I1 5W1 0I0 0W0         5F2 5I2 0I1 0W1 5W2     0I2 0W2
        rank 1      1F0 1F1 1F2 4F0     4F1 4I0 4W0     1I0 4I1 1W0 4W1 4F2     1I1 4I2 1W1 4W2 1I2 1W2
        rank 2          2F0 3F0 2F1 3F1         3I0 2I0 2W0 2F2 3W0 3F2 3I1 2I1 2W1 3W1 3I2 2I2 2W2 3W2

    A rank keeps at most 1 + (1 + floor(2p/3))/(2s) microbatches, where rank 0 of 1F1B keeps 1 + (p-1)/s. Where F, I
    and W of each of the 2p stages take one unit, a rank waits 4p-5 units of the step at most, where it waits 6(p-1)
    under 1F1B. Times that differ cost it more than the other schedules, because no pass is left to
    fill a gap.
    """
    check_counts("v-min", num_ranks=num_ranks, num_microbatches=num_microbatches, num_slices=num_slices)
    at_loss = 2 if num_ranks % 3 == 0 else 0
    block = building_block(num_ranks, down=1, up=1, at_loss=at_loss, at_turn=0)
    return repeat_block("v-min", block, num_microbatches, num_slices)
