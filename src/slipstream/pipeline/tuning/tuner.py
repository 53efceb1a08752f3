"""What the next step runs: always the same, or with schedule="auto" and slices="auto" whatever suits best so far."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from slipstream.errors import SlipstreamError
from slipstream.pipeline.batch import slice_lengths
from slipstream.pipeline.pipeline_options import PipelineOptions
from slipstream.pipeline.tuning.learning import COUNTS, Learning, SearchSpace, learn_order, learn_slices
from slipstream.pipeline.tuning.trials import TrialRequest, TrialResult
from slipstream.schedule import (
    AUTOMATIC,
    Op,
    Schedule,
    check_name,
    in_flushes,
    join_backwards,
    make_schedule,
    placed_as,
)


class Decision(NamedTuple):
    """The next trial, and whether all later steps run it."""

    request: TrialRequest
    is_last: bool


class Tuner:
    """Decides what the next step runs: always the same, or with "auto" whatever there is still to learn from.

    Raises SlipstreamError for settings that don't fit together.
    """

    def __init__(
        self,
        schedule: str | Schedule,
        num_ranks: int,
        num_microbatches: int,
        stages_per_rank: int,
        slices: int | Sequence[int] | str,
        num_flushes: int = 1,
        compiled: Sequence[str] = (),
        memory_limit: float | None = None,
        splits: bool = True,
    ) -> None:
        """`compiled` names modules whose backward is one piece, so that none is split; `memory_limit` is what an order
        that is chosen keeps to, in bytes of each rank; `splits` is whether backwards that the schedule has whole may
        become I and W."""
        self._reorders = isinstance(schedule, str) and schedule in AUTOMATIC
        self._reslices = slices == "auto"
        _check(schedule, slices)
        _check_flushes(schedule, num_microbatches, num_flushes)
        if isinstance(schedule, str):
            schedule = placed_as(schedule, stages_per_rank)
        self._counts = (num_ranks, num_microbatches // num_flushes, stages_per_rank)
        self._num_flushes = num_flushes
        self._given, self._splits, self._limit = schedule, splits and not compiled, memory_limit
        self.slices: int | Sequence[int] = COUNTS[0] if isinstance(slices, str) else slices
        if isinstance(schedule, Schedule) and isinstance(slices, int):
            self.slices = schedule.num_slices
        count = self.slices if isinstance(self.slices, int) else len(self.slices)
        if not isinstance(schedule, Schedule):
            schedule = in_flushes(self._freedom.start((0,) * count), num_flushes)
        self.schedule = schedule
        _check_whole(schedule, compiled)
        self._is_settled = False
        self.forget()

    def forget(self) -> None:
        """Starts learning again: what was learned so far led nowhere."""
        self._learning: Learning | None = None
        self._length = 0  # of the sequences that are tuned for
        self._has_learned = False
        self._asks_what_it_holds = False

    @property
    def is_tuning(self) -> bool:
        """Whether there is something to learn, from the first step on."""
        return (self._reorders or self._reslices) and not self._is_settled

    def begin(self, length: int) -> Schedule:
        """The schedule of the next step, whose sequences have `length` tokens.

        Tuning is for the length of the first step that is learned from.
        """
        if self.is_tuning and not self._has_learned and length != self._length:
            self._length = length
            if self._reslices:
                self._learning = learn_slices(self._freedom, length)
            else:
                self._learning = learn_order(self._freedom, slice_lengths(self.slices, length))
            self._take(next(self._learning))
        return self.schedule

    @property
    def asks_what_it_holds(self) -> bool:
        """Whether the schedule isn't run, because `decide` first needs the memory that the ranks would hold in it."""
        return self._asks_what_it_holds

    def listens_to(self, length: int) -> bool:
        """Whether the timeline of a step on sequences of `length` tokens is wanted."""
        return self.is_tuning and length == self._length

    def decide(self, answer: TrialResult) -> Decision:
        """Returns what comes next, given what was measured. One rank calls it, and all ranks `follow` its decision.

        Two machines may fit the same times to other last digits, and so choose differently. Raises SlipstreamError
        where nothing keeps to the memory limit.
        """
        assert self._learning is not None
        try:
            return Decision(self._learning.send(answer), is_last=False)
        except StopIteration as end:
            return Decision(TrialRequest(end.value), is_last=True)

    def follow(self, decision: Decision) -> Schedule:
        """Returns the schedule of the step that comes next, or that `asks_what_it_holds`."""
        self._has_learned = self._has_learned or not self._asks_what_it_holds
        self._is_settled = decision.is_last
        self._take(decision.request)
        return self.schedule

    def lengths(self, length: int) -> list[int]:
        """The slices of such a sequence; slices found for another length are taken as their number."""
        found_for_another = self._reslices and length != self._length
        count = self.slices if isinstance(self.slices, int) else len(self.slices)
        return slice_lengths(count if found_for_another else self.slices, length)

    @property
    def _freedom(self) -> SearchSpace:
        return SearchSpace(self._make, self._frugal, self._reorders, self._splits, self._limit)

    def _take(self, request: TrialRequest) -> None:
        trial, self._asks_what_it_holds = request
        self.schedule = in_flushes(trial.schedule, self._num_flushes)
        if self._reslices:
            self.slices = trial.slices

    def _make(self, num_slices: int) -> Schedule:
        assert isinstance(self._given, str)
        num_ranks, num_microbatches, stages_per_rank = self._counts
        schedule = make_schedule(self._given, num_ranks, num_microbatches, num_slices, stages_per_rank)
        return join_backwards(schedule) if self._reorders else schedule  # to be split where that pays

    def _frugal(self, num_slices: int) -> Schedule:
        num_ranks, num_microbatches, stages_per_rank = self._counts
        name = "v-min" if self._given == "zb-v" else "breadth-first"  # of the same placement
        alone = make_schedule(name, num_ranks, 1, num_slices, stages_per_rank)
        return in_flushes(join_backwards(alone), num_microbatches)


def make_tuner(options: PipelineOptions, num_ranks: int, default_slices: int, compiled: Sequence[str] = ()) -> Tuner:
    """Returns the tuner of a pipeline with these options. Raises SlipstreamError where they don't fit together."""
    tuner = Tuner(
        options.schedule,
        num_ranks,
        options.num_microbatches,
        options.stages_per_rank,
        default_slices if options.slices is None else options.slices,
        options.memory.num_flushes,
        compiled,
        options.memory.limit,
        splits=options.memory.recompute != "segments",  # W would hold what all segments recompute
    )
    if tuner.schedule.num_ranks != num_ranks:
        raise SlipstreamError(
            f"the schedule {tuner.schedule.name!r} is for {tuner.schedule.num_ranks} ranks, but there are {num_ranks}. "
            f"Start {tuner.schedule.num_ranks} processes or make a schedule for {num_ranks}."
        )
    return tuner


def _check(schedule: str | Schedule, slices: object) -> None:
    if isinstance(schedule, str):
        check_name(schedule, besides=AUTOMATIC)
    if isinstance(schedule, Schedule) and slices == "auto":
        raise SlipstreamError(
            f"slices='auto' with the schedule {schedule.name!r}, which has {schedule.num_slices} slices: give their "
            "lengths, or a schedule by its name."
        )
    if slices != "auto" and (not isinstance(slices, (int, Sequence)) or isinstance(slices, str)):
        raise SlipstreamError(
            f"slices={slices!r}: give a count, such as 8, the token lengths, such as [512, 512], or 'auto'."
        )


def _check_flushes(schedule: str | Schedule, num_microbatches: int, num_flushes: int) -> None:
    if isinstance(schedule, Schedule) and num_flushes != 1:
        raise SlipstreamError(
            f"memory.num_flushes={num_flushes} with the schedule {schedule.name!r}: repeat it by "
            f"slipstream.schedule.in_flushes(schedule, {num_flushes}), or give a schedule by its name."
        )
    if num_flushes < 1 or num_microbatches % num_flushes:
        allowed = [count for count in range(1, num_microbatches + 1) if num_microbatches % count == 0]
        raise SlipstreamError(
            f"memory.num_flushes={num_flushes} for {num_microbatches} microbatches: each flush has as many. Choose one "
            f"of {', '.join(map(str, allowed))}."
        )


def _check_whole(schedule: Schedule, compiled: Sequence[str]) -> None:
    if compiled and any(action.op is Op.I for action in schedule.positions):
        raise SlipstreamError(
            f"{compiled[0]} is compiled, so its backward is one piece, but the schedule {schedule.name!r} splits "
            "backwards into input and weight gradients. Compile norms and activations alone, or use a schedule of "
            "whole backwards: gpipe, 1f1b, interleaved-1f1b or breadth-first."
        )
