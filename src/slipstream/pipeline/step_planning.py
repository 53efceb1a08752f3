"""Plans each step of sequences that differ in length, in the time of the step before, and alike on every rank."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar
from zlib import crc32

from slipstream.errors import SlipstreamError
from slipstream.parallel import Ranks, part_bounds
from slipstream.pipeline.agreement import CallAgreement
from slipstream.planner.ragged import StepPlan
from slipstream.schedule import Schedule, slice_lengths

_MOST_WAITING = 4  # plans that were prepared, and not asked for yet
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
        ranks: Ranks,
        calls: CallAgreement,
    ) -> None:
        """`find` returns the plan for some lengths, `order_of` the schedule of microbatches of so many slices each, and
        `lay_out` lowers a schedule and keeps the result."""
        self._order_of = order_of
        self._find, self._lay_out, self._ranks, self._calls = find, lay_out, ranks, calls
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
        each microbatch as many slices as the most of any replica has, and as its tokens allow. Collective.

        Raises SlipstreamError on every rank where a plan was given that would have to be changed.
        """
        mine = [(sum(slices), len(slices)) for slices in plan.slices]  # the tokens and slices of each microbatch
        every = self._ranks.copies.gather((mine, is_given))
        if any(is_given_there for _, is_given_there in every):
            raise SlipstreamError(
                "plan=...: the replicas' plans differ in their order, or not all were given one, and all have to run "
                "the same actions, in which they exchange tokens. Give plans with one schedule, or leave them out."
            )
        num_microbatches = min(len(microbatches) for microbatches, _ in every)
        runs = (_runs(lengths, num_microbatches) for lengths, _ in every)
        joined = [[(*map(sum, zip(*run, strict=True)),) for run in of_replica] for of_replica in runs]
        counts = tuple(
            min(max(count for _, count in of_replicas), min(tokens for tokens, _ in of_replicas))
            for of_replicas in zip(*joined, strict=True)
        )
        groups = tuple(tuple(row for group in run for row in group) for run in _runs(plan.groups, num_microbatches))
        own_rows = joined[self._ranks.copies.rank]
        slices = tuple(tuple(slice_lengths(count, tokens)) for count, (tokens, _) in zip(counts, own_rows, strict=True))
        schedule = self._order_of(counts)
        self._lay_out(schedule)
        return StepPlan(groups, slices, schedule)

    def _first_ranks(self, plan: StepPlan) -> StepPlan:
        """Returns the plan of the first of the ranks that share a batch. Collective."""
        for axis, group in reversed([*self._ranks.groups.items()]):
            if axis.shares_batch:
                plan = group.gather(plan)[0]
        return plan


def _runs(items: Sequence[_Item], number: int) -> list[Sequence[_Item]]:
    return [items[slice(*part_bounds(len(items), number, part))] for part in range(number)]


def _checksum(value: object) -> int:
    return crc32(repr(value).encode())
