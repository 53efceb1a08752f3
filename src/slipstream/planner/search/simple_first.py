"""The plan that comes first: of those that take about as long as the shortest, the simplest."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from math import inf, log
from typing import NamedTuple

from slipstream.options import SHARED_WORK
from slipstream.planner.plan import Plan
from slipstream.planner.plan_report import Prediction
from slipstream.planner.search.savings import copies_of
from slipstream.units import bytes_text, plural

ABOUT_AS_LONG = 0.01
"""By which share of the shortest step a simpler plan may take longer."""
_DEGREES = (*(way.choice for way in SHARED_WORK), "pipeline_parallel", "data_parallel")


class _Merit(NamedTuple):
    """What makes a plan simpler than another.

    Args:
        value: returns a number that is less for a simpler plan, from the plan and the bytes of its fullest rank, which
            are computed where they are asked for.
        text: returns how a prediction is simpler than another one.
    """

    value: Callable[[Plan, Callable[[], float]], float]
    text: Callable[[Prediction, Prediction], str]


def _num_kinds(plan: Plan) -> int:
    """Returns how many kinds of parallelism a plan combines."""
    return sum(plan.choice(degree) > 1 for degree in _DEGREES)


_MERITS = (
    _Merit(
        lambda plan, memory: plan.stages_per_rank,
        lambda one, other: (
            f"{plural(one.plan.stages_per_rank, 'stage')} per rank instead of {other.plan.stages_per_rank}"
        ),
    ),
    _Merit(
        lambda plan, memory: any(copies_of(plan)),
        lambda one, other: "nothing copied to the host",
    ),
    _Merit(
        lambda plan, memory: round(log(memory()), 2),  # to 1%
        lambda one, other: (
            f"{bytes_text(one.peak_memory)} on the fullest rank instead of {bytes_text(other.peak_memory)}"
        ),
    ),
    _Merit(
        lambda plan, memory: _num_kinds(plan),
        lambda one, other: f"{plural(_num_kinds(one.plan), 'kind')} of parallelism instead of {_num_kinds(other.plan)}",
    ),
)
"""What counts, the most important first."""


def simplest(seconds: Mapping[Plan, float], memory: Callable[[Plan], float]) -> Plan:
    """Returns the simplest of the plans whose step is at most 1% longer than the shortest: that with the fewest stages
    on a rank; of several one that copies nothing to the host; then the one that holds least, to 1%; then the one with
    the fewest kinds of parallelism; then the shortest.

    Args:
        seconds: of each plan's step; not empty.
        memory: returns the bytes of a plan's fullest rank.
    """
    simple = _about_as_long(seconds)
    for merit in _MERITS:
        # Memory is only asked for where several are alike so far.
        if len(simple) == 1:
            break
        values = {plan: merit.value(plan, partial(memory, plan)) for plan in simple}
        least = min(values.values())
        simple = [plan for plan in simple if values[plan] == least]
    return min(simple, key=seconds.__getitem__)


def may_come_first(plan: Plan, seconds: Mapping[Plan, float]) -> bool:
    """Returns whether a plan comes before those of which the step is known, if its own is at most 1% longer than the
    shortest: it is simpler than they are, whatever each of them holds."""
    return _simplicity(plan) < min(map(_simplicity, _about_as_long(seconds)))


def _simplicity(plan: Plan) -> tuple[float, ...]:
    """Returns what makes a plan simple, but for its memory and what counts less."""
    return tuple(merit.value(plan, lambda: inf) for merit in _MERITS[:2])


def _about_as_long(seconds: Mapping[Plan, float]) -> list[Plan]:
    most = (1 + ABOUT_AS_LONG) * min(seconds.values())
    return [plan for plan, each in seconds.items() if each <= most]


def simpler_text(first: Prediction, shortest: Prediction) -> str:
    """Returns by how much the first plan is longer than the shortest, and what makes it simpler; "" where it is the
    shortest."""
    for merit in _MERITS:
        if _value(merit, first) < _value(merit, shortest):
            longer = first.step_seconds / shortest.step_seconds - 1
            return f"The first is {longer:.1%} longer than the shortest, with {merit.text(first, shortest)}."
    return ""


def _value(merit: _Merit, prediction: Prediction) -> float:
    return merit.value(prediction.plan, lambda: prediction.peak_memory)
