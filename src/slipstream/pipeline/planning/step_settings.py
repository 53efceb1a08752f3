"""The schedule and the slices of the next step: those that were given, or those that were planned."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from slipstream.cost import partition_of
from slipstream.errors import SlipstreamError
from slipstream.pipeline.cut_batch import even_microbatches
from slipstream.pipeline.pipeline_options import PipelineOptions
from slipstream.planner import OPEN, Plan
from slipstream.planner.joint import JointProblem, granularity_for
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
_MOST_RAGGED = 32  # schedules for batches of different lengths that are kept


class UsualOrder(NamedTuple):
    """The order, and the stages of each rank, that are given or else usual."""

    schedule: str | Schedule
    stages_per_rank: int


def usual_order(options: PipelineOptions, num_ranks: int) -> UsualOrder:
    """Returns the order and the stages a rank that are given, or else 1F1B; of several ranks with several stages each,
    interleaved."""
    schedule = options.schedule
    stages = options.stages_per_rank
    if schedule is None:
        schedule = USUAL_SCHEDULE if num_ranks == 1 or stages in (None, 1) else "interleaved-1f1b"
    return UsualOrder(schedule, fewest_stages(schedule) if stages is None else stages)


def may_split(options: PipelineOptions, compiled: Sequence[str]) -> bool:
    """Returns whether backwards may be split into input and weight gradients: not through modules that are compiled,
    nor where W would hold all that layers or segments compute again."""
    return not compiled and options.memory.recompute in ("none", "selective", "stage")


class StepSettings:
    """The settings of the next step: always the same, or where "auto" leaves them open the last plan's.

    Raises SlipstreamError for settings that don't fit together.
    """

    def __init__(
        self,
        options: PipelineOptions,
        num_ranks: int,
        default_slices: int = 1,
        compiled: Sequence[str] = (),
        is_counted: bool = False,
    ) -> None:
        """`default_slices` is their number where the options have none; `compiled` names modules whose backward is one
        piece, so that none is split; `is_counted` is whether what is open is planned by counted operations, without
        measuring."""
        schedule, stages_per_rank = usual_order(options, num_ranks)
        slices = default_slices if options.slices is None else options.slices
        num_flushes, self._given = options.memory.num_flushes, options.given_microbatches
        counts = [len(microbatch.slices) for microbatch in self._given]
        if self._given:
            slices = max((microbatch.slices for microbatch in self._given), key=len)
        self.reorders, self._reslices = schedule in AUTOMATIC, slices == "auto"
        self.is_open = self.reorders or self._reslices
        """Whether the order or the slices are to be found."""
        self.is_counted = is_counted
        self.recompute = options.memory.recompute
        self.splits = may_split(options, compiled)
        _check(schedule, slices, options.num_microbatches, num_flushes)
        self.slices: int | Sequence[int] = USUAL_SLICES if isinstance(slices, str) else slices
        if isinstance(schedule, Schedule):
            self.slices = schedule.num_slices if isinstance(slices, int) else self.slices
            self.schedule = schedule
            if (counts or schedule.is_ragged) and [*schedule.slice_counts] != counts:
                raise SlipstreamError(
                    f"the schedule {schedule.name!r} has microbatches of {[*schedule.slice_counts]} slices. Give "
                    f"microbatches=... with as many{f', not {counts}' if counts else ''}."
                )
        else:
            self._stages_per_rank = stages_per_rank
            self._name, self._num_ranks = placed_as(schedule, stages_per_rank), num_ranks
            self._num_in_flush = len(counts) or options.num_microbatches // num_flushes
            self.schedule = in_flushes(self._named(self._num_in_flush, counts or self._count), num_flushes)
        self._num_flushes, self._num_microbatches = num_flushes, options.num_microbatches
        self.is_given = isinstance(schedule, Schedule)  # each rank's order
        self._ragged: dict[tuple[int, ...], Schedule] = {}  # for other numbers of slices than the schedule's
        _check_fits(self.schedule, num_ranks, compiled)
        if options.rates is not None and options.rates.num_stages != self.schedule.num_stages:
            raise SlipstreamError(
                f"rates of {options.rates.num_stages} stages for a pipeline of {self.schedule.num_stages}. Give those "
                "of one with the same stages, or leave them out."
            )
        self._compiled = tuple(compiled)
        self._unplanned = self.schedule, self.slices
        self.is_planned = False
        self.is_resting = False
        """Whether nothing is found until rows of one length come: steps on others are planned one by one."""

    @property
    def is_tuning(self) -> bool:
        """Whether something is to be found, from the first step on."""
        return self.is_open and not self.is_planned and not self.is_resting

    @property
    def is_measuring(self) -> bool:
        """Whether "auto" is still to be planned."""
        return self.is_tuning and not self.is_counted

    def row_problem(self, length: int, rates: StageRates) -> JointProblem:
        """Returns the problem of a plan for rows of `length` tokens on the stages, which stay where they are."""
        schedule = self.schedule
        given = Plan(
            schedule=OPEN if self.reorders else self._name,
            placement=schedule.placement,
            partition=partition_of(range(schedule.num_stages + 1), units_per_layer=1),
            slices=OPEN if self._reslices else tuple(slice_lengths(self.slices, length)),
            recompute="none",  # the rates have it
        )
        return JointProblem(
            costs=rates,
            seq_len=length,
            num_ranks=schedule.num_ranks,
            num_microbatches=self._num_in_flush,
            granularity=granularity_for(length),
            split=self.splits,
            effort=_COUNTED_EFFORT if self.is_counted else _EFFORT,
            given=given,
        )

    def fixed_slices(self, length: int, count: int) -> tuple[int, ...]:
        """Returns the slices of rows of `length` tokens that are given, or `count` nearly equal ones."""
        if not self._reslices:
            return tuple(slice_lengths(self.slices, length))
        step = granularity_for(length)
        slices = [units * step for units in slice_lengths(min(count, length // step), length // step)]
        return (*slices[:-1], slices[-1] + length % step)

    def start(self, num_slices: int) -> Schedule:
        """Returns a flush of the schedule that is given, or to start from."""
        return self._named(self._num_in_flush, num_slices)

    def frugal(self, num_slices: int) -> Schedule:
        """Returns a flush that holds least: with whole backwards, one microbatch after the other. A given schedule is
        returned as it is."""
        if not self.reorders:
            return self.start(num_slices)
        return in_flushes(join_backwards(self._named(1, num_slices)), self._num_in_flush)

    def run(self, schedule: Schedule, slices: tuple[int, ...], is_planned: bool = False) -> None:
        """Lets the next step run this schedule of a flush in these slices; `is_planned` is whether the search has found
        these."""
        self.schedule = in_flushes(schedule, self._num_flushes)
        if self._reslices:
            self.slices = slices
        self.is_planned = is_planned

    def forget(self) -> None:
        """Lets the next step run as steps do before anything is planned."""
        self.schedule, self.slices = self._unplanned
        self.is_planned = False

    def lengths(self, length: int) -> list[int]:
        """Returns the slices of such a sequence; slices found for another length are taken as their number."""
        found_for_another = self._reslices and not isinstance(self.slices, int) and length != sum(self.slices)
        return slice_lengths(self._count if found_for_another else self.slices, length)

    def microbatches(self, lengths: Sequence[int]) -> list[SlicedMicrobatch]:
        """Returns the rows and slices of each microbatch of rows of one length, in tokens each. Before any slices are
        planned, rows that are shorter than there are slices run in slices of one token.

        Raises SlipstreamError where the microbatches that were given don't add up to it.
        """
        num_rows, length = len(lengths), max(lengths, default=1)
        if self._given:
            check_microbatches(self._given, num_rows, length)
            return [*self._given]
        if self._reslices and length < self._count and (self.is_counted or not self.is_planned):
            self.run(self._named(self._num_in_flush, length), (1,) * length, self.is_planned)
        return even_microbatches(num_rows, self.schedule.num_microbatches, self.lengths(length))

    def step_problem(self, lengths: tuple[int, ...], rates: StageRates) -> StepProblem:
        """Returns the problem of a plan for sequences of these lengths: settings by a name or a number are kept.

        Fewer sequences than microbatches were given are a microbatch each. Raises SlipstreamError for settings that are
        for rows of one length.
        """
        self._check_lengths_may_differ(is_planned=True)
        num_slices = None if self.is_given or self._reslices else self._count
        is_free = num_slices is None and self._num_microbatches == 1 and not self.is_counted
        return StepProblem(
            lengths=lengths,
            placement=self.schedule.placement,
            rates=rates,
            schedule=None if self.is_given or self.reorders else self._name,
            num_microbatches=None if is_free else min(self._num_microbatches, len(lengths)),
            num_slices=num_slices,
            split=self.splits and (self.is_given or self.is_open),
            granularity=min(granularity_for(max(lengths)), max(1, max(lengths) // (num_slices or 1))),
        )

    def plan_step(self, lengths: Sequence[int], groups: Sequence[Sequence[int]]) -> StepPlan:
        """Returns the slices and the schedule of microbatches of one row each, of these groups of sequences.

        The longest has the number of slices that was given, and the others as many as it takes that theirs are no
        longer. Raises SlipstreamError for settings that are for rows of one length.
        """
        self._check_lengths_may_differ()
        rows = [sum(lengths[index] for index in group) for group in groups]
        counts = self.schedule.slice_counts
        if not self.is_given:
            longest = -(-max(rows) // self._count)
            counts = tuple(-(-row // longest) for row in rows)
        if len(counts) != len(rows):
            raise SlipstreamError(
                f"{len(rows)} sequences of an nn.Sequential, but the schedule {self.schedule.name!r} has {len(counts)} "
                "microbatches, each of which takes one. Give a schedule by its name."
            )
        slices = [tuple(slice_lengths(count, row)) for count, row in zip(counts, rows, strict=True)]
        return StepPlan(tuple(map(tuple, groups)), tuple(slices), self.schedule_for(counts))

    def check(self, schedule: Schedule) -> None:
        """Raises SlipstreamError where this pipeline's stages can't run such a schedule."""
        _check_fits(schedule, self.schedule.num_ranks, self._compiled)
        if schedule.placement != self.schedule.placement:
            raise SlipstreamError(
                f"the schedule {schedule.name!r} has its stages on the ranks {[*schedule.placement]}, but the pipeline "
                f"has made them on {[*self.schedule.placement]}. Give a schedule of this placement."
            )

    def _check_lengths_may_differ(self, is_planned: bool = False) -> None:
        searched = {"schedule='auto'": self.reorders, "slices='auto'": self._reslices}
        may_differ = is_planned or self.is_counted
        wrong = {"microbatches=...": bool(self._given)} | ({} if may_differ else searched)
        wrong["memory.num_flushes"] = self._num_flushes > 1
        wrong["slices=[...]"] = not self.is_given and not self._reslices and not isinstance(self.slices, int)
        for setting in filter(wrong.get, wrong):
            raise SlipstreamError(
                f"{setting} with sequences of different lengths: it is for rows of one length. Give the schedule by "
                "its name, num_microbatches, and slices as a count."
            )

    def schedule_for(self, counts: tuple[int, ...]) -> Schedule:
        """Returns the schedule of microbatches with these numbers of slices. Raises SlipstreamError where a schedule
        was given that has others."""
        if counts == self.schedule.slice_counts:
            return self.schedule
        if self.is_given:
            raise SlipstreamError(
                f"the schedule {self.schedule.name!r} has microbatches of {[*self.schedule.slice_counts]} slices, but "
                f"sequences of different lengths need {[*counts]} here. Give a schedule by its name."
            )
        if counts not in self._ragged:
            if len(self._ragged) >= _MOST_RAGGED:
                self._ragged.clear()
            self._ragged[counts] = self._named(len(counts), counts)
        return self._ragged[counts]

    @property
    def are_microbatches_alike(self) -> bool:
        """Whether they have the same rows and slices, but for a row more."""
        return not self._given

    @property
    def _count(self) -> int:
        return self.slices if isinstance(self.slices, int) else len(self.slices)

    def _named(self, num_microbatches: int, num_slices: SliceCounts) -> Schedule:
        """Returns the schedule to start from, with its backwards split where they may be."""
        counts = num_microbatches, num_slices, self._stages_per_rank
        schedule = make_schedule(self._name, self._num_ranks, *counts)
        schedule = join_backwards(schedule) if self.reorders else schedule
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
