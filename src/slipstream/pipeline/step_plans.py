"""Plans what each step runs on its batch: the rows and the slices of its microbatches, and the order of actions."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property

from slipstream.parallel import Ranks
from slipstream.pipeline.agreement import BatchAgreement, CallAgreement
from slipstream.pipeline.batch import Batch
from slipstream.pipeline.cut_batch import SplitBatch
from slipstream.pipeline.families import ExecutedStep, ModelFamily, StageLayout
from slipstream.pipeline.memory import MemoryLimit, RehearsedStep
from slipstream.pipeline.planned_options import PlannedOptions
from slipstream.pipeline.planning import CountedPlans, FirstSteps, HeldBytes, LoneRankPlans, RowOrder
from slipstream.pipeline.step_planning import DifferentLengthsError, StepPlanning
from slipstream.planner.ragged import StageRates, StepPlan
from slipstream.schedule import Schedule
from slipstream.watchdog import watchdog_paused

_log = logging.getLogger(__name__)

# Takes a batch, and what is planned for it. Collective.
Cut = Callable[..., SplitBatch]


class StepPlans:
    """The plans of a Pipeline's steps, once its stages are made.

    Args:
        planned: the options, with what was decided before.
        layout: of the stages; other steps differ in their order.
        family: the model's.
        ranks: of all replicas.
        calls: that ranks compare.
        agreement: on batches.
        lay_out: returns the layout with another order, which is kept.
        memory_limit: the account of memory.
        cut: returns a batch as it is planned, once all ranks agree on it.
    """

    def __init__(
        self,
        planned: PlannedOptions,
        layout: StageLayout,
        family: ModelFamily,
        ranks: Ranks,
        calls: CallAgreement,
        agreement: BatchAgreement,
        lay_out: Callable[[Schedule], StageLayout],
        memory_limit: MemoryLimit,
        cut: Cut,
    ) -> None:
        options = planned.options
        self.settings = planned.settings
        self.rows = planned.rows
        """What the next step runs on rows of one length."""
        # Steps on others are planned one by one, and nothing is found for rows until these come.
        self._is_ragged = False
        self.counted = planned.counted
        self._rates = planned.rates
        self._layout = layout
        self._lay_out = lay_out
        self._family = family
        self._calls = calls
        self._agreement = agreement
        self._cut = cut
        self.memory_limit = memory_limit
        self._limit = options.memory.limit
        # The last step on rows of one length, and the number of rows, their length and the order that it is for.
        self._kept = ExecutedStep(layout, [])
        self._kept_for: tuple[int, int, RowOrder] | None = None
        # The last step on which nothing was open.
        self._trained: ExecutedStep | None = None
        self.of_lengths = StepPlanning(
            self.find,
            self.settings.schedule_for,
            self.check_and_lay_out,
            memory_limit.fits,
            ranks,
            calls,
            keeps_number=options.num_microbatches > 1,
            may_pad=options.loss_fn is None,
        )
        self.first_steps = FirstSteps(self.settings, ranks, self._measured_rates, options.memory.limit)

    def plan_for(self, whole: Batch, given: StepPlan | None = None) -> ExecutedStep:
        """Returns the microbatches and the layout of a batch as the settings are. `given` is for sequences of different
        lengths.

        Collective for these: their plans are compared, by a few numbers, and a rank that can't make its own joins in,
        so that the others fail too instead of waiting. Rows of one length are exchanged nothing for.
        """
        self._is_ragged = whole.is_ragged
        if not whole.is_ragged:
            return self._plan_of_rows(whole, self.rows)
        plan = self._plan_of_lengths(whole, given)
        return ExecutedStep(self._lay_out(plan.schedule), plan.microbatches, plan.groups)

    def _plan_of_rows(self, whole: Batch, order: RowOrder) -> ExecutedStep:
        """Returns the plan of an order on rows of one length: the previous step's, if it is the same."""
        with self._agreement.telling_refusals():
            lengths = self._family.lengths(whole)
            num_rows = len(lengths)
            length = max(lengths, default=1)
            if self._kept_for != (num_rows, length, order):
                on_rows = self.settings.on_rows(order, length)
                microbatches = self.settings.microbatches(on_rows, num_rows, length)
                self._kept = ExecutedStep(self._lay_out(on_rows.schedule), microbatches)
                self._kept_for = num_rows, length, order
        return self._kept

    @property
    def _is_tuning(self) -> bool:
        """Whether something is to be found for rows of one length."""
        return self.settings.is_open and not self.rows.is_planned and not self._is_ragged

    @property
    def is_measuring(self) -> bool:
        """Whether "auto" is still to be planned."""
        return self._is_tuning and not self.settings.is_counted

    def slices_of(self, length: int) -> list[int]:
        """Returns the tokens of each slice of a row of `length` tokens, as the next step cuts it."""
        return self.settings.lengths(self.rows, length)

    def plan_to_train(self, whole: Batch, given: StepPlan | None, needs_targets: bool) -> ExecutedStep:
        """Returns the plan of the next step on a batch: kept from an earlier step, made from costs, or made to observe
        them.

        Collective. Ranks exchange, in this order:

        1. with a memory limit, for the first sequences of different lengths, the memory of a few rehearsed rows;
        2. what `plan_for` exchanges;
        3. while something is open, the batch, as no rank plans for one that another refuses, and the leader's plan.
        """
        if whole.is_ragged:
            if not self.memory_limit.knows_lengths:
                self._calls.start((), of_list=True)
                self._calls.finish()
            self.memory_limit.prepare_rows(self.settings.splits)
        planned = self.plan_for(whole, given)
        if planned is self._trained or not self._is_tuning:
            self._trained = planned
            return planned
        self._cut(whole, planned, needs_targets, has_backward=True)
        # Ranks in other calls would plan nothing, and then step in an order of their own.
        self._agreement.finish()

        def holds(order: RowOrder) -> HeldBytes:
            return self.memory_limit.peak_memory_of(self.rehearsed(whole, needs_targets, order))

        with watchdog_paused("planning the first step"):
            most_rows = max(microbatch.num_sequences for microbatch in planned.microbatches)
            length = sum(planned.microbatches[0].slices)
            if isinstance(self.counted, LoneRankPlans):
                self.rows = self._within_limit(self.counted.orders(self.settings, length, most_rows), holds)
            elif self.counted is not None and self._limit is None:
                self.rows = self.counted.plan_rows(self.settings, length, most_rows)
            else:
                self.rows = self.first_steps.begin(length, most_rows, holds) or self.rows
        return self.plan_for(whole)

    def _within_limit(self, orders: Iterable[RowOrder], holds: Callable[[RowOrder], HeldBytes]) -> RowOrder:
        """Returns the first order that a rehearsal shows within the limit, else the last one. Collective."""
        for order in orders:
            if self._limit is None or max(holds(order).peaks) <= self._limit:
                break
        return order

    def prepare(self, lengths: Sequence[int]) -> None:
        """Starts to plan a step in a thread; with a memory limit, only once a step has rehearsed some rows."""
        if self.memory_limit.knows_lengths:
            self.of_lengths.prepare(self._family.planned_lengths(lengths))

    def _plan_of_lengths(self, whole: Batch, given: StepPlan | None) -> StepPlan:
        """Returns the plan for sequences of different lengths. Collective."""
        try:
            return self.of_lengths.take(lambda: self._family.planned_lengths(self._family.lengths(whole)), given)
        except DifferentLengthsError:
            self._agreement.compare(whole)  # raises, and names the ranks
            raise

    def find(self, lengths: Sequence[int]) -> StepPlan:
        """Returns the plan for sequences of these lengths that this rank finds by itself."""
        is_by_cost = self._rates is not None or not self.settings.is_given
        if is_by_cost and self.rates is not None:
            return self.memory_limit.find_plan(self.settings.step_problem(tuple(lengths), self.rates))
        groups = self._family.groups(lengths, self.settings.usual.schedule.num_microbatches)
        return self.settings.plan_step(lengths, groups)

    def check_and_lay_out(self, schedule: Schedule) -> StageLayout:
        """Returns the layout with this order, which is kept.

        Raises SlipstreamError where the stages can't run it.
        """
        self.settings.check(schedule)
        return self._lay_out(schedule)

    # --- what stages cost --------------------------------------------------------------------------------------------

    @cached_property
    def rates(self) -> StageRates | None:
        """The stages' rates: as given or measured for the plan, else by their multiplications."""
        return self._family.rates(self._layout) if self._rates is None else self._rates

    def _measured_rates(self, length: int, num_rows: int) -> StageRates | None:
        """Returns the stages' rates for microbatches of `num_rows` rows of `length` tokens; None where they can't be
        measured beside the model. Collective."""
        if self._rates is not None:
            return self._rates.of_rows(num_rows)
        if isinstance(self.counted, CountedPlans):
            return self.counted.rates(length, num_rows)
        return self._family.measured_rates(self._layout, length, num_rows, _log.info)

    # --- rehearsals --------------------------------------------------------------------------------------------------

    def rehearsed(self, whole: Batch, needs_targets: bool = True, order: RowOrder | None = None) -> RehearsedStep:
        """Returns the next step for a rehearsal, were it on this batch, or one of an `order` on rows of one length, and
        begins to compare the ranks' batches. Collective."""
        planned = self.plan_for(whole) if order is None else self._plan_of_rows(whole, order)
        return self.to_rehearse(whole, planned, self._cut(whole, planned, needs_targets))

    def to_rehearse(self, whole: Batch, planned: ExecutedStep, batch: SplitBatch) -> RehearsedStep:
        """Returns the step of a batch that is cut, for a rehearsal."""
        are_alike = self.settings.are_microbatches_alike and not whole.is_ragged
        chosen = planned.microbatches[:1] if are_alike else planned.microbatches
        return self.memory_limit.rehearsed(planned.layout, batch, chosen)
