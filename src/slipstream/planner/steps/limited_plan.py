"""The plan of a step that keeps to a memory limit, as everything is counted that a rank holds."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import ceil

import numpy as np

from slipstream.array_types import Floats
from slipstream.errors import SlipstreamError
from slipstream.planner.order.ordering_problem import StepActions
from slipstream.planner.steps.step_problem import StepPlan, StepProblem
from slipstream.planner.steps.step_search import NothingFitsError, find_step_plan

_EFFORTS = (0.6, 0.3, 0.2, 0.2)  # of the tries with less and less room for activations, as shares
_SPARED = 0.02  # of the limit, on every rank: an order with less room holds other messages, at other times
_COUNTS = (1, 4, 16)  # slices of a sequence that is alone


@dataclass(frozen=True)
class StepMemory:
    """What a step may hold, in bytes.

    Args:
        limit: of each rank.
        state: of each rank's parameters, gradients and optimizer state.
        account: returns the most bytes that each rank holds with a plan.
    """

    limit: float
    state: Sequence[float]
    account: Callable[[StepPlan], Sequence[float]]


def find_plan_within(problem: StepProblem, memory: StepMemory) -> StepPlan:
    """Returns the plan of `find_step_plan` that the account says keeps to the limit.

    A plan that holds too much is planned again with as much less room, and a little less on every rank. Where that
    leads nowhere, the sequences come one after the other, which holds least. Where the order or the number of
    microbatches is given, the plan that holds too much is returned, for the caller to refuse. The same problem gives
    the same plan.

    Raises:
        SlipstreamError: where a sequence is too long even so: which, and what would do.
    """
    room: Floats = memory.limit - np.array(memory.state)
    for share in _EFFORTS:
        if room.min() <= 0:
            break
        try:
            plan = find_step_plan(replace(problem, room=tuple(room.tolist()), effort=share * problem.effort))
        except NothingFitsError:
            break
        excess = np.array(memory.account(plan)) - memory.limit
        if excess.max() <= 0:
            return plan
        room = room - np.maximum(excess, 0.0) - _SPARED * memory.limit
    return _one_by_one(problem, memory)


def _one_by_one(problem: StepProblem, memory: StepMemory) -> StepPlan:
    """Returns the plan that holds least: every sequence alone, with whole backwards, one after the other."""
    if problem.schedule is not None or problem.num_microbatches is not None:
        return find_step_plan(problem)
    plan, most = _least(problem, problem.lengths, memory)
    if most <= memory.limit:
        return plan
    raise _too_long(problem, memory)


def _least(problem: StepProblem, lengths: Sequence[int], memory: StepMemory) -> tuple[StepPlan, float]:
    """Returns the plan that holds least for sequences of these lengths, and the bytes of its fullest rank."""
    plans = [_alone(problem, lengths, count) for count in _COUNTS]
    most = [max(memory.account(plan)) for plan in plans]
    return plans[least := int(np.argmin(most))], most[least]


def _alone(problem: StepProblem, lengths: Sequence[int], count: int) -> StepPlan:
    """Returns the plan of each sequence by itself in at most `count` slices."""
    slices = tuple(_even(length, count, problem.granularity) for length in lengths)
    counts = [len(each) for each in slices]
    order = StepActions(problem.placement, counts).whole
    return StepPlan(tuple((number,) for number in range(len(lengths))), slices, order)


def _even(length: int, count: int, granularity: int) -> tuple[int, ...]:
    """Returns slices of a multiple of the granularity each, the last one of what is left."""
    each = ceil(length / (count * granularity)) * granularity
    return tuple(min(each, length - begin) for begin in range(0, length, each))


def _too_long(problem: StepProblem, memory: StepMemory) -> SlipstreamError:
    """Says which sequence is too long, how long it may be, and what else would do."""

    def most(length: int) -> float:
        return _least(problem, [length], memory)[1]

    number = int(np.argmax(problem.lengths))
    length = problem.lengths[number]
    lengths = range(1, length + 1)
    fitting = bisect_left(lengths, memory.limit, key=most) if most(1) <= memory.limit else 0
    what = f"one of {fitting} tokens would fit" if fitting else "not even one of 1 token would fit"
    needed = ceil(_least(problem, problem.lengths, memory)[1])
    return SlipstreamError(
        f"inputs[{number}] has {length} tokens, too many for memory.limit={memory.limit:.6g}: {what}, and these "
        f"sequences one after the other need {needed}. Cut it or leave it out, or give memory.limit={needed} or more, "
        "more ranks, or memory.recompute='full'."
    )
