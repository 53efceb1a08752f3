"""A step's plan within a memory limit, or the plan with the least memory."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace
from math import ceil

import numpy as np

from slipstream.planner.order.ordering_problem import StepActions
from slipstream.planner.ragged.step_problem import StepMemory, StepPlan, StepProblem
from slipstream.planner.ragged.step_search import search_rows
from slipstream.planner.room import OutOfMemoryError, Room, first_within

_EFFORTS = (0.6, 0.3, 0.2, 0.2)  # shares of the effort for searches with less and less room for activations
_SPARED = 0.02  # share of the limit spared on every rank: with less room, an order has other messages at other times
_COUNTS = (1, 4, 16)  # slices of a lone sequence


def search_within_memory(problem: StepProblem) -> StepPlan:
    """Returns the plan with the shortest simulated step that is found within the memory.

    A plan that holds too much is planned again with as much less room, and a little less on every rank. Where that
    leads nowhere, the sequences come one after the other, with the least memory. Where the order or the number of
    microbatches is given, the plan that holds too much is returned, for the caller to refuse.

    Raises:
        OutOfMemoryError: where a sequence is too long even so: which, and the remedy.
    """
    memory = problem.memory
    if memory is None:
        return search_rows(problem)
    room = Room(memory.limit, np.array(memory.state), _SPARED * memory.limit)

    def find(share: float) -> StepPlan | None:
        if room.bytes.min() <= 0:
            return None
        try:
            return search_rows(replace(problem, room=tuple(room.bytes.tolist()), effort=share * problem.effort))
        except OutOfMemoryError:
            return None

    found = first_within(_EFFORTS, find, lambda plan: room.has_space(np.array(memory.account(plan))))
    return _one_by_one(problem, memory) if found is None else found


def _one_by_one(problem: StepProblem, memory: StepMemory) -> StepPlan:
    """Returns the plan with the least memory: every sequence alone, with whole backwards, one after the other."""
    if not (problem.given.is_open("schedule") and problem.given.is_open("num_microbatches")):
        return search_rows(problem)
    plan, most = _least(problem, problem.lengths, memory)
    if most <= memory.limit:
        return plan
    raise _too_long(problem, memory)


def _least(problem: StepProblem, lengths: Sequence[int], memory: StepMemory) -> tuple[StepPlan, float]:
    """Returns the plan with the least memory for sequences of these lengths, and the bytes of its fullest rank."""
    plans = [_alone(problem, lengths, count) for count in _COUNTS]
    most = [max(memory.account(plan)) for plan in plans]
    return plans[least := int(np.argmin(most))], most[least]


def _alone(problem: StepProblem, lengths: Sequence[int], count: int) -> StepPlan:
    """Returns the plan of each sequence by itself in at most `count` slices."""
    slices = tuple(problem.cuts.even(length, count) for length in lengths)
    counts = [len(slice_lengths) for slice_lengths in slices]
    order = StepActions(problem.placement, counts).whole
    return StepPlan(tuple((sequence,) for sequence in range(len(lengths))), slices, order)


def _too_long(problem: StepProblem, memory: StepMemory) -> OutOfMemoryError:
    """Says which sequence is too long, how long it may be, and other remedies."""

    def most(length: int) -> float:
        return _least(problem, [length], memory)[1]

    longest = int(np.argmax(problem.lengths))
    length = problem.lengths[longest]
    lengths = range(1, length + 1)
    fitting = bisect_left(lengths, memory.limit, key=most) if most(1) <= memory.limit else 0
    what = f"one of {fitting} tokens would fit" if fitting else "not even one of 1 token would fit"
    needed = ceil(_least(problem, problem.lengths, memory)[1])
    return OutOfMemoryError(
        f"inputs[{longest}] has {length} tokens, too many for memory.limit={memory.limit:.6g}: {what}, and these "
        f"sequences one after the other need {needed}. Cut it or leave it out, or give memory.limit={needed} or more, "
        "more ranks, or let memory.recompute keep less."
    )
