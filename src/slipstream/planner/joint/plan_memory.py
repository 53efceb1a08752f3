"""The memory that is left for the activations of a candidate, and whether its order keeps to the limit."""

from __future__ import annotations

import numpy as np

from slipstream.array_types import Floats
from slipstream.planner.costs import partition_of
from slipstream.planner.joint.candidates import Candidate
from slipstream.planner.joint.joint_problem import JointProblem
from slipstream.planner.joint.unit_costs import SlicedUnits
from slipstream.planner.order.ordering_problem import StepActions
from slipstream.schedule import Schedule


class PlanMemory:
    """The memory of the candidates of one placement, in bytes of each rank.

    Orders are searched for within the room for activations. What a rank holds besides, such as messages, depends on
    the order. So it is taken from the account of the order that holds least, and grows wherever an order that was found
    holds more than the limit.
    """

    def __init__(self, problem: JointProblem, limit: float, placement: tuple[int, ...], recompute: bool) -> None:
        self._problem, self._limit, self._placement, self._recompute = problem, limit, placement, recompute
        self._besides: dict[int, Floats] = {}  # by the number of slices

    def room(self, candidate: Candidate, units: SlicedUnits) -> Floats:
        """Returns the bytes for activations."""
        count = len(candidate.slices)
        left = self._limit - self._held(candidate, units)
        if count not in self._besides:
            most = self._peaks(candidate, self.least(candidate, units))
            nothing = np.zeros(len(left))
            self._besides[count] = nothing if most is None else most - self.least_bytes(candidate, units)
        room: Floats = left - self._besides[count]
        return room

    def fits(self, candidate: Candidate, schedule: Schedule) -> bool:
        """Returns whether the order keeps to the limit; where it doesn't, there is less room from now on."""
        most = self._peaks(candidate, schedule)
        if most is None:
            return True
        self._besides[len(candidate.slices)] += np.maximum(most - self._limit, 0.0)
        return bool((most <= self._limit).all())

    def least(self, candidate: Candidate, units: SlicedUnits) -> Schedule:
        """Returns the order that holds least: one microbatch after the other, with whole backwards."""
        counts = (len(candidate.slices),) * self._problem.num_microbatches
        order = StepActions(self._placement, counts).whole
        return units.without_frozen_backwards(order, candidate.bounds)

    def least_bytes(self, candidate: Candidate, units: SlicedUnits) -> Floats:
        """Returns what each rank holds in that order, without what only the account counts."""
        sizes = np.bincount(self._placement, units.stage_activations(candidate.bounds).sum(axis=1))
        total: Floats = self._held(candidate, units) + sizes
        return total

    def most(self, candidate: Candidate, units: SlicedUnits) -> Floats:
        """Returns what each rank holds in that order."""
        found = self._peaks(candidate, self.least(candidate, units))
        return self.least_bytes(candidate, units) if found is None else found

    def _held(self, candidate: Candidate, units: SlicedUnits) -> Floats:
        """Weights, gradients, optimizer state, and what a stage computes again."""
        state = np.bincount(self._placement, np.diff(self._problem.state_sums[list(candidate.bounds)]))
        again = np.zeros(len(state))
        np.maximum.at(again, list(self._placement), units.computed_again(candidate.bounds))
        held: Floats = state + again
        return held

    def _peaks(self, candidate: Candidate, schedule: Schedule) -> Floats | None:
        if self._problem.account is None:
            return None
        partition = partition_of(candidate.bounds, self._problem.costs.units_per_layer)
        return np.array(self._problem.account(partition, candidate.slices, schedule, self._recompute), float)
