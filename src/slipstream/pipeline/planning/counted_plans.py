"""The plans of what nobody gives: order, slices, cut and stages a rank by counted operations.

They are found in about a second and nothing is measured, so that every run of the same model on the same kind of
devices has the same plan. Stages are planned when the Pipeline is made; the order and the slices again with the first
batch, where its rows are others than were planned for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import accumulate, pairwise
from math import inf

from slipstream.cost import check_partition
from slipstream.errors import SlipstreamError
from slipstream.parallel import Ranks
from slipstream.pipeline.pipeline_options import PipelineOptions
from slipstream.pipeline.planning.decided_options import with_plan
from slipstream.pipeline.planning.step_settings import RowOrder, StepSettings, usual_order
from slipstream.planner import OPEN, Plan
from slipstream.planner.cuts import Cuts
from slipstream.planner.find_plan import find_plan
from slipstream.planner.joint import (
    JointPlan,
    JointProblem,
    OutOfMemoryError,
    Tabulated,
)
from slipstream.planner.ragged import StageRates, fit_rates
from slipstream.schedule import (
    AUTOMATIC,
    SCHEDULES,
    USUAL_SCHEDULE,
    USUAL_SLICES,
    Schedule,
    slice_lengths,
)
from slipstream.units import numbers_text, plural

NOMINAL_LENGTH = 4096
"""The tokens of a sequence for which stages are cut where nobody says how long rows are, or as many as the model takes:
so many are usual in training, and twice or half as many move few layers."""
# Limits a plan to this multiple of the usual plan's bytes: faster orders need more, some of them without bound.
_MORE_MEMORY = 1.25
_MOST_PLACES, _MULTIPLE = 48, 64  # places to cut a sequence; tokens between them, of long ones a multiple
_MOST_SLICES = 16
# The effort of the search for each microbatch on each rank, and at most.
_EFFORT, _MOST_EFFORT = 9e4, 5e5
# With more microbatches for each rank, ranks seldom wait: the orders that have names are as good, and soon compared.
_MANY = 4
# "interleaved-1f1b" comes last, as its stages differ from the others'.
_NAMED = ("1f1b", "zb-v", "interleaved-1f1b")
_RECOMPUTED = ("none", "full", "stage", "stage+full")  # policies with known times

# Takes the tokens of a row, and the rows of a microbatch.
Problem = Callable[[int, int], JointProblem]


def is_counted(options: PipelineOptions, num_ranks: int) -> bool:
    """Returns whether something is left open that counted operations decide: nothing is "auto", which is measured, and
    neither each rank's order nor the microbatches are given. A spread head keeps the usual plan; of a single rank the
    slices alone are decided."""
    schedule = options.schedule
    if isinstance(schedule, Schedule) or options.is_measured or options.microbatches is not None:
        return False
    if options.vocabulary == "spread":
        return False
    if num_ranks == 1:
        return options.slices is None
    may_have_several = schedule in SCHEDULES and len(SCHEDULES[schedule].stages_per_rank) > 1
    return schedule is None or options.slices is None or (options.stages_per_rank is None and may_have_several)


def with_usual(options: PipelineOptions, num_ranks: int) -> PipelineOptions:
    """Returns the options with the usual order and stages a rank where these are open and no plan is made."""
    return with_plan(options, usual_order(options, num_ranks))


def with_stages(options: PipelineOptions, plan: Plan) -> PipelineOptions:
    """Returns the options with the plan's stages and recomputation, in which the order and the slices that are open
    still are."""
    placement, num_ranks = plan.placement, plan.pipeline_parallel
    order = "auto-v" if placement[num_ranks : num_ranks + 1] == (num_ranks - 1,) and num_ranks > 1 else "auto"
    names = ["stages_per_rank"]
    if isinstance(options.partition, str):
        names.append("partition")
    if options.memory.recompute == "none":
        names.append("recompute")
    slices = "auto" if options.slices is None else options.slices
    return replace(with_plan(options, plan, names), schedule=options.schedule or order, slices=slices)


class LayerUnits:
    """The runs of a sequence's layers between which it may be cut, by the number of layers of each. The first and the
    last are its ends, as a causal LM's embedding and head are."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self._places = [0, *accumulate(sizes)]

    @property
    def num_units(self) -> int:
        return len(self._places) - 1

    def layers_of(self, partition: Sequence[float]) -> tuple[float, ...]:
        """Returns the layers of each stage, given the runs between the first and the last."""
        ends = [0, *accumulate(map(int, _with_ends(partition, 1)))]
        return tuple(float(self._places[b] - self._places[a]) for a, b in pairwise(ends))

    def runs_of(self, layers: Sequence[float]) -> tuple[float, ...]:
        """Returns the runs of each stage between the first and the last, given its layers.

        Raises SlipstreamError where a stage would end inside of a run.
        """
        ends = [0, *accumulate(layers)]
        if any(end not in self._places for end in ends) or ends[-1] != self._places[-1]:
            raise SlipstreamError(f"partition={[*layers]} doesn't fit the layers.")
        places = [self._places.index(int(end)) for end in ends]
        return _with_ends([b - a for a, b in pairwise(places)], -1)


def _with_ends(counts: Sequence[float], more: int) -> tuple[float, ...]:
    changed = [*counts]
    changed[0] += more
    changed[-1] += more
    return tuple(changed)


class CountedPlans:
    """The plans of one Pipeline: of its stages, made before these are, and of its rows. The leader searches, and all
    ranks follow, as the last digits of a cost may differ between kinds of machines.

    Args:
        options: of the Pipeline, as they were given.
        num_ranks: of the pipeline.
        ranks: of all replicas.
        problem: returns the search's problem, by counted costs. The leader calls it.
        length: tokens of the rows for which stages are planned where the options say nothing.
        units: where a sequence of layers may be cut. None: a causal LM, between its layers or in their middle.
    """

    def __init__(
        self,
        options: PipelineOptions,
        num_ranks: int,
        ranks: Ranks,
        problem: Problem,
        length: int,
        units: LayerUnits | None = None,
    ) -> None:
        self._options = options
        self._num_ranks = num_ranks
        self._ranks = ranks
        self._problem = problem
        # Microbatches of a sequence of layers are as the example, of however many rows.
        self._units = units
        expected = options.expected
        lengths = options.slices
        self._rows = length, 1
        if expected is not None:
            self._rows = expected.seq_len, expected.microbatch_size
        elif not isinstance(lengths, int | str | None):
            self._rows = sum(lengths), 1
        self._knows_length = options.row_length is not None or not isinstance(lengths, int | str | None)
        self._knows_length |= units is not None
        self._plan: JointPlan | None = None

    def decided(self, options: PipelineOptions) -> PipelineOptions:
        """Returns the options with the planned stages and recomputation, in which the order and the slices that are
        open still are. Collective.

        Raises SlipstreamError as `plan_stages`.
        """
        return with_stages(options, self.plan_stages())

    def plan_stages(self) -> Plan:
        """Returns the plan of all that is open. Collective.

        Raises SlipstreamError where the model's operations can't be counted, or what is given doesn't fit together.
        """
        length, num_rows = self._rows
        plan: JointPlan = self._ranks.run_on_leader(lambda: self._found(length, num_rows, self._given(length)))
        self._plan = plan
        return self._in_layers.plan

    def first_order(self, settings: StepSettings) -> RowOrder:
        """Returns the planned order for rows of the planned length, if that is known, otherwise the usual order."""
        assert self._plan is not None
        if not self._knows_length:
            return settings.usual
        return settings.repeated(self._order(settings, self._plan), self._plan.slices)

    def plan_rows(self, settings: StepSettings, length: int, num_rows: int) -> RowOrder:
        """Returns the order and the slices for rows of `length` tokens, `num_rows` in a microbatch, on the stages that
        were planned. Collective; all replicas follow the leader's numbers."""
        length, num_rows = self._ranks.broadcast((length, num_rows if self._units is None else 1))
        stages = self._plan
        assert stages is not None
        if self._rows != (length, num_rows):

            def found() -> JointPlan:
                placed = replace(
                    self._given(length),
                    placement=stages.schedule.placement,
                    partition=stages.partition,
                    recompute=stages.recompute,
                )
                return self._found(length, num_rows, placed)

            self._plan = self._ranks.run_on_leader(found)
            self._rows = (length, num_rows)
        assert self._plan is not None
        self._knows_length = True
        return settings.repeated(self._order(settings, self._plan), self._plan.slices, is_planned=True)

    def rates(self, length: int, num_rows: int) -> StageRates:
        """Returns the rates of the stages, for rows of up to `length` tokens, `num_rows` in a microbatch.
        Collective."""
        plan = self._plan
        assert plan is not None

        def fitted() -> StageRates:
            problem = self._problem(length, num_rows)
            return fit_rates(problem.costs, plan.partition, problem.cuts, length, recompute=plan.recompute)

        rates: StageRates = self._ranks.run_on_leader(fitted)
        return rates

    def _order(self, settings: StepSettings, plan: JointPlan) -> Schedule:
        """Returns the order of a flush: the plan's, or the one that is given."""
        return plan.schedule if settings.reorders else settings.start(len(plan.slices))

    def __str__(self) -> str:
        """Returns a line about the plan."""
        return _text(self._in_layers, self._rows[0], not self._knows_length)

    @property
    def _in_layers(self) -> JointPlan:
        """The plan, with the layers of each stage in place of runs of them."""
        assert self._plan is not None
        return self._plan if self._units is None else self._plan.cut_as(self._units.layers_of(self._plan.partition))

    def _given(self, length: int) -> Plan:
        options = self._options
        assert not isinstance(options.slices, str), '"auto" is measured'
        slices = None if options.slices is None else tuple(slice_lengths(options.slices, length))
        setting = options.memory.recompute
        recompute = setting if setting in _RECOMPUTED else "none"
        partition = None if isinstance(options.partition, str) else tuple(options.partition)
        if partition is not None and self._units is not None:
            partition = self._units.runs_of(partition)
        stages = options.stages_per_rank
        if stages is None and partition is not None:
            stages = len(partition) // self._num_ranks
        may_recompute = setting == "none" and options.memory.limit is not None
        return Plan(
            schedule=OPEN if options.schedule is None else options.schedule,
            stages_per_rank=OPEN if stages is None else stages,
            partition=OPEN if partition is None else partition,
            slices=OPEN if slices is None else slices,
            recompute=OPEN if may_recompute else str(recompute),
        )

    def _found(self, length: int, num_rows: int, given: Plan) -> JointPlan:
        """Returns the best plan within the memory limit or, without a limit, within a little more than the usual plan's
        memory."""
        problem = self._problem(length, num_rows)
        self._check_layers(problem, given)
        effort = min(_MOST_EFFORT, _EFFORT * self._num_ranks * problem.num_microbatches)
        problem = replace(problem, effort=effort, whole_rounds=True)
        usually = _usual(problem, given)
        if given.is_open("slices"):
            cuts = _coarse_cuts(length)
            problem = replace(problem, costs=Tabulated(problem.costs, length, cuts), cuts=cuts)
        if problem.memory_limit is not None or problem.account is None or not given.is_open("schedule"):
            return self._best(problem, given)
        usual = find_plan(usually)
        held = max(problem.account(usual.plan))
        # The hosts have no room for it, which the first step says.
        if held == inf:
            return usual
        try:
            best = self._best(replace(problem, memory_limit=_MORE_MEMORY * held), given)
        except OutOfMemoryError:
            best = None
        is_allowed = given.is_open("placement") and given.is_open("partition") and given.stages_per_rank in (OPEN, 1)
        if is_allowed and (best is None or usual.seconds <= best.seconds):
            return usual
        return best or self._best(problem, given)

    def _check_layers(self, problem: JointProblem, given: Plan) -> None:
        """Raises SlipstreamError where there are more ranks than layers, or a given cut can't be; the usual layout then
        says what to type."""
        num_layers = problem.costs.num_layers
        cut = given.partition
        if cut is OPEN:
            num_stages = self._num_ranks * (1 if given.is_open("stages_per_rank") else given.stages_per_rank)
            if num_stages > (num_layers if self._units is None else self._units.num_units):
                raise SlipstreamError(f"{num_stages} stages for {num_layers} layers.")
            return
        check_partition(cut, num_layers, problem.costs.units_per_layer)

    def _best(self, problem: JointProblem, given: Plan) -> JointPlan:
        most = _MANY * self._num_ranks
        # What microbatches hold isn't known of a sequence of layers: named orders don't hold all of them.
        if problem.num_microbatches <= most and problem.account is not None:
            return find_plan(replace(problem, given=given))
        few = replace(problem, num_microbatches=min(most, problem.num_microbatches))
        plans = [*_named_plans(few, given)]
        if not plans:
            raise OutOfMemoryError("none of the orders that have names fits.")
        _, name, best = min(plans, key=lambda named: named[0])
        whole = replace(
            given, schedule=name, placement=best.schedule.placement, partition=best.partition, slices=best.slices
        )
        return find_plan(replace(problem, given=whole))


def _named_plans(problem: JointProblem, given: Plan) -> Iterator[tuple[float, str, JointPlan]]:
    """Yields the best plan of each order that has a name and the stages that are given, or of the given order."""
    names = _NAMED if given.is_open("schedule") else (given.schedule,)
    found = False
    for name in names:
        if found and name == _NAMED[-1]:
            return
        with suppress(SlipstreamError):  # other stages, or no room
            plan = find_plan(replace(problem, given=replace(given, schedule=name)))
            found = True
            yield plan.seconds, str(name), plan


def _usual(problem: JointProblem, given: Plan) -> JointProblem:
    """Returns the problem in which all but the cut is as usual."""
    slices = given.slices
    if slices is OPEN:
        slices = tuple(slice_lengths(min(USUAL_SLICES, problem.slice_counts[-1]), problem.seq_len))
    return replace(problem, given=Plan(schedule=USUAL_SCHEDULE, slices=slices, recompute=given.recompute))


def _coarse_cuts(length: int) -> Cuts:
    """Returns few places to cut rows of `length` tokens, between which all times can be looked up."""
    cuts = replace(Cuts.of_rows(length), most_slices=_MOST_SLICES)
    if cuts.num_places(length) <= _MOST_PLACES:
        return cuts
    return replace(cuts, granularity=-(-length // (_MOST_PLACES * _MULTIPLE)) * _MULTIPLE)


def _text(plan: JointPlan, length: int, order_follows: bool) -> str:
    """Returns the line about a plan by counted operations, for rows of `length` tokens."""
    schedule = plan.schedule
    stages = f"{plural(len(plan.partition), 'stage')} of {numbers_text(plan.partition, ' ')} layers"
    if order_follows:
        what = f"{stages}, for sequences of {length} tokens; order and slices with the first batch"
    else:
        what = f"{_order_name(schedule)} order on {stages}, {slices_text(plan.slices)}"
    return f'planned by counted operations: {what}; say schedule="auto" to measure'


def _order_name(schedule: Schedule) -> str:
    return "a searched" if schedule.name in AUTOMATIC else f"the {schedule.name}"


def slices_text(slices: Sequence[int]) -> str:
    if len(slices) == 1:
        return "whole sequences"
    lengths = f"{slices[0]}" if len(set(slices)) == 1 else f"{max(slices)} to {min(slices)}"
    return f"{plural(len(slices), 'slice')} of {lengths} tokens"
