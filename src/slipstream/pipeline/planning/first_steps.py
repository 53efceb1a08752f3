"""Plans the open options in the first steps on rows of one length: before the first one where costs can be measured,
else once the steps that ran have shown them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from slipstream.array_types import Floats
from slipstream.errors import SlipstreamError
from slipstream.model.autograd_memory import recompute_advice
from slipstream.parallel import Ranks
from slipstream.pipeline.planning.observed_steps import ObservedSteps
from slipstream.pipeline.planning.step_settings import RowOrder, StepSettings
from slipstream.planner import Plan
from slipstream.planner.find_plan import find_plan
from slipstream.planner.joint import JointPlan, JointProblem, OutOfMemoryError
from slipstream.planner.ragged import StageRates
from slipstream.planner.room import Room, first_within
from slipstream.schedule import Schedule
from slipstream.simulator import activation_peaks
from slipstream.timeline import Timeline

_ATTEMPTS = 4  # searches within a memory limit, each with less room than the last
_FRUGAL = (8, 16, 4)  # equal slices to try if the fastest ones exceed the limit
_KINDS = "parameters, gradients, AdamW's state, messages, activations, keys and values"


@dataclass(frozen=True)
class HeldBytes:
    """The bytes that ranks would hold in a step.

    Args:
        peaks: of each rank.
        units: by stage and slice, from its forward to its backward.
    """

    peaks: tuple[float, ...]
    units: Mapping[tuple[int, int], float]


# Returns the bytes in a step of this order. Collective.
Holds = Callable[[RowOrder], HeldBytes]
# An order of a flush, and the tokens of each slice.
Order = tuple[Schedule, tuple[int, ...]]
# Takes the tokens of a row, and the rows of a microbatch. Collective.
Measure = Callable[[int, int], StageRates | None]


class FirstSteps:
    """Finds the order and the slices that are open, for rows of the length that the first steps have.

    Args:
        settings: what is given, and what is open.
        ranks: of the pipeline.
        measure: returns the stages' rates, or None where they can't be measured.
        limit: bytes that each rank may hold. None: any number.
    """

    def __init__(self, settings: StepSettings, ranks: Ranks, measure: Measure, limit: float | None) -> None:
        self._settings = settings
        self._ranks = ranks
        self._measure = measure
        self._limit = limit
        self._observed: ObservedSteps | None = None
        self.listens = False  # True if the running step's timeline is wanted
        self._length = 0  # tokens of the observed rows

    def begin(self, length: int, num_rows: int, holds: Holds) -> RowOrder | None:
        """Returns the order of the next step on rows of `length` tokens, `num_rows` in a microbatch: a planned one, or
        one to observe. None where rows of another length are observed. Collective; all replicas follow the leader's
        numbers.

        Raises SlipstreamError where nothing keeps to the memory limit.
        """
        length, num_rows = self._ranks.broadcast((length, num_rows))
        if self._observed is None:
            rates = self._measure(length, num_rows)
            if rates is not None:
                return self._planned(length, rates, holds)
            self._length = length
            self._observed = ObservedSteps(self._settings, length, self._limit is not None)
        self.listens = length == self._length
        if not self.listens:
            return None
        if self._observed.next is None:
            self.listens = False
            return self._planned(length, self._ranks.run_on_leader(self._observed.rates), holds)
        if self._limit is not None and max((held := self._held(*self._observed.next, holds)).peaks) > self._limit:
            self._forget()
            raise self._nothing_fits(held.peaks)
        return self._settings.repeated(*self._observed.next)

    def observe(self, timeline: Timeline) -> None:
        """Notes how long the actions took of the step that ran to be observed."""
        assert self._observed is not None
        self._observed.add(timeline)
        self.listens = False

    def _planned(self, length: int, rates: StageRates, holds: Holds) -> RowOrder:
        """Returns the leader's plan: two machines may fit the same times to other last digits."""
        try:
            schedule, slices = self._within_limit(length, rates, holds)
        except SlipstreamError:
            self._forget()
            raise
        self._observed = None
        return self._settings.repeated(schedule, slices, is_planned=True)

    def _within_limit(self, length: int, rates: StageRates, holds: Holds) -> Order:
        """Returns the fastest order and slices found that keep every rank within the memory limit.

        Activations are known from the order that holds least, and what ranks hold besides them. Where an order that was
        found for the room that is left holds too much, it is looked for again with as much less room.
        """
        order = self._found(self._settings.row_problem(length, rates))
        if self._limit is None or max(self._held(*order, holds).peaks) <= self._limit:
            return order
        least, held = self._holding_little(length, order[1], holds)
        rates = rates.holding(held.units, least[1])
        room = Room(self._limit, np.array(held.peaks) - _microbatch_bytes(rates, length, least[0].placement))
        problem = self._settings.row_problem(length, rates)

        def find(_: int) -> Order | None:
            account = partial(_peaks, rates, room.besides)
            try:
                return self._found(replace(problem, memory_limit=self._limit, account=account))
            except OutOfMemoryError:
                return None

        def fits(order: Order) -> bool:
            return room.has_space(np.array(self._held(*order, holds).peaks))

        return first_within(range(_ATTEMPTS), find, fits) or least

    def _holding_little(self, length: int, slices: tuple[int, ...], holds: Holds) -> tuple[Order, HeldBytes]:
        """Returns the most frugal order, in the first of `slices` and equal slices that keep it within the limit, and
        its memory. Collective."""
        assert self._limit is not None
        settings = self._settings
        peaks: list[tuple[float, ...]] = []
        for lengths in dict.fromkeys([slices, *(settings.fixed_slices(length, count) for count in _FRUGAL)]):
            order = settings.frugal(len(lengths)), lengths
            held = self._held(*order, holds)
            if max(held.peaks) <= self._limit:
                return order, held
            peaks.append(held.peaks)
        raise self._nothing_fits(min(peaks, key=max))

    def _found(self, problem: JointProblem) -> Order:
        """Returns the order and the slices of the leader's plan. Collective."""
        plan: JointPlan = self._ranks.run_on_leader(lambda: find_plan(problem))
        return plan.schedule, plan.slices

    def _held(self, schedule: Schedule, slices: tuple[int, ...], holds: Holds) -> HeldBytes:
        """Returns the memory of the leader's ranks in a step of this order in these slices. Collective."""
        held: HeldBytes = self._ranks.broadcast(holds(self._settings.repeated(schedule, slices)))
        return held

    def _forget(self) -> None:
        self._observed = None
        self.listens = False

    def _nothing_fits(self, peaks: Sequence[float]) -> SlipstreamError:
        rank = max(range(len(peaks)), key=peaks.__getitem__)
        what, instead = "no order fits: with one microbatch at a time", ""
        if not self._settings.reorders:
            what = "the schedule that is given holds more:"
            instead = "schedule='auto', "
        return SlipstreamError(
            f"memory.limit={self._limit:.6g} bytes, but {what} rank {rank} holds {peaks[rank]:.0f} bytes ({_KINDS}). "
            f"Give memory.limit={peaks[rank]:.0f} or more, or {instead}{recompute_advice(self._settings.recompute)}"
            "memory.offload=0.5, smaller microbatches or more ranks."
        )


def _microbatch_bytes(rates: StageRates, length: int, placement: Sequence[int]) -> Floats:
    """Returns the bytes of one microbatch's activations on each rank: the least of any order."""
    of_stages = rates.held_bytes(np.array([length], np.int64))[:, 0]
    of_ranks: Floats = np.bincount(placement, of_stages).astype(float)
    return of_ranks


def _peaks(rates: StageRates, besides: Floats, plan: Plan) -> list[float]:
    """Returns each rank's peak in bytes, given the bytes `besides` its activations."""
    assert isinstance(plan.schedule, Schedule)
    return [*map(float, besides + activation_peaks(plan.schedule, rates.on_slices(plan.slices)))]
