"""Good orders in about a millisecond: list scheduling by a few rules, for many costs of one placement."""

from __future__ import annotations

from itertools import product

import numpy as np

from slipstream.array_types import Floats
from slipstream.planner.costs import OPS
from slipstream.planner.joint.unit_costs import SlicedUnits
from slipstream.planner.order.list_scheduling import ListScheduler, PriorityRule, alone_starts
from slipstream.planner.order.ordering_problem import StepActions, UnitTimes
from slipstream.schedule import Op


class QuickOrder:
    """The orders of one placement with one number of microbatches and slices, whatever the actions cost."""

    def __init__(self, placement: tuple[int, ...], num_microbatches: int, num_slices: int, split: bool) -> None:
        self._actions = StepActions(placement, (num_slices,) * num_microbatches)
        self._one = StepActions(placement, (num_slices,))
        self._split, self._shape = split, (len(placement), num_microbatches, num_slices)
        lags = (0.0, 0.5, 1.0, 2.0) if num_microbatches > 1 else (0.0,)
        names = self._actions.splittings(split)
        grid = product(names, lags, (-1.0, 0.0, 0.25, 0.5, 1.0, 2.0), (0.0, 0.5, 1.0))
        self.rules = tuple(PriorityRule(*rule) for rule in grid if rule[0] != "none" or rule[3] == 0)

    def seconds(
        self,
        units: SlicedUnits,
        bounds: tuple[int, ...],
        room: Floats | None = None,
        rules: tuple[PriorityRule, ...] = (),
    ) -> dict[PriorityRule, float]:
        """Returns the seconds of a step by each of the rules, by default all; infinite where nothing fits.

        Args:
            units: the costs of the slices.
            bounds: the first unit of each stage, and the number of units.
            room: bytes that each rank has for activations. None: any number.
            rules: the rules to try.
        """
        held = units.stage_activations(bounds)
        if room is not None and (np.bincount(self._actions.placement, held.sum(axis=1)) > room).any():
            return dict.fromkeys(rules or self.rules, np.inf)
        stages, microbatches, slices = self._shape
        times = {op: units.stage_seconds(op, bounds) for op in OPS}
        limits = np.full(self._actions.num_ranks, np.inf) if room is None else room
        one, every = (self._times(units, bounds, times, held, number) for number in (1, microbatches))
        lone = self._one.graph_of(one, limits, np.full(self._one.num_units, self._split))
        alone = alone_starts(lone, self._one.microbatch, 1).reshape(3, stages, 1, slices)
        scheduler = ListScheduler(
            self._actions,
            every,
            limits,
            self._split,
            alone=np.broadcast_to(alone, (3, *self._shape)).ravel(),
            period=float((times[Op.F] + times[Op.B]).sum(axis=1).max()),
        )
        return {rule: scheduler.place(rule).seconds for rule in rules or self.rules}

    def _times(
        self, units: SlicedUnits, bounds: tuple[int, ...], times: dict[Op, Floats], held: Floats, number: int
    ) -> UnitTimes:
        """Returns the costs of so many microbatches, whose messages don't wait for each other."""
        seconds = {op: np.tile(each, number) for op, each in times.items()}
        travels = np.tile(units.message_seconds, number)
        return UnitTimes.of_slices(seconds, (travels, 0 * travels), np.tile(held, number), units.frozen_stages(bounds))
