"""Schedules that repeat a building block: one slice's way over a V of stages (Controllable Memory, section 3)."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import replace
from itertools import groupby, permutations
from math import inf
from typing import NamedTuple

from slipstream.schedule.action import Action, Op, Schedule
from slipstream.schedule.dependencies import predecessors
from slipstream.schedule.rows import backwards, forwards

_PERIOD = 6  # units of time: F, I and W of two stages


class StageOfBlock(NamedTuple):
    """The times at which the block's slice passes a stage, and how many slices the stage holds under repetition."""

    forward: int
    backward: int
    limit: int


def building_block(num_ranks: int, down: int, up: int, at_loss: int, at_turn: int) -> list[StageOfBlock]:
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
    ranks = [
        _with_limits((down * rank, end - up * rank), (loss - up * rank, back + down * rank))
        for rank in range(num_ranks)
    ]
    return [lower for lower, _ in ranks] + [upper for _, upper in reversed(ranks)]


def _with_limits(lower: tuple[int, int], upper: tuple[int, int]) -> tuple[StageOfBlock, StageOfBlock]:
    """Returns a rank's two stages, given their F and I, with W in the free units in which the rank holds least."""
    free = sorted(set(range(_PERIOD)) - {time % _PERIOD for time in (*lower, *upper)})
    choices = [
        (StageOfBlock(*lower, _held(*lower, first)), StageOfBlock(*upper, _held(*upper, second)))
        for first, second in permutations(free)
    ]
    return min(choices, key=lambda stages: stages[0].limit + stages[1].limit)


def _held(forward: int, backward: int, free: int) -> int:
    """Returns the slices between the start of F and the end of W, which runs in the first such unit after I."""
    weight = backward + 1 + (free - backward - 1) % _PERIOD
    return -(-(weight + 1 - forward) // _PERIOD)


def repeat_block(name: str, block: list[StageOfBlock], num_microbatches: int, num_slices: int) -> Schedule:
    """Returns the block once per slice, each pass as early as its rank and its stage's limit allow.

    With s slices, s-1 go over the V before one can go backward: there the block repeats every 2 units instead of
    6, and a stage holds s-1 more slices. W is due when the next forward needs its memory. With one slice every pass
    has a unit of its own, so running the pass that is due first, of those that can run, ends each when it
    is due or earlier: the step is no longer than the blocks in a row.
    """
    num_units, ramp = num_microbatches * num_slices, num_slices - 1
    microbatches = range(num_microbatches)
    limits = [stage.limit + ramp for stage in block]
    due: dict[Action, float] = {}
    for g, stage in enumerate(block):
        forward = forwards(g, microbatches, num_slices)
        for k, action in enumerate(forward):
            due[action] = stage.forward + 2 * min(k, ramp) + _PERIOD * max(k - ramp, 0)
        for k, action in enumerate(backwards(g, microbatches, num_slices, Op.I)):
            due[action] = stage.backward + 2 * ramp + _PERIOD * k
        for k, action in enumerate(backwards(g, microbatches, num_slices, Op.W), start=limits[g]):
            due[action] = due[forward[k]] - 1 if k < num_units else inf
    rows = _by_rank(due, (*range(len(block) // 2), *reversed(range(len(block) // 2))))
    return _by_due_time(v_shaped(name, rows, num_microbatches, num_slices), due, limits)


def _by_due_time(passes: Schedule, due: dict[Action, float], limits: list[int]) -> Schedule:
    """Reorders each rank's passes: in every unit of time it runs, of those that can run, the one due first.

    A stage that holds its limit of slices takes no other until a W. The ranks can't get stuck: a limit is
    at least a microbatch's slices, so all of them reach the last stage and the backwards begin.
    """
    before = {action: frozenset(predecessors(action, passes)) for action in due}
    waiting = [
        [deque(kind) for _, kind in groupby(row, key=lambda action: (action.stage, action.op))]
        for row in passes.actions
    ]
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


def v_shaped(name: str, rows: tuple[tuple[Action, ...], ...], num_microbatches: int, num_slices: int) -> Schedule:
    """Returns a schedule whose rank r of p holds stages r and 2p-1-r."""
    placement = (*range(len(rows)), *reversed(range(len(rows))))
    return Schedule(name, rows, placement, num_microbatches, num_slices)
