"""Schedules with V-shaped placement: two stages per rank, the first and the last on rank 0, backwards split.

V-Half and V-Min repeat a building block: one slice's way over the V (Controllable Memory, section 3).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import replace
from itertools import groupby, permutations
from math import inf
from typing import NamedTuple

from slipstream.schedule.action import Action, Op
from slipstream.schedule.dependencies import predecessors
from slipstream.schedule.rows import Counts
from slipstream.schedule.schedule import Schedule, SliceCounts


def zb_v(num_ranks: int, num_microbatches: int, num_slices: SliceCounts = 1) -> Schedule:
    """Returns ZB-V, which has no bubble with the memory of 1F1B (Zero Bubble Pipeline Parallelism, section 6).

    Rank r holds stages r and 2p-1-r, so a microbatch turns around on the last rank and its loss is on rank 0:

        rank 0  0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0I0 0W0 3F2 3I2 3W2 0I1 0W1 0I2 0W2
        rank 1      1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1I1 2I2 1I2 1W1 2W2 1W2

    Where F, I and W take the same time and ms >= 2(p-1)+s, no rank waits from its first forward to its last weight
    gradient: the step takes (p-1)F + 2ms(F+I+W), with F, I and W the times of one of the 2p stages. Every rank
    keeps 1 + (p-1)/s microbatches, at most m. With one slice it is PyTorch's ScheduleZBVZeroBubble; with more, s-1
    slices pass the V before the first backward and come back after the last forward.
    """
    counts = Counts("zb-v", num_ranks, num_microbatches, num_slices)
    # With too few slices to fill the pipeline, the order is that of more microbatches without the additional ones.
    most, padding = counts.most_slices, 2 * (num_ranks - 1) + counts.most_slices - sum(counts.slice_counts)
    filled = (*counts.slice_counts, *[most] * max(-(-padding // most), 0))
    padded = replace(counts, num_microbatches=len(filled), num_slices=filled)
    num_units = sum(filled)

    def row(rank: int) -> list[Action]:
        down, up = (_Stage(padded, stage) for stage in (rank, 2 * num_ranks - 1 - rank))
        below = num_ranks - rank  # this rank and those after it
        turned = rank + most - 1  # slices on their way up before the first backward starts
        actions = down.take("F" * (2 * below - 1))
        for _ in range(turned):
            actions += up.take("F") + down.take("F")
        for _ in range(below):
            actions += up.take("FIW")
        for _ in range(num_units - turned - below):
            actions += down.take("FIW") + up.take("FIW")
        for _ in range(turned):
            actions += down.take("I") + up.take("I")
        for _ in range(below):
            actions += down.take("IW")
        actions += up.take("W" * num_units) + down.take("W" * num_units)
        return [action for action in actions if action.microbatch < num_microbatches]

    return counts.schedule(row, v_shaped=True)


class _Stage:
    """The passes of one stage that have not been taken, each kind in its order."""

    def __init__(self, counts: Counts, stage: int) -> None:
        self._passes: dict[str, deque[Action]] = {op: deque(counts.passes(op, stage)) for op in (Op.F, Op.I, Op.W)}

    def take(self, ops: str) -> list[Action]:
        """Returns the next pass of every kind in `ops`, without kinds that are used up."""
        return [self._passes[op].popleft() for op in ops if self._passes[op]]


def v_half(num_ranks: int, num_microbatches: int, num_slices: SliceCounts = 1) -> Schedule:
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
    counts = Counts("v-half", num_ranks, num_microbatches, num_slices)
    at_loss = 3 if num_ranks % 2 == 0 else 0
    return _repeat(_building_block(num_ranks, down=2, up=1, at_loss=at_loss, at_turn=1), counts)


def v_min(num_ranks: int, num_microbatches: int, num_slices: SliceCounts = 1) -> Schedule:
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
    counts = Counts("v-min", num_ranks, num_microbatches, num_slices)
    at_loss = 2 if num_ranks % 3 == 0 else 0
    return _repeat(_building_block(num_ranks, down=1, up=1, at_loss=at_loss, at_turn=0), counts)


_PERIOD = 6  # units of time: F, I and W of two stages


class _StageOfBlock(NamedTuple):
    """The times at which the block's slice passes a stage, and how many slices the stage holds under repetition."""

    forward: int
    backward: int
    limit: int


def _building_block(num_ranks: int, down: int, up: int, at_loss: int, at_turn: int) -> list[_StageOfBlock]:
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
    ranks = [_with_limits(lower, upper) for lower, upper in passes]
    return [lower for lower, _ in ranks] + [upper for _, upper in reversed(ranks)]


def _with_limits(lower: tuple[int, int], upper: tuple[int, int]) -> tuple[_StageOfBlock, _StageOfBlock]:
    """Returns a rank's two stages, given their F and I, with W in the free units in which the rank holds least."""
    free = sorted(set(range(_PERIOD)) - {time % _PERIOD for time in (*lower, *upper)})
    choices = [
        (_StageOfBlock(*lower, _held(*lower, first)), _StageOfBlock(*upper, _held(*upper, second)))
        for first, second in permutations(free)
    ]
    return min(choices, key=lambda stages: stages[0].limit + stages[1].limit)


def _held(forward: int, backward: int, free: int) -> int:
    """Returns the slices between the start of F and the end of W, which runs in the first such unit after I."""
    weight = backward + 1 + (free - backward - 1) % _PERIOD
    return -(-(weight + 1 - forward) // _PERIOD)


def _repeat(block: list[_StageOfBlock], counts: Counts) -> Schedule:
    """Returns the block once per slice, each pass as early as its rank and its stage's limit allow.

    With s slices, s-1 go over the V before one can go backward: there the block repeats every 2 units instead of
    6, and a stage holds s-1 more slices. W is due when the next forward needs its memory. With one slice every pass
    has a unit of its own, so running the pass that is due first, of those that can run, ends each when it
    is due or earlier: the step is no longer than the blocks in a row.
    """
    num_units, ramp = sum(counts.slice_counts), counts.most_slices - 1
    limits = [stage.limit + ramp for stage in block]
    due: dict[Action, float] = {}
    for g, stage in enumerate(block):
        forward = counts.passes(Op.F, g)
        for k, action in enumerate(forward):
            due[action] = stage.forward + 2 * min(k, ramp) + _PERIOD * max(k - ramp, 0)
        for k, action in enumerate(counts.passes(Op.I, g)):
            due[action] = stage.backward + 2 * ramp + _PERIOD * k
        for k, action in enumerate(counts.passes(Op.W, g), start=limits[g]):
            due[action] = due[forward[k]] - 1 if k < num_units else inf
    rows = _by_rank(due, (*range(counts.num_ranks), *reversed(range(counts.num_ranks))))
    return _by_due_time(counts.schedule(rows.__getitem__, v_shaped=True), due, limits)


def _by_due_time(passes: Schedule, due: dict[Action, float], limits: list[int]) -> Schedule:
    """Reorders each rank's passes: in every unit of time it runs, of those that can run, the one due first.

    A stage that holds its limit of slices takes no other until a W. The ranks can't get stuck: a limit is
    at least a microbatch's slices, so all of them reach the last stage and the backwards begin.
    """
    before = {action: frozenset(predecessors(action, passes)) for action in due}
    kinds = [groupby(row, key=lambda action: (action.stage, action.op)) for row in passes.actions]
    waiting = [[deque(kind) for _, kind in row] for row in kinds]
    held = [0] * len(limits)
    takes = {Op.F: 1, Op.I: 0, Op.W: -1}
    done: dict[Action, None] = {}  # in order

    def can_run(action: Action) -> bool:
        fits = action.op is not Op.F or held[action.stage] < limits[action.stage]
        return fits and before[action] <= done.keys()

    while len(done) < len(due):
        by_due = (sorted(filter(None, queues), key=lambda queue: due[queue[0]]) for queues in waiting)
        ready = (next((queue for queue in queues if can_run(queue[0])), None) for queues in by_due)
        for action in [queue.popleft() for queue in list(ready) if queue]:
            held[action.stage] += takes[action.op]
            done[action] = None
    return replace(passes, actions=_by_rank(done, passes.placement))


def _by_rank(actions: Iterable[Action], placement: tuple[int, ...]) -> tuple[tuple[Action, ...], ...]:
    """Returns each rank's actions, in the order given."""
    rows: list[list[Action]] = [[] for _ in range(max(placement) + 1)]
    for action in actions:
        rows[placement[action.stage]].append(action)
    return tuple(map(tuple, rows))
