"""The orders that are found at once: by rules of list scheduling, or the one that is given."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import product
from typing import Any

import numpy as np

from slipstream.array_types import Floats
from slipstream.planner.order.list_scheduling import ListScheduler, MeasuredOrder, PriorityRule, measure_order
from slipstream.planner.order.ordering_problem import ROUNDING, StepActions, UnitTimes
from slipstream.schedule import Schedule

GIVEN = PriorityRule("given", 0.0, 0.0, 0.0)
"""The one rule of an order that is given."""


def rules_of(
    splittings: Sequence[str], lags: Sequence[float], hurries: Sequence[float], patiences: Sequence[float]
) -> tuple[PriorityRule, ...]:
    """Returns the rules of list scheduling with these numbers. Where no backward is split there is nothing to wait
    for, so that only a patience of 0 counts."""
    grid = (PriorityRule(*numbers) for numbers in product(splittings, lags, hurries, patiences))
    return tuple(rule for rule in grid if rule.splitting != "none" or rule.patience == 0)


class QuickOrders:
    """The orders of one step's actions, each found at once.

    Args:
        actions: of the step.
        times: their costs.
        room: bytes of activations of each rank, (ranks,). None: any number.
        split: whether backwards may be split.
        given: the only order. None: rules have others.
        priorities: what `ListScheduler` chooses by.
    """

    def __init__(
        self,
        actions: StepActions,
        times: UnitTimes,
        room: Floats | None,
        split: bool,
        given: Schedule | None = None,
        **priorities: Any,
    ) -> None:
        self.actions = actions
        self.given = given
        self._times = times
        self._split = split
        self._priorities = priorities
        self._limits: Floats = np.full(actions.num_ranks, np.inf) if room is None else room * (1 + ROUNDING)

    @cached_property
    def _scheduler(self) -> ListScheduler:
        return ListScheduler(self.actions, self._times, self._limits, self._split, **self._priorities)

    def by(self, rule: PriorityRule) -> MeasuredOrder | None:
        """Returns the order of a rule, or the given one; None where that doesn't fit the memory."""
        if self.given is None:
            return self._scheduler.place(rule)
        return measure_order(self.actions, self._times, self._limits, self.given)
