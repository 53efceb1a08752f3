"""What a Pipeline is given, with the choices that are planned before its stages are made."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

from slipstream.errors import SlipstreamError
from slipstream.pipeline.families import ModelFamily, StageLayout
from slipstream.pipeline.pipeline_options import ExpectedBatch, PipelineOptions
from slipstream.pipeline.planning import (
    ContextPlace,
    CountedPlans,
    LoneRankPlans,
    NoRoomError,
    RowOrder,
    StepSettings,
    is_counted,
    with_plan,
    with_usual,
)
from slipstream.planner.joint import JointPlan, OutOfMemoryError
from slipstream.planner.ragged import StageRates
from slipstream.watchdog import watchdog_paused

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class PlannedOptions:
    """The options of a Pipeline once its stages are decided.

    Args:
        options: with the choices of a plan; order and slices may be left to the first steps.
        settings: the order and the slices that are given, and what is left to the first steps.
        rows: what steps run on rows of one length until then.
        layout: of these.
        plan: the plan from measured costs. None: nothing was "auto", or it couldn't be made.
        rates: of the stages, as they were given or measured.
        counted: the plans by counted operations of what nobody gave.
        unplanned: why what nobody gave is as usual.
        context: where keys and values lie, where that was left to the account.
    """

    options: PipelineOptions
    settings: StepSettings
    rows: RowOrder
    layout: StageLayout
    plan: JointPlan | None = None
    rates: StageRates | None = None
    counted: CountedPlans | LoneRankPlans | None = None
    unplanned: str = ""
    context: ContextPlace | None = None

    @classmethod
    def of(cls, family: ModelFamily, options: PipelineOptions, num_ranks: int) -> PlannedOptions:
        """Plans what decides the stages: all that is "auto" from measured costs, and what nobody gave by counted
        operations; without a plan it is as usual. Collective.

        Raises OutOfMemoryError where nothing fits the memory limit, and NoRoomError where no slices of a single rank
        fit its device.
        """
        context = None
        if options.memory.context == "auto":
            context = family.place_context(options, num_ranks)
            options = replace(options, memory=options.memory.model_copy(update={"context": context.name}))
            family.adopt(options)
        options = family.completed(options)
        plan: JointPlan | None = None
        rates: StageRates | None = options.rates
        if (num_ranks > 1 or isinstance(options.seq_len, ExpectedBatch)) and family.is_open(options):
            plan, rates = _measured(family, options, num_ranks)
            options = options if plan is None else with_plan(options, plan.plan)
            family.adopt(options)
        unplanned = ""
        if is_counted(options, num_ranks):
            try:
                with watchdog_paused("planning by counted operations"):
                    counted = family.counted_plans(options, num_ranks)
                    decided = counted.decided(options)
                planned = _laid_out(family, decided, num_ranks, counted)
                return replace(planned, plan=plan, rates=rates, counted=counted, context=context)
            except NoRoomError:
                raise
            except SlipstreamError as error:
                unplanned = str(error)
        planned = _laid_out(family, with_usual(options, num_ranks), num_ranks)
        return replace(planned, plan=plan, rates=rates, unplanned=unplanned, context=context)


def _measured(
    family: ModelFamily, options: PipelineOptions, num_ranks: int
) -> tuple[JointPlan | None, StageRates | None]:
    """Returns a plan from measured costs, and the rates of its stages; without one, where they can't be measured, the
    rates that are given. Collective."""
    expected = options.expected
    say = _log.info if expected is None or expected.say is None else expected.say
    try:
        with watchdog_paused("measuring what layers cost"):
            return family.plan(num_ranks, say)
    except OutOfMemoryError:
        raise
    except SlipstreamError as error:
        say(f"no plan can be made before the first step: {error}")
        return None, options.rates


def _laid_out(
    family: ModelFamily,
    options: PipelineOptions,
    num_ranks: int,
    counted: CountedPlans | LoneRankPlans | None = None,
) -> PlannedOptions:
    family.adopt(options)
    settings = StepSettings(
        options,
        num_ranks,
        family.default_slices,
        family.compiled,
        is_counted=counted is not None,
        slices_of_longest=counted.num_slices if isinstance(counted, LoneRankPlans) else None,
    )
    rows = settings.usual if counted is None else counted.first_order(settings)
    return PlannedOptions(options, settings, rows, family.lay_out(rows.schedule, rows.slices))
