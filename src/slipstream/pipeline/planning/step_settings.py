"""What the options of a Pipeline say about the order and the slices of its steps, and what they leave to a plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from slipstream.cost import partition_of
from slipstream.errors import SlipstreamError
from slipstream.options import host_share
from slipstream.pipeline.cut_batch import even_microbatches
from slipstream.pipeline.pipeline_options import PipelineOptions
from slipstream.planner import OPEN, Plan
from slipstream.planner.cuts import Cuts
from slipstream.planner.joint import JointProblem
from slipstream.planner.ragged import StageRates, StepPlan, StepProblem
from slipstream.schedule import (
    AUTOMATIC,
    USUAL_SCHEDULE,
    USUAL_SLICES,
    Op,
    Schedule,
    SliceCounts,
    SlicedMicrobatch,
    check_microbatches,
    check_name,
    fewest_stages,
    in_flushes,
    join_backwards,
    make_schedule,
    placed_as,
    slice_lengths,
    split_backwards,
)

# Of the search for rows of one length: a few seconds, and without measuring a fraction of one.
_EFFORT, _COUNTED_EFFORT = 2e7, 1e6
_MOST_RAGGED = 32  # kept schedules for batches of unequal lengths


def usual_order(options: PipelineOptions, num_ranks: int) -> Plan:
    """Returns the order and the stages a rank that are given, or else 1F1B; of several ranks with several stages each,
    interleaved."""
    schedule = options.schedule
    stages = options.stages_per_rank
    if schedule is None:
        schedule = USUAL_SCHEDULE if num_ranks == 1 or stages in (None, 1) else "interleaved-1f1b"
    return Plan(schedule=schedule, stages_per_rank=fewest_stages(schedule) if stages is None else stages)


def may_split(options: PipelineOptions, compiled: Sequence[str]) -> bool:
    """Returns whether backwards may be split into input and weight gradients: not through modules that are compiled,
    nor where W would hold all that layers or segments compute again."""
    return not compiled and options.memory.recompute in ("none", "selective", "stage")


def _may_postpone(options: PipelineOptions) -> bool:
    """Returns whether a named schedule may postpone weight gradients. What these keep until then isn't to fill a device
    whose keys and values are on the host, unless it is counted: by a plan, which gives the cut too, or within a
    limit."""
    memory = options.memory
    return not host_share(memory.context) or options.partition != "auto" or memory.limit is not None


class RowOrder(NamedTuple):
    """The order and slices of a step on rows of one length.

    Args:
        schedule: the order of all microbatches.
        slices: tokens of each slice, or their number where rows of any length have as many.
        is_planned: whether a search has found what the options leave open.
    """

    schedule: Schedule
    slices: int | Sequence[int]
    is_planned: bool = False

    @property
    def num_slices(self) -> int:
        return self.slices if isinstance(self.slices, int) else len(self.slices)


class StepSettings:
    """The order and the slices that options give, and the problems of finding those that they leave open.

    Raises SlipstreamError for settings that don't fit together.
    """

    def __init__(
        self,
        options: PipelineOptions,
        num_ranks: int,
        default_slices: int = 1,
        compiled: Sequence[str] = (),
        is_counted: bool = False,
        slices_of_longest: int | None = None,
    ) -> None:
        """`default_slices` is their number where the options have none; `compiled` names modules whose backward is one
        piece, so that none is split; `is_counted` is whether what is open is planned by counted operations, without
        measuring; `slices_of_longest` is how many the longest of sequences of different lengths has, where that is
        neither given nor left to the plan of each step."""
        usual = usual_order(options, num_ranks)
        schedule, stages_per_rank = usual.schedule, usual.stages_per_rank
        slices = default_slices if options.slices is None else options.slices
        num_flushes = options.memory.num_flushes
        self._given = options.given_microbatches
        counts = [len(microbatch.slices) for microbatch in self._given]
        if self._given:
            slices = max((microbatch.slices for microbatch in self._given), key=len)
        self.reorders = schedule in AUTOMATIC
        self._reslices = slices == "auto"
        self.is_open = self.reorders or self._reslices
        """Whether the order or the slices are to be found."""
        self.is_counted = is_counted
        self._slices_of_longest = slices_of_longest
        self.recompute = options.memory.recompute
        self.splits = may_split(options, compiled)
        self._postpones = is_counted or _may_postpone(options)
        _check(schedule, slices, options.num_microbatches, num_flushes)
        lengths: int | Sequence[int] = USUAL_SLICES if isinstance(slices, str) else slices
        if isinstance(schedule, Schedule):
            self.usual = RowOrder(schedule, schedule.num_slices if isinstance(slices, int) else lengths)
            """What steps run before anything is planned."""
            if (counts or schedule.is_ragged) and [*schedule.slice_counts] != counts:
                raise SlipstreamError(
                    f"the schedule {schedule.name!r} has microbatches of {[*schedule.slice_counts]} slices. Give "
                    f"microbatches=... with as many{f', not {counts}' if counts else ''}."
                )
        else:
            self._stages_per_rank = stages_per_rank
            self._name = placed_as(schedule, stages_per_rank)
            self._num_ranks = num_ranks
            self._num_in_flush = len(counts) or options.num_microbatches // num_flushes
            num_slices = lengths if isinstance(lengths, int) else len(lengths)
            flush = self._named(self._num_in_flush, counts or num_slices)
            self.usual = RowOrder(in_flushes(flush, num_flushes), lengths)
        self._num_flushes = num_flushes
        self._num_microbatches = options.num_microbatches
        self.is_given = isinstance(schedule, Schedule)  # an order given for each rank
        self._ragged: dict[tuple[int, ...], Schedule] = {}  # schedules by slices per microbatch
        _check_fits(self.usual.schedule, num_ranks, compiled)
        num_stages = self.usual.schedule.num_stages
        if options.rates is not None and options.rates.num_stages != num_stages:
            raise SlipstreamError(
                f"rates of {options.rates.num_stages} stages for a pipeline of {num_stages}. Give those of one with "
                "the same stages, or leave them out."
            )
        self._compiled = tuple(compiled)

    def row_problem(self, length: int, rates: StageRates) -> JointProblem:
        """Returns the problem of a plan for rows of `length` tokens on the stages, which stay where they are."""
        schedule = self.usual.schedule
        given = Plan(
            schedule=OPEN if self.reorders else self._name,
            placement=schedule.placement,
            partition=partition_of(range(schedule.num_stages + 1), units_per_layer=1),
            slices=OPEN if self._reslices else tuple(slice_lengths(self.usual.slices, length)),
            # The rates already include recomputation.
            recompute="none",
        )
        return JointProblem(
            costs=rates,
            seq_len=length,
            num_ranks=schedule.num_ranks,
            num_microbatches=self._num_in_flush,
            cuts=Cuts.of_rows(length),
            split=self.splits,
            effort=_COUNTED_EFFORT if self.is_counted else _EFFORT,
            given=given,
        )

    def fixed_slices(self, length: int, count: int) -> tuple[int, ...]:
        """Returns the slices of rows of `length` tokens that are given, or `count` nearly equal ones."""
        if not self._reslices:
            return tuple(slice_lengths(self.usual.slices, length))
        return Cuts.of_rows(length).even(length, count)

    def start(self, num_slices: int) -> Schedule:
        """Returns a flush of the given schedule, or of the one that the search starts from."""
        return self._named(self._num_in_flush, num_slices)

    def frugal(self, num_slices: int) -> Schedule:
        """Returns the flush with the least memory: whole backwards, one microbatch after the other. A given schedule is
        returned as it is."""
        if not self.reorders:
            return self.start(num_slices)
        return in_flushes(join_backwards(self._named(1, num_slices)), self._num_in_flush)

    def repeated(self, flush: Schedule, slices: tuple[int, ...], is_planned: bool = False) -> RowOrder:
        """Returns the order and slices of a step, from those of each of its flushes."""
        schedule = in_flushes(flush, self._num_flushes)
        return RowOrder(schedule, slices if self._reslices else self.usual.slices, is_planned)

    def lengths(self, order: RowOrder, length: int) -> list[int]:
        """Returns the slices of such a sequence; slices found for another length are taken as their number."""
        slices = order.slices
        found_for_another = self._reslices and not isinstance(slices, int) and length != sum(slices)
        return slice_lengths(order.num_slices if found_for_another else slices, length)

    def on_rows(self, order: RowOrder, length: int) -> RowOrder:
        """Returns the order for rows of `length` tokens. Until slices are planned, rows with fewer tokens than slices
        run in slices of one token."""
        if self._reslices and length < order.num_slices and (self.is_counted or not order.is_planned):
            return self.repeated(self._named(self._num_in_flush, length), (1,) * length, order.is_planned)
        return order

    def microbatches(self, order: RowOrder, num_rows: int, length: int) -> list[SlicedMicrobatch]:
        """Returns the rows and slices of each microbatch of rows of one length, in tokens each.

        Raises SlipstreamError where the microbatches that were given don't add up to it.
        """
        if self._given:
            check_microbatches(self._given, num_rows, length)
            return [*self._given]
        return even_microbatches(num_rows, order.schedule.num_microbatches, self.lengths(order, length))

    def step_problem(self, lengths: tuple[int, ...], rates: StageRates) -> StepProblem:
        """Returns the problem of a plan for sequences of these lengths: settings by a name or a number are kept.

        Fewer sequences than microbatches were given are a microbatch each. Raises SlipstreamError for settings that are
        for rows of one length.
        """
        self._check_lengths_may_differ(is_planned=True)
        num_slices = None if self.is_given else self._slices_of_longest
        if not self.is_given and not self._reslices:
            num_slices = self.usual.num_slices
        is_free = num_slices is None and self._num_microbatches == 1 and not self.is_counted
        return StepProblem(
            lengths=lengths,
            rates=rates,
            given=Plan(
                placement=self.usual.schedule.placement,
                schedule=OPEN if self.is_given or self.reorders else self._name,
                num_microbatches=OPEN if is_free else min(self._num_microbatches, len(lengths)),
                num_slices=OPEN if num_slices is None else num_slices,
            ),
            split=self.splits and (self.is_given or self.is_open),
            cuts=replace(Cuts.of_rows(max(lengths), num_slices or 1), most_slices=None),
        )

    def plan_step(self, lengths: Sequence[int], groups: Sequence[Sequence[int]]) -> StepPlan:
        """Returns the slices and the schedule of microbatches of one row each, of these groups of sequences.

        The longest has the number of slices that was given, and the others as many as it takes that theirs are no
        longer. Raises SlipstreamError for settings that are for rows of one length.
        """
        self._check_lengths_may_differ()
        rows = [sum(lengths[index] for index in group) for group in groups]
        usual = self.usual.schedule
        counts = usual.slice_counts
        if not self.is_given:
            longest = -(-max(rows) // (self._slices_of_longest or self.usual.num_slices))
            counts = tuple(-(-row // longest) for row in rows)
        if len(counts) != len(rows):
            raise SlipstreamError(
                f"{len(rows)} sequences of an nn.Sequential, but the schedule {usual.name!r} has {len(counts)} "
                "microbatches, each of which takes one. Give a schedule by its name."
            )
        slices = [tuple(slice_lengths(count, row)) for count, row in zip(counts, rows, strict=True)]
        return StepPlan(tuple(map(tuple, groups)), tuple(slices), self.schedule_for(counts))

    def check(self, schedule: Schedule) -> None:
        """Raises SlipstreamError where this pipeline's stages can't run such a schedule."""
        _check_fits(schedule, self.usual.schedule.num_ranks, self._compiled)
        if schedule.placement != self.usual.schedule.placement:
            raise SlipstreamError(
                f"the schedule {schedule.name!r} has its stages on the ranks {[*schedule.placement]}, but the pipeline "
                f"has made them on {[*self.usual.schedule.placement]}. Give a schedule of this placement."
            )

    def _check_lengths_may_differ(self, is_planned: bool = False) -> None:
        searched = {"schedule='auto'": self.reorders, "slices='auto'": self._reslices}
        may_differ = is_planned or self.is_counted
        wrong = {"microbatches=...": bool(self._given)} | ({} if may_differ else searched)
        wrong["memory.num_flushes"] = self._num_flushes > 1
        wrong["slices=[...]"] = not self.is_given and not self._reslices and not isinstance(self.usual.slices, int)
        for setting in filter(wrong.get, wrong):
            raise SlipstreamError(
                f"{setting} with sequences of different lengths: it is for rows of one length. Give the schedule by "
                "its name, num_microbatches, and slices as a count."
            )

    def schedule_for(self, counts: tuple[int, ...]) -> Schedule:
        """Returns the schedule of microbatches with these numbers of slices. Raises SlipstreamError where a schedule
        was given that has others."""
        usual = self.usual.schedule
        if counts == usual.slice_counts:
            return usual
        if self.is_given:
            raise SlipstreamError(
                f"the schedule {usual.name!r} has microbatches of {[*usual.slice_counts]} slices, but "
                f"sequences of different lengths need {[*counts]} here. Give a schedule by its name."
            )
        if counts not in self._ragged:
            if len(self._ragged) >= _MOST_RAGGED:
                self._ragged.clear()
            self._ragged[counts] = self._named(len(counts), counts)
        return self._ragged[counts]

    @property
    def are_microbatches_alike(self) -> bool:
        """Whether the microbatches have equal slices, and rows that differ by at most one."""
        return not self._given

    def _named(self, num_microbatches: int, num_slices: SliceCounts) -> Schedule:
        """Returns the schedule to start from, with its backwards split where they may be."""
        counts = num_microbatches, num_slices, self._stages_per_rank
        schedule = make_schedule(self._name, self._num_ranks, *counts)
        schedule = join_backwards(schedule) if self.reorders or not self._postpones else schedule
        return split_backwards(schedule) if self.splits else schedule


def _check(schedule: str | Schedule, slices: object, num_microbatches: int, num_flushes: int) -> None:
    if isinstance(schedule, str):
        check_name(schedule, besides=AUTOMATIC)
    elif slices == "auto":
        raise SlipstreamError(
            f"slices='auto' with the schedule {schedule.name!r}, which has {schedule.num_slices} slices: give their "
            "lengths, or a schedule by its name."
        )
    elif num_flushes != 1:
        raise SlipstreamError(
            f"memory.num_flushes={num_flushes} with the schedule {schedule.name!r}: repeat it by "
            f"slipstream.schedule.in_flushes(schedule, {num_flushes}), or give a schedule by its name."
        )
    if num_microbatches % num_flushes:
        allowed = [count for count in range(1, num_microbatches + 1) if num_microbatches % count == 0]
        raise SlipstreamError(
            f"memory.num_flushes={num_flushes} for {num_microbatches} microbatches: all flushes have the same number. "
            f"Choose one of {', '.join(map(str, allowed))}."
        )


def _check_fits(schedule: Schedule, num_ranks: int, compiled: Sequence[str]) -> None:
    if compiled and any(action.op is Op.I for action in schedule.positions):
        raise SlipstreamError(
            f"{compiled[0]} is compiled, so its backward is one piece, but the schedule {schedule.name!r} splits "
            "backwards into input and weight gradients. Compile only norms and activations, or use a schedule of "
            "whole backwards: gpipe, 1f1b, interleaved-1f1b or breadth-first."
        )
    if schedule.num_ranks != num_ranks:
        raise SlipstreamError(
            f"the schedule {schedule.name!r} is for {schedule.num_ranks} ranks, but there are {num_ranks}. "
            f"Start {schedule.num_ranks} processes or make a schedule for {num_ranks}."
        )
