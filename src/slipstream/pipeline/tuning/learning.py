"""How "auto" learns: which trials are run one after the other, and what is chosen in the end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from slipstream.errors import SlipstreamError
from slipstream.pipeline.tuning.slicings import SliceTimes, granularity_for, nearly_equal, promising
from slipstream.pipeline.tuning.trials import Inquiry, Samples, Trial, TrialMemory, fastest, holdings_of, timed
from slipstream.schedule import Schedule, SliceCounts, in_flushes, join_backwards, make_schedule, split_backwards
from slipstream.simulator import TableCost, simulate

COUNTS = (8, 4)  # slices whose times are measured
_OBSERVED = 2  # steps of each kind
_QUICK = 2e6  # of find_order's effort, to compare slicings by
_ATTEMPTS = 6  # orders that are searched for within a memory limit
_EFFORT = 5e6  # of find_order, for each of these
_KINDS = "parameters, gradients, AdamW's state, messages, activations, keys and values"


@dataclass(frozen=True)
class SearchSpace:
    """The schedules and slicings among which may be chosen.

    Args:
        name: the schedule to start from.
        num_ranks: the number of the pipeline's ranks.
        num_microbatches: the number of microbatches in a flush.
        stages_per_rank: the number of stages on each rank.
        reorders: whether each slicing gets its own best order.
        splits: whether backwards may be I and W.
        limit: bytes of each rank; None: any.
    """

    name: str
    num_ranks: int
    num_microbatches: int
    stages_per_rank: int
    reorders: bool
    splits: bool
    limit: float | None = None

    def make(self, num_slices: SliceCounts) -> Schedule:
        """Returns the schedule to start from."""
        schedule = make_schedule(self.name, self.num_ranks, self.num_microbatches, num_slices, self.stages_per_rank)
        return join_backwards(schedule) if self.reorders else schedule  # to be split where that pays

    def frugal(self, num_slices: int) -> Schedule:
        """Returns the schedule that holds the least: one microbatch after the other."""
        name = "v-min" if self.name == "zb-v" else "breadth-first"  # of the same placement
        alone = make_schedule(name, self.num_ranks, 1, num_slices, self.stages_per_rank)
        return in_flushes(join_backwards(alone), self.num_microbatches)

    def start(self, slices: Sequence[int]) -> Schedule:
        return self.first(len(slices))

    def first(self, num_slices: SliceCounts) -> Schedule:
        """Returns the schedule to start from, with its backwards split where they may be."""
        start = self.make(num_slices)
        return split_backwards(start) if self.splits else start

    def quick(self, slices: Sequence[int], cost: TableCost) -> Schedule:
        """Returns approximately the schedule that will run, ignoring the limit."""
        return _find(self.make(len(slices)), cost, self.splits, _QUICK) if self.reorders else self.start(slices)


def learn_order(freedom: SearchSpace, slices: Sequence[int]) -> Inquiry[Trial]:
    """Finds the best order of the given slices."""
    orders = yield from _affordable(freedom, tuple(slices))
    samples = yield from _observe(orders, tuple(slices), warm_up=2)
    trial = yield from _trial(freedom, tuple(slices), samples.cost(min), splits=len(orders) > 1)
    assert trial is not None
    return trial


def learn_slices(freedom: SearchSpace, length: int) -> Inquiry[Trial]:
    """Finds the best slices of `length` tokens; where the order is free, each slicing gets its own best order.

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
        if trial := (yield from _trial(freedom, slices, cost, splits)):
            trials.append(trial)
    return (yield from fastest(trials))


def _affordable(freedom: SearchSpace, slices: tuple[int, ...]) -> Inquiry[list[Schedule]]:
    """Returns the orders whose times are measured, split backwards first: all that are within the limit.

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
        raise _nothing_fits(freedom.limit, (yield from holdings_of(Trial(frugal, slices))).peaks)
    return fitting


def _both(order: Schedule, splits: bool) -> list[Schedule]:
    return [split_backwards(order, everywhere=True), order] if splits else [order]


def _fitting(orders: list[Schedule], slices: tuple[int, ...], limit: float | None) -> Inquiry[list[Schedule]]:
    fitting = []
    for order in orders:
        if limit is None or max((yield from holdings_of(Trial(order, slices))).peaks) <= limit:
            fitting.append(order)
    return fitting


def _observe(orders: Sequence[Schedule], slices: tuple[int, ...], warm_up: int) -> Inquiry[Samples]:
    """Runs each order for some steps, and notes how long everything takes."""
    samples = Samples()
    for number, order in enumerate(orders):
        skipped = 1 if number else warm_up  # memory is touched for the first time
        for step in range(skipped + _OBSERVED):
            timeline = yield from timed(Trial(order, slices))
            if step >= skipped:
                samples.add(timeline)
    return samples


def _trial(freedom: SearchSpace, slices: tuple[int, ...], cost: TableCost, splits: bool) -> Inquiry[Trial | None]:
    """Returns these slices in the best order there is; None where that is above the limit."""
    limit = freedom.limit
    if freedom.reorders and limit is None:
        return Trial(_find(freedom.make(len(slices)), cost, splits), slices)
    wanted = Trial(freedom.frugal(len(slices)) if freedom.reorders else freedom.start(slices), slices)
    if not (yield from _fitting([wanted.schedule], slices, limit)):
        return None
    if freedom.reorders and limit is not None:
        return Trial((yield from _order_within(limit, wanted, cost, splits)), slices)
    return wanted


def _find(
    start: Schedule, cost: TableCost, splits: bool, effort: float = 2e7, limit: Sequence[float] | None = None
) -> Schedule:
    """Returns the best order found; `limit` is the most bytes of activations on each rank."""
    from slipstream.planner.order.order_search import find_order  # its compiled code takes a while to load

    counts = start.placement, start.num_microbatches, start.num_slices
    return find_order(*counts, cost, memory_limit=limit, split=splits, effort=effort)


def _order_within(limit: float, frugal: Trial, cost: TableCost, splits: bool) -> Inquiry[Schedule]:
    """Returns the fastest order found, by simulation, of those whose peaks are within the limit, as `frugal`'s is.

    `find_order` counts activations alone, from their forward to the end of their backward. Everything else is
    assumed to be what it is for `frugal`; the room that this leaves over one microbatch is halved, and halved
    again towards the most that keeps to the limit.
    """
    start = frugal.schedule
    held = yield from holdings_of(frugal)
    least = _of_a_microbatch(start, held)
    sized = replace(cost, activations=held.units)
    fitting, (low, high), share = [start], (0.0, 1.0), 1.0
    for _ in range(_ATTEMPTS):
        room = [size + share * (limit - peak) for size, peak in zip(least, held.peaks, strict=True)]
        order = _find(start, sized, splits, _EFFORT, room)
        if max((yield from holdings_of(Trial(order, frugal.slices))).peaks) > limit:
            high = share
        elif share == 1:
            return order
        else:
            fitting.append(order)
            low = share
        share = (low + high) / 2
    return min(fitting, key=lambda order: simulate(order, cost).makespan)


def _of_a_microbatch(schedule: Schedule, held: TrialMemory) -> list[float]:
    """Returns the bytes that all slices of one microbatch hold on each rank: the least that any order holds."""
    sizes = [0.0] * schedule.num_ranks
    for (stage, _), size in held.units.items():
        sizes[schedule.placement[stage]] += size
    return sizes


def _nothing_fits(limit: float, peaks: Sequence[float]) -> SlipstreamError:
    rank = max(range(len(peaks)), key=peaks.__getitem__)
    return SlipstreamError(
        f"memory.limit={limit:.6g} bytes, but no order fits: with one microbatch at a time rank {rank} holds "
        f"{peaks[rank]:.0f} bytes ({_KINDS}). Give memory.limit={peaks[rank]:.0f} or more, or "
        "memory.recompute='full', memory.offload=0.5, smaller microbatches or more ranks."
    )
