"""Plans each step of sequences that differ in length, in the time of the step before, and alike on every rank."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain
from typing import TypeVar
from zlib import crc32

from slipstream.errors import SlipstreamError
from slipstream.parallel import Ranks, part_bounds
from slipstream.pipeline.agreement import CallAgreement
from slipstream.planner.ragged import StepPlan
from slipstream.schedule import Schedule, slice_lengths

_MOST_WAITING = 4  # prepared plans not yet asked for
Lengths = tuple[int, ...]
_Item = TypeVar("_Item")


@dataclass(frozen=True)
class _PreparedPlan:
    plan: StepPlan
    checksum: int

    @classmethod
    def of(cls, plan: StepPlan) -> _PreparedPlan:
        return cls(plan, _checksum((plan.groups, plan.slices, plan.schedule.checksum)))


class DifferentLengthsError(RuntimeError):
    """Raised on every rank of a pipeline whose ranks have sequences of different lengths."""


class StepPlanning:
    """Plans steps in a thread of its own, so that a step's plan is there when the step begins.

    Every rank of a pipeline plans by itself. Before a plan is used the ranks compare theirs, by a few numbers: where
    machines round differently and so find different plans, all follow the first rank.
    """

    def __init__(
        self,
        find: Callable[[Sequence[int]], StepPlan],
        order_of: Callable[[Lengths], Schedule],
        lay_out: Callable[[Schedule], object],
        fits: Callable[[StepPlan], bool],
        ranks: Ranks,
        calls: CallAgreement,
        keeps_number: bool,
        may_pad: bool,
    ) -> None:
        """`find` returns the plan for some lengths, `order_of` the schedule of microbatches of so many slices each,
        `lay_out` lowers a schedule and keeps the result, and `fits` returns whether a plan keeps to the memory limit.

        `keeps_number` where the number of microbatches was given, and `may_pad` where the loss counts no padding.
        """
        self._order_of = order_of
        self._fits = fits
        self._keeps_number = keeps_number
        self._may_pad = may_pad
        self._find = find
        self._lay_out = lay_out
        self._ranks = ranks
        self._calls = calls
        self._thread = ThreadPoolExecutor(1, "step-plan")
        self._waiting: OrderedDict[Lengths, Future[_PreparedPlan]] = OrderedDict()

    def prepare(self, lengths: Sequence[int]) -> None:
        """Starts to plan a step of sequences of these lengths, and returns at once."""
        if tuple(lengths) not in self._waiting:
            self._waiting[tuple(lengths)] = self._thread.submit(self._plan, tuple(lengths))
            while len(self._waiting) > _MOST_WAITING:
                self._waiting.popitem(last=False)[1].cancel()

    def take(self, measure: Callable[[], Sequence[int]], given: StepPlan | None = None) -> StepPlan:
        """Returns the plan for the lengths that `measure` finds: the one given, a prepared one, or else a new one.

        Collective. Raises SlipstreamError on every rank where it can't be made on one, and DifferentLengthsError on
        those of a pipeline whose ranks have sequences of different lengths.
        """
        lengths: Lengths = ()
        prepared = problem = None
        try:
            lengths = tuple(measure())
            prepared = self._own(lengths, given)
        except SlipstreamError as error:
            problem = error
        same_lengths, same_plan, fits, one_order = self._compare(lengths, prepared)
        if problem is not None:
            raise problem
        if not fits:
            raise SlipstreamError(
                "the step can't run on this rank, as another rank has refused its batch. Give all ranks of a pipeline "
                "one batch, and see the other ranks' messages."
            )
        if not same_lengths:
            raise DifferentLengthsError
        assert prepared is not None
        plan = prepared.plan if same_plan else self._first_ranks(prepared.plan)
        if one_order or not self._ranks.replicas_act_together:
            return plan
        return self._in_one_order(plan, given is not None)

    def _own(self, lengths: Lengths, given: StepPlan | None) -> _PreparedPlan:
        if given is not None:
            given.check(lengths)
            self._lay_out(given.schedule)
            return _PreparedPlan.of(given)
        self.prepare(lengths)
        return self._waiting.pop(lengths).result()

    def _plan(self, lengths: Lengths) -> _PreparedPlan:
        plan = self._find(lengths)
        self._lay_out(plan.schedule)
        return _PreparedPlan.of(plan)

    def _compare(self, lengths: Lengths, prepared: _PreparedPlan | None) -> tuple[bool, bool, bool, bool]:
        """Returns whether the pipeline's ranks have the same lengths, and the same plan, whether all ranks have one,
        and whether those of all ranks are in one order. Collective."""
        seen = [_checksum(lengths), prepared.checksum if prepared else 0]
        self._calls.start([*seen, prepared is None, prepared.plan.schedule.checksum if prepared else 0], of_list=True)
        others = self._calls.finish()
        mine = [other.values for other in others if other.replica == self._ranks.data.rank]
        same = [all(values[place] == value for values in mine) for place, value in enumerate(seen)]
        one_order = len({other.values[3] for other in others}) <= 1
        return same[0], same[1], not any(other.values[2] for other in others), one_order

    def _in_one_order(self, plan: StepPlan, is_given: bool) -> StepPlan:
        """Returns the plan, or one changed so that all replicas run the same actions, in which they exchange tokens: of
        each microbatch as many slices as the most of any replica has. Collective.

        Microbatches are as many as the fewest of any replica, so that replicas with equally many tokens take equally
        long. Where their number was given, or these would hold more than the memory limit, they are as many as the
        most. A replica without tokens for a slice or a microbatch runs padding. A loss function might count that:
        with one, microbatches are the fewest, in as many slices as each replica has tokens for.

        Raises SlipstreamError on every rank where a plan was given that would have to be changed.
        """
        mine = [(sum(slices), len(slices)) for slices in plan.slices]  # the tokens and slices of each microbatch
        every = self._ranks.copies.gather((mine, is_given))
        if any(is_given_there for _, is_given_there in every):
            raise SlipstreamError(
                "plan=...: the replicas' plans differ in their order, or not all were given one, and all have to run "
                "the same actions, in which they exchange tokens. Give plans with one schedule, or leave them out."
            )
        numbers = [len(microbatches) for microbatches, _ in every]
        fewest = min(numbers)
        most = max(numbers) if self._may_pad else min(numbers)
        for number in range(most if self._keeps_number else fewest, most + 1):
            runs = [_runs(lengths, number) for lengths, _ in every]
            sums = [[[*map(sum, zip((0, 0), *run, strict=True))] for run in of_replica] for of_replica in runs]
            rows = (zip(*of_replicas, strict=True) for of_replicas in zip(*sums, strict=True))
            counts = [max(slices) if self._may_pad else min(*tokens, max(slices)) for tokens, slices in rows]
            changed = self._with_counts(plan, counts)
            if number == most or all(self._ranks.copies.gather(self._fits(changed))):
                break
        return changed

    def _with_counts(self, plan: StepPlan, counts: Sequence[int]) -> StepPlan:
        """Returns the plan with `counts` slices in its microbatches, cut anew where a number changes."""
        groups = [tuple(chain(*run)) for run in _runs(plan.groups, len(counts))]
        rows = [tuple(chain(*run)) for run in _runs(plan.slices, len(counts))]
        slices = [row if len(row) == count else _cut(sum(row), count) for row, count in zip(rows, counts, strict=True)]
        schedule = self._order_of(tuple(counts))
        self._lay_out(schedule)
        return StepPlan(tuple(groups), tuple(slices), schedule)

    def _first_ranks(self, plan: StepPlan) -> StepPlan:
        """Returns the plan of the first of the ranks that share a batch. Collective."""
        for axis, group in reversed([*self._ranks.groups.items()]):
            if axis.shares_batch:
                plan = group.gather(plan)[0]
        return plan


def _runs(items: Sequence[_Item], number: int) -> list[Sequence[_Item]]:
    return [items[slice(*part_bounds(len(items), number, part))] for part in range(number)]


def _cut(tokens: int, count: int) -> tuple[int, ...]:
    """Returns slices of nearly equal lengths, of which those that the tokens don't reach have one of padding."""
    reached = min(tokens, count)
    return (*(slice_lengths(reached, tokens) if reached else ()), *(1,) * (count - reached))


def _checksum(value: object) -> int:
    return crc32(repr(value).encode())
