"""Plans the open options in the first steps on rows of one length: before the first one where costs can be measured,
else once the steps that ran have shown them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from slipstream.errors import SlipstreamError
from slipstream.model.autograd_memory import recompute_advice
from slipstream.parallel import Ranks
from slipstream.pipeline.planning.row_plan import (
    ObservedSteps,
    RowPlan,
    RowProblem,
    find_row_plan,
    frugal_plan,
    microbatch_bytes,
    with_activations,
)
from slipstream.pipeline.planning.step_settings import StepSettings
from slipstream.planner.ragged import StageRates
from slipstream.timeline import Timeline

_ATTEMPTS = 6  # plans that are looked for within a memory limit, with less and less room
_FRUGAL = (8, 16, 4)  # equal slices that are tried where the fastest ones hold too much
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


Holds = Callable[[], HeldBytes]  # in the step that the settings say; collective
Measure = Callable[[int, int], StageRates | None]  # of rows of so many tokens, so many in a microbatch; collective


class FirstSteps:
    """Finds the order and the slices that are open, for rows of the length that the first steps have.

    Args:
        settings: those of the next step, which this changes.
        ranks: of the pipeline.
        measure: returns the stages' rates, or None where they can't be measured.
        limit: bytes that each rank may hold. None: any number.
    """

    def __init__(self, settings: StepSettings, ranks: Ranks, measure: Measure, limit: float | None) -> None:
        self._settings, self._ranks, self._measure, self._limit = settings, ranks, measure, limit
        self._observed: ObservedSteps | None = None
        self.listens = False  # whether the timeline of the step that runs is wanted
        self._length = 0  # of the rows that are planned for

    def begin(self, length: int, num_rows: int, holds: Holds) -> None:
        """Plans the next step, on rows of `length` tokens, `num_rows` in a microbatch, or chooses the one to be
        observed. Collective; all replicas follow the leader's numbers.

        Raises SlipstreamError where nothing keeps to the memory limit.
        """
        length, num_rows = self._ranks.broadcast((length, num_rows))
        problem = self._settings.row_problem(length)
        if self._observed is None:
            rates = self._measure(length, num_rows)
            if rates is not None:
                self._plan(problem, rates, holds)
                return
            self._length, self._observed = length, ObservedSteps(problem, self._limit is not None)
        self.listens = length == self._length
        if not self.listens:
            return
        if self._observed.next is None:
            self.listens = False
            self._plan(problem, self._ranks.run_on_leader(self._observed.rates), holds)
            return
        plan = RowPlan(*self._observed.next, seconds=0.0)
        if self._limit is not None and max((held := self._held(plan, holds)).peaks) > self._limit:
            self._forget()
            raise _nothing_fits(self._limit, held.peaks, problem.reorders, self._settings.recompute)
        self._settings.run(plan.schedule, plan.slices)

    def observe(self, timeline: Timeline) -> None:
        """Notes how long the actions took of the step that ran to be observed."""
        assert self._observed is not None
        self._observed.add(timeline)
        self.listens = False

    def _plan(self, problem: RowProblem, rates: StageRates, holds: Holds) -> None:
        """Lets all ranks follow the leader's plan: two machines may fit the same times to other last digits."""
        try:
            plan = self._within_limit(problem, rates, holds)
        except SlipstreamError:
            self._forget()
            raise
        self._settings.run(plan.schedule, plan.slices, is_planned=True)
        self._observed = None

    def _within_limit(self, problem: RowProblem, rates: StageRates, holds: Holds) -> RowPlan:
        """Returns the fastest plan that is found of those in which no rank needs more memory than it may.

        Everything but activations is taken from the plan with the least memory; the room that this leaves over one
        microbatch is halved, and halved again towards the most that keeps to the limit.
        """
        plan = self._found(problem, rates, None)
        if self._limit is None or max(self._held(plan, holds).peaks) <= self._limit:
            return plan
        least, held = self._holding_little(problem, rates, plan.slices, holds)
        rates = with_activations(rates, held.units, least.slices)
        fitting, (low, high), share = [least], (0.0, 1.0), 1.0
        for _ in range(_ATTEMPTS):
            sizes = microbatch_bytes(problem, rates)
            room = [size + share * (self._limit - peak) for size, peak in zip(sizes, held.peaks, strict=True)]
            plan = self._found(problem, rates, room)
            fits = max(self._held(plan, holds).peaks) <= self._limit
            if fits:
                fitting.append(plan)
            low, high = (share, high) if fits else (low, share)
            if low == 1:
                break
            share = (low + high) / 2
        return min(fitting, key=lambda row_plan: row_plan.seconds)

    def _holding_little(
        self, problem: RowProblem, rates: StageRates, slices: tuple[int, ...], holds: Holds
    ) -> tuple[RowPlan, HeldBytes]:
        """Returns a plan that keeps to the limit by its order alone, in these slices or in equal ones. Collective."""
        assert self._limit is not None
        peaks: list[tuple[float, ...]] = []
        for lengths in dict.fromkeys([slices, *map(problem.fixed_slices, _FRUGAL)]):
            plan: RowPlan = self._ranks.run_on_leader(partial(frugal_plan, problem, rates, lengths))
            held = self._held(plan, holds)
            if max(held.peaks) <= self._limit:
                return plan, held
            peaks.append(held.peaks)
        raise _nothing_fits(self._limit, min(peaks, key=max), problem.reorders, self._settings.recompute)

    def _found(self, problem: RowProblem, rates: StageRates, room: Sequence[float] | None) -> RowPlan:
        """Returns the leader's plan. Collective."""
        row_plan: RowPlan = self._ranks.run_on_leader(lambda: find_row_plan(problem, rates, room))
        return row_plan

    def _held(self, plan: RowPlan, holds: Holds) -> HeldBytes:
        """Returns the memory of the leader's ranks in a step of the plan. Collective."""
        self._settings.run(plan.schedule, plan.slices)
        held: HeldBytes = self._ranks.broadcast(holds())
        return held

    def _forget(self) -> None:
        self._observed, self.listens = None, False
        self._settings.forget()


def _nothing_fits(limit: float, peaks: Sequence[float], reorders: bool, recompute: str | int) -> SlipstreamError:
    rank = max(range(len(peaks)), key=peaks.__getitem__)
    what, instead = "no order fits: with one microbatch at a time", ""
    if not reorders:
        what, instead = "the schedule that is given holds more:", "schedule='auto', "
    return SlipstreamError(
        f"memory.limit={limit:.6g} bytes, but {what} rank {rank} holds {peaks[rank]:.0f} bytes ({_KINDS}). Give "
        f"memory.limit={peaks[rank]:.0f} or more, or {instead}{recompute_advice(recompute)}memory.offload=0.5, "
        "smaller microbatches or more ranks."
    )
