"""Orders of a schedule's actions at random, as the rules allow them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from random import Random

from slipstream import Action, Schedule
from slipstream.planner.order.ordering_problem import StepActions
from slipstream.schedule import Op, predecessors


def by_rank(order: Iterable[Action], placement: tuple[int, ...], num_ranks: int) -> tuple[tuple[Action, ...], ...]:
    """The actions of each rank, in this order."""
    rows: list[list[Action]] = [[] for _ in range(num_ranks)]
    for action in order:
        rows[placement[action.stage]].append(action)
    return tuple(map(tuple, rows))


def random_order(schedule: Schedule, random: Random) -> Schedule:
    """The schedule with its actions in any order."""
    left = {action: {*predecessors(action, schedule)} for action in schedule.positions}
    order: list[Action] = []
    while left:
        order.append(random.choice([action for action, before in left.items() if not before]))
        del left[order[-1]]
        for before in left.values():
            before.discard(order[-1])
    return replace(schedule, actions=by_rank(order, schedule.placement, schedule.num_ranks))


def partly_split(step: StepActions, random: Random, share: float = 0.5) -> Schedule:
    """The step's actions in any order, such a share of its backwards in halves."""
    rows: list[list[Action]] = []
    for row in step.whole.actions:
        rows.append([])
        for each in row:
            halves = each.op is Op.B and random.random() < share
            rows[-1] += [each.with_op(Op.I), each.with_op(Op.W)] if halves else [each]
    return random_order(step.schedule_of(rows), random)
