"""How "auto" learns: which trials are run one after the other, and what is chosen in the end."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass

from slipstream.errors import SlipstreamError
from slipstream.pipeline.tuning.fitted_slice_times import SliceTimes
from slipstream.pipeline.tuning.order_within_limit import nothing_fits, order_within
from slipstream.pipeline.tuning.slicings import granularity_for, nearly_equal, promising
from slipstream.pipeline.tuning.trials import Samples, Trial, TrialRequest, TrialResult, fastest, holdings_of, timed
from slipstream.schedule import Schedule, split_backwards
from slipstream.simulator import TableCost, simulate

COUNTS = (8, 4)  # slices whose times are measured
_OBSERVED = 2  # steps of each kind
_QUICK = 2e6  # of find_order's effort, to compare slicings by

Learning = Generator[
    TrialRequest, TrialResult, Trial
]  # yields what to run next, takes what came out, returns its choice
Maker = Callable[[int], Schedule]  # number of slices -> a schedule on the wanted placement


@dataclass(frozen=True)
class SearchSpace:
    """The schedules and slicings among which may be chosen.

    Args:
        make: the schedule to start from.
        frugal: the one that holds the least, a microbatch after the other.
        reorders: whether each slicing gets its own best order.
        splits: whether backwards may be I and W.
        limit: bytes of each rank; None: any.
    """

    make: Maker
    frugal: Maker
    reorders: bool
    splits: bool
    limit: float | None = None

    def start(self, slices: Sequence[int]) -> Schedule:
        start = self.make(len(slices))
        return split_backwards(start) if self.splits else start

    def quick(self, slices: Sequence[int], cost: TableCost) -> Schedule:
        """About what will run, without the limit."""
        return _find(self.make(len(slices)), cost, self.splits, _QUICK) if self.reorders else self.start(slices)


def learn_order(freedom: SearchSpace, slices: Sequence[int]) -> Learning:
    """The best order of the given slices."""
    orders = yield from _affordable(freedom, tuple(slices))
    samples = yield from _observe(orders, tuple(slices), warm_up=2)
    trial = yield from _trial(freedom, tuple(slices), samples.cost(min), splits=len(orders) > 1)
    assert trial is not None
    return trial


def learn_slices(freedom: SearchSpace, length: int) -> Learning:
    """The best slices of `length` tokens; where that is free, each slicing gets its own best order.

    Equal slices are measured, in two numbers, and times are fitted to them: a constant, a part for every token and one
    for every pair of tokens that attend. The slicings that are best by simulation, and the better equal ones, are then
    run, and the fastest stays.
    """
    granularity = granularity_for(length)
    times, costs, splits = SliceTimes(), dict[tuple[int, ...], TableCost](), freedom.splits
    for count in [count for count in COUNTS if count <= length] or [1]:
        slices = nearly_equal(length, count, granularity)
        if orders := (yield from _affordable(freedom, slices)):
            samples = yield from _observe(orders, slices, warm_up=1 if costs else 2)
            times.add(samples, slices)
            costs[slices] = samples.cost(min)
            splits = splits and len(orders) > 1
    if not costs:
        raise SlipstreamError(
            f"memory.limit={freedom.limit:.6g} bytes, but the schedule {freedom.make(1).name!r} holds more in equal "
            f"slices, {' or '.join(map(str, COUNTS))}. Try schedule='auto', memory.recompute='full' or "
            "memory.offload=0.5."
        )

    def best(slices: tuple[int, ...]) -> Schedule:
        return freedom.quick(slices, times.cost(slices))

    equal = min(costs, key=lambda slices: simulate(best(slices), costs[slices]).makespan)
    wanted = {equal: costs[equal]}
    for slices in promising(freedom.start, best, times.cost, length, granularity):
        wanted.setdefault(slices, times.cost(slices))
    trials = []
    for slices, cost in wanted.items():
        trial = yield from _trial(freedom, slices, cost, splits)
        trials += [] if trial is None else [trial]
    return (yield from fastest(trials))


def _affordable(freedom: SearchSpace, slices: tuple[int, ...]) -> Generator[TrialRequest, TrialResult, list[Schedule]]:
    """The orders whose times are measured, split backwards first: all that are within the limit.

    Raises SlipstreamError where the order is free and even the frugal one is above.
    """
    orders = _both(freedom.make(len(slices)), freedom.splits)
    if (yield from _fitting(orders, slices, freedom.limit)) == orders:
        return orders
    if not freedom.reorders:
        return []
    frugal = freedom.frugal(len(slices))
    fitting = yield from _fitting(_both(frugal, freedom.splits), slices, freedom.limit)
    if frugal not in fitting:
        assert freedom.limit is not None
        raise nothing_fits(freedom.limit, (yield from holdings_of(Trial(frugal, slices))).peaks)
    return fitting


def _both(order: Schedule, splits: bool) -> list[Schedule]:
    return [split_backwards(order, everywhere=True), order] if splits else [order]


def _fitting(
    orders: list[Schedule], slices: tuple[int, ...], limit: float | None
) -> Generator[TrialRequest, TrialResult, list[Schedule]]:
    fitting = []
    for order in orders:
        if limit is None or max((yield from holdings_of(Trial(order, slices))).peaks) <= limit:
            fitting.append(order)
    return fitting


def _observe(
    orders: Sequence[Schedule], slices: tuple[int, ...], warm_up: int
) -> Generator[TrialRequest, TrialResult, Samples]:
    """Run each order some steps, and note how long everything takes."""
    samples = Samples()
    for number, order in enumerate(orders):
        skipped = 1 if number else warm_up  # memory is touched for the first time
        for step in range(skipped + _OBSERVED):
            timeline = yield from timed(Trial(order, slices))
            if step >= skipped:
                samples.add(timeline)
    return samples


def _trial(
    freedom: SearchSpace, slices: tuple[int, ...], cost: TableCost, splits: bool
) -> Generator[TrialRequest, TrialResult, Trial | None]:
    """These slices in the best order there is; None where that is above the limit."""
    if freedom.reorders and freedom.limit is None:
        return Trial(_find(freedom.make(len(slices)), cost, splits), slices)
    wanted = Trial(freedom.frugal(len(slices)) if freedom.reorders else freedom.start(slices), slices)
    if not (yield from _fitting([wanted.schedule], slices, freedom.limit)):
        return None
    if freedom.reorders:
        assert freedom.limit is not None
        return Trial((yield from order_within(freedom.limit, wanted, cost, splits)), slices)
    return wanted


def _find(start: Schedule, cost: TableCost, splits: bool, effort: float = 2e7) -> Schedule:
    from slipstream.planner.order.best_order import find_order  # its compiled code takes a while to load

    return find_order(start.placement, start.num_microbatches, start.num_slices, cost, split=splits, effort=effort)
