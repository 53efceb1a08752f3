"""Lower bounds of a configuration's step time and memory, which no simulation beats."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise, product
from math import inf, prod
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

import numpy as np

from slipstream.array_types import Flags, Floats
from slipstream.cost import BY_LAYER, REPLAYED, Costs, CostSource, StageParts, kinds_by_layer
from slipstream.planner.order.makespan_bounds import rank_bounds
from slipstream.planner.plans import Configuration
from slipstream.schedule import (
    SCHEDULES,
    Op,
    Schedule,
    add_offload,
    add_recompute,
    freeze_stages,
    make_schedule,
    split_backwards,
)
from slipstream.schedule.action_arrays import ActionArrays, first_of
from slipstream.simulator.memory_account import row_peaks

_Result = TypeVar("_Result")

_FILLED = 3  # groups of microbatches: a schedule that bounds its memory has no more under way


class ScheduleShape(NamedTuple):
    """The arguments of `slipstream.make_schedule`, and how many stages have no backwards."""

    name: str
    num_ranks: int
    num_microbatches: int
    num_slices: int
    stages_per_rank: int
    num_frozen: int = 0  # the first stages, of which nothing is trained
    splits: bool = True  # backwards that send their result to another rank, as a Pipeline does

    @property
    def counts(self) -> tuple[int, int, int, int]:
        """The ranks, microbatches, slices and stages per rank."""
        return self.num_ranks, self.num_microbatches, self.num_slices, self.stages_per_rank

    def with_groups(self, number: int) -> ScheduleShape:
        """Returns the shape with at most so many groups of microbatches, each of as many as pass interleaved stages
        together."""
        group = -(-self.num_ranks // self.num_slices)
        return self._replace(num_microbatches=min(self.num_microbatches, number * group))


class NewestResults(Generic[_Result]):
    """A function of schedules' shapes that keeps its newest results: of at most so many slices of stages in all."""

    def __init__(self, most: int, make: Callable[..., _Result]) -> None:
        self._most, self._make = most, make
        self._kept: dict[tuple[Any, ...], _Result] = {}

    def __call__(self, shape: ScheduleShape, *saving: Any) -> _Result:
        key = (shape, *saving)
        if key in self._kept:
            self._kept[key] = self._kept.pop(key)
            return self._kept[key]
        self._kept[key] = result = self._make(*key)
        while len(self._kept) > 1 and sum(prod(cut.counts) for cut, *_ in self._kept) > self._most:
            del self._kept[next(iter(self._kept))]
        return result

    def clear(self) -> None:
        """Forgets all results."""
        self._kept.clear()


def _make_schedule(shape: ScheduleShape, recompute: bool = False, offload: float = 0.0) -> ActionArrays:
    """Returns a schedule of compute actions, R, OFFLOAD and RELOAD.

    Frozen stages have no backwards.
    """
    if recompute or offload:
        return with_savings(cached_schedule(shape).schedule, recompute, offload)
    schedule = make_schedule(shape.name, *shape.counts)
    schedule = split_backwards(schedule) if shape.splits else schedule
    return ActionArrays.of(freeze_stages(schedule, shape.num_frozen) if shape.num_frozen else schedule)


# Its arrays take up to a kilobyte for each slice of a stage.
cached_schedule = NewestResults(100_000, _make_schedule)


@contextmanager
def working_memory() -> Iterator[None]:
    """Turns garbage collection off for the time of a search, and empties the search's caches at its end.

    It makes many small objects, none of them in a cycle.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        cached_schedule.clear()
        if was_enabled:
            gc.enable()


def with_savings(schedule: Schedule, recompute: bool, offload: float) -> ActionArrays:
    """Returns a valid schedule of compute actions with R, and with OFFLOAD and RELOAD for a share of the slices."""
    schedule = add_recompute(schedule, compiled=True) if recompute else schedule
    return ActionArrays.of(add_offload(schedule, offload, compiled=True) if offload else schedule)


@dataclass(frozen=True, eq=False)
class PlacedPartition:
    """The parts of each stage, the rank that holds it, and the stages' costs."""

    costs: Costs
    placement: tuple[int, ...]
    bounds: tuple[int, ...]  # the first part of each stage, and the number of parts
    spreads_head: bool = False

    @cached_property
    def stages(self) -> list[StageParts]:
        """The parts of each stage, without a head that is spread."""
        parts = StageParts.of_units(self.bounds)
        return [*parts[:-1], parts[-1]._replace(stop=parts[-1].stop - 1)] if self.spreads_head else parts

    @cached_property
    def part_counts(self) -> Floats:
        """The fixed part of each stage, 1, and its number of parts of each kind, (stage, 1 + kinds)."""
        counts = np.zeros((len(self.stages), 2 + max(self.costs.parts)))
        counts[:, 0] = 1
        stages = np.repeat(np.arange(len(self.stages)), np.diff(self.bounds))
        np.add.at(counts, (stages, 1 + np.array(self.costs.parts)), 1)
        counts[-1, 1 + self.costs.parts[-1]] -= self.spreads_head
        return counts

    @cached_property
    def num_ranks(self) -> int:
        return max(self.placement) + 1

    @cached_property
    def trains(self) -> Flags:
        """Marks the stages that have backwards."""
        return np.array([self.costs.has_backward(stage) for stage in self.stages])

    @cached_property
    def num_frozen(self) -> int:
        """The number of first stages that have none."""
        return int(np.argmax(self.trains))

    @cached_property
    def sends_back(self) -> Flags:
        """Marks the stages that send their input gradient to another rank."""
        return np.array([False, *(a != b for a, b in pairwise(self.placement))])

    @cached_property
    def _alike(self) -> tuple[list[StageParts], list[int]]:
        """A stage of each kind, and the place among them of every stage's."""
        costs, places = self.costs, dict[tuple[tuple[int, ...], ...], int]()
        kinds = [kinds_by_layer(costs.parts, range(*stage), costs.units_per_layer) for stage in self.stages]
        of_stages = [places.setdefault(kind, len(places)) for kind in kinds]
        return [self.stages[of_stages.index(place)] for place in range(len(places))], of_stages

    def per_stage(self, value: Callable[[StageParts], float]) -> Floats:
        """Returns the value of each stage; of a spread head a rank's last one has a share."""
        different, places = self._alike
        values: Floats = np.array([value(stage) for stage in different], float)[places]
        if self.spreads_head:
            head = StageParts(self.bounds[-1] - 1, self.bounds[-1])
            lasts = [len(values) - 1 - self.placement[::-1].index(rank) for rank in range(self.num_ranks)]
            values[lasts] += value(head) / self.num_ranks
        return values

    @cached_property
    def _of_rank(self) -> Floats:
        return np.eye(self.num_ranks)[list(self.placement)]

    def per_rank(self, values: Floats) -> Floats:
        """Returns the sums over the stages of each rank, (..., rank) of (..., stage)."""
        return values @ self._of_rank


@dataclass(frozen=True)
class StageSizes:
    """The bytes of each stage's weights, how many parameters are trained, and the bytes of one microbatch's keys and
    values and of the activations that its F keep."""

    weights: Floats
    trained: Floats
    optimized: Callable[[int], Floats]  # how many have their optimizer state here, by over how many ranks it is spread
    context: Floats
    kept: dict[str, Floats]  # by kind of recomputation
    largest: Floats  # without recomputation, of each rank's largest stage


@dataclass(frozen=True)
class StageTimes:
    """The seconds of each (stage, slice)."""

    compute: dict[Op, Floats]  # of F, B, I and W; B in one may differ from the sum of its two halves
    replay: dict[str, Floats]  # of R, by kind of recomputation; with "full", the seconds added to B and I
    exchanged: dict[Op, Floats]  # the parts of F and of I that are `EXCHANGES`, (kind, stage, slice)
    slices: tuple[int, ...]

    def within_backwards(self, recompute: str) -> Floats | float:
        """Returns how much longer B and I take, in which layers are recomputed."""
        return self.replay["full"] if recompute in BY_LAYER else 0.0

    def seconds(self, recompute: str) -> dict[Op, Floats]:
        """Returns the times of all ops with a kind of recomputation."""
        again = self.within_backwards(recompute)
        seconds = self.compute | {op: self.compute[op] + again for op in (Op.B, Op.I)}
        return seconds | ({Op.R: self.replay[recompute]} if recompute in REPLAYED else {})


class Savings(NamedTuple):
    """The ways to save memory that a search may combine, of each those that cost least first."""

    recompute: tuple[str, ...]
    offload: tuple[float, ...]
    shard: tuple[str, ...]

    @property
    def every(self) -> list[tuple[str, float, str]]:
        """All combinations."""
        return list(product(*self))


Slicing = tuple[int, ...]  # tokens of each slice; () for any slices


@dataclass(frozen=True, eq=False)
class GroupBounds:
    """The bounds of configurations with the same cut, which differ in their slices and in how they save memory.

    That no simulation beats them is tested (`test_no_simulation_beats_a_bound`).
    """

    cut: PlacedPartition
    times: StageTimes  # of a sequence's first slice, of all others, and of its last: (slicing, stage, 3)
    sizes: StageSizes
    source: CostSource
    num_microbatches: int
    num_copies: int  # ranks with the same weights
    splits_all: bool  # whether all backwards are I and W, or only those that send their result to another rank
    slicings: Sequence[Slicing]
    savings: Savings

    def least_seconds(self, tails: Floats) -> Floats:
        """Returns lower bounds of the step, (slicing, saving), where each rank's last action is followed by its tail.

        It is the longest of the ranks' times: the time before a stage's first forward, the work on it and on the rank's
        stages after it, the time after its last backward, in which weight gradients may be late, and the optimizer; or
        the copies to the host and back, if longer. The last backward's gradient ends on another rank, with its tail.

        Args:
            tails: seconds, (kind of sharding, rank).
        """
        done, sent = (each[:, None] for each in self._last_action_ends)
        own, least = tails[:, None, list(self.cut.placement)], tails.min(axis=-1)[:, None, None]
        ends = np.maximum(done + own, sent + least).max(axis=-1)
        return self._by_slicing(np.maximum(ends[:, None], self._copy_seconds[:, :, None]))

    def _by_slicing(self, bounds: Floats) -> Floats:
        # From recomputation, offload, sharding and slicing to (slicing, saving).
        return bounds.reshape(-1, len(self.slicings)).T

    @cached_property
    def _by_layer(self) -> Flags:
        return np.array([what in BY_LAYER for what in self.savings.recompute])

    @cached_property
    def _last_action_ends(self) -> tuple[Floats, Floats]:
        """The earliest end of a rank's work on a stage and those after it, and of the way of its last gradient through
        the stages before, (recomputation, slicing, stage) each.

        The last slice of a microbatch isn't recomputed where its backward directly follows its forward, but then the
        rank waits in between for the stages after: the shorter of the two counts.
        """
        times, cut, kinds = self.times, self.cut, self.savings.recompute
        forward = np.repeat(times.compute[Op.F][None], len(kinds), axis=0)
        again, replay = np.zeros(forward.shape), np.zeros(forward.shape)
        for index, what in enumerate(kinds):
            again[index] = times.within_backwards(what)
            replay[index] = times.replay[what] if what in REPLAYED else 0.0
        split = (self.splits_all | (cut.sends_back & ~self._by_layer[:, None]))[:, None, :, None]
        back = np.where(split, times.compute[Op.I], times.compute[Op.B]) + again
        weights = np.where(split, times.compute[Op.W], 0.0)
        around = (forward + back)[..., ::-1, 2]
        waits = (np.cumsum(around, axis=-1) - around)[..., ::-1]
        first, others, last = np.moveaxis(replay, -1, 0)
        # Between a stage's first forward and its last backward, like the work of its other slices.
        forward[..., 1] += first + others - last + np.minimum(last, waits)
        computed = {Op.F: forward, Op.B: back + weights, Op.I: back, Op.W: weights}
        of_slices = {op: by_slice[..., :2] for op, by_slice in computed.items()}
        return rank_bounds(of_slices, np.array(cut.placement), [0], np.zeros(2), self.num_microbatches)

    @cached_property
    def _copy_seconds(self) -> Floats:
        """The seconds of a rank's copies to the host and back, (recomputation, offload, slicing).

        A slice stays on the device where its backward follows too soon: on each rank at most one of a microbatch, on
        one of its stages; and on some rank of a pipeline at most two of all.
        """
        host, shares = self.source.host, np.array(self.savings.offload)
        longest = np.array([max(slices, default=1) / max(1, sum(slices)) for slices in self.slicings])
        slice_bytes = np.stack([self.sizes.kept[what].max() for what in self.savings.recompute])[:, None] * longest
        held = self.num_microbatches * self._kept
        sent = held.max(axis=1)[:, None] - self.num_microbatches * slice_bytes
        if len(set(self.cut.placement)) > 1:
            sent = np.maximum(sent, held.min(axis=1)[:, None] - 2 * slice_bytes)
        copied: Floats = 2 * np.maximum(0.0, sent) / (host.bandwidth if host else inf)
        seconds: Floats = copied[:, None] * shares[:, None]
        return seconds

    @cached_property
    def _kept(self) -> Floats:
        """The bytes that a microbatch keeps on each rank, (recomputation, rank)."""
        return np.stack([self.cut.per_rank(self.sizes.kept[what]) for what in self.savings.recompute])

    def least_bytes(self) -> Floats:
        """Returns lower bounds of the fullest rank's bytes, (slicing, saving): its state and one microbatch.

        Between its forwards and its backwards every rank holds a microbatch whole, on the device or on its host. For
        the first microbatch there are no gradients yet.
        """
        sizes, state, per_rank = self.sizes, self.source.state, self.cut.per_rank
        by_layer = self._by_layer[:, None, None]
        gradients = state.gradients if self.num_microbatches > 1 else 0
        optimized = [
            state.of_shards(shard).optimizer * sizes.optimized(1 if shard == "none" else self.num_copies)
            for shard in self.savings.shard
        ]
        state_bytes = per_rank(sizes.weights + gradients * sizes.trained + np.stack(optimized))
        # a backward has all of its slice's activations, or a layer's, whatever was dropped or offloaded before
        longest = np.array([max(slices, default=0) / max(1, sum(slices)) for slices in self.slicings])
        working = sizes.largest * longest[:, None] * ~by_layer
        whole = np.maximum(working, self._kept[:, None])
        activations = np.stack([working if share else whole for share in self.savings.offload], axis=1)
        # a stage without backwards frees it after its forwards
        is_lone = np.array([len(slices) < 2 for slices in self.slicings])
        context = per_rank(sizes.context * self.cut.trains) * ~(by_layer & is_lone[:, None])
        held = (activations + context[:, None])[:, :, None] + state_bytes[:, None]
        return self._by_slicing(held.max(axis=-1))


Promise = tuple[float, float, int, bool]  # least seconds of the step, then cheap ways of saving memory first


@dataclass(frozen=True, eq=False)
class ConfigurationGroup:
    """Configurations of a mesh with the same cut, and the least seconds and bytes of their steps.

    Args:
        first: with their common settings.
        names: of their schedules.
        slicings: (number of slices, slicing) of each.
        savings: how they save memory.
        seconds: of the step, (slicing, saving); infinite for one that is too large.
        sizes: bytes of the fullest rank, (slicing, saving).
        least_seconds: of the step with any slices; infinite where that is too large.
    """

    VARIED: ClassVar = ("schedule", "num_slices", "slicing", *Savings._fields)

    first: Configuration
    names: tuple[str, ...]
    slicings: list[tuple[int, str]]
    savings: Savings
    seconds: Floats
    sizes: Floats
    least_seconds: float

    def bounded(self) -> Iterator[tuple[float, float, Configuration]]:
        """Yields (least seconds of the step, 0 for one that is too large, least bytes of the fullest rank,
        configuration)."""
        seconds, sizes = np.where(np.isfinite(self.seconds), self.seconds, 0.0).tolist(), self.sizes.tolist()
        for name, slicing, saving in product(*map(range, (len(self.names), *self.seconds.shape))):
            configuration = replace(self.first, **self._varied(name, slicing, saving))
            yield seconds[slicing][saving], sizes[slicing][saving], configuration

    def in_order(self, choice: str = "", value: object = None) -> Iterator[tuple[Promise, Configuration]]:
        """Yields those that may fit, the most promising first; of a varied `choice` those with another value alone."""
        index, every = {what: place for place, what in enumerate(self.savings.recompute)}, self.savings.every
        costs = [(offload, index[what], shard == "none") for what, offload, shard in every]
        seconds, fits = self.seconds, np.isfinite(self.seconds)
        keys = *np.broadcast_to(np.transpose(costs)[::-1, None], (3, *seconds.shape)), seconds
        places = np.flatnonzero(fits)[np.lexsort([key[fits] for key in keys])]
        # One after the other: of most groups few are asked for.
        for slicing, saving in (divmod(int(place), len(costs)) for place in places):
            promise = (float(seconds[slicing, saving]), *costs[saving])
            for varied in (self._varied(name, slicing, saving) for name in range(len(self.names))):
                if varied.get(choice, self) != value:
                    yield promise, replace(self.first, **varied)

    def _varied(self, name: int, slicing: int, saving: int) -> dict[str, Any]:
        varied = self.names[name], *self.slicings[slicing], *self.savings.every[saving]
        return dict(zip(self.VARIED, varied, strict=True))


_NOT_AWAY = 4  # slices of a rank that may be on the device


@dataclass(frozen=True)
class MemoryBound:
    """The bytes of activations, keys, values and gradients of a configuration's stages."""

    whole: Floats  # (stage, slice): all activations of F
    kept: Floats  # (stage, slice): those that are kept where the slice is recomputed
    context: Floats  # per stage, of one microbatch
    gradients: Floats  # per stage
    offloads: bool  # whether activations may be on the host until their backward; those that I keeps for W never are

    def peaks(self, shape: ScheduleShape, until: Op = Op.W) -> Floats:
        """Returns a lower bound of each rank's bytes at its peak, from the first few microbatches: more are held only
        where a rank has the forwards of all before its first backward, and all of them between the two.

        What F keeps is there until B, or the half of it that `until` names.
        """
        few = shape.with_groups(_FILLED)
        actions = cached_schedule(few)
        stage, (opens, _, closes) = actions.stage, actions.context_marks
        whole, kept_bytes = self.whole[stage, actions.slice], self.kept[stage, actions.slice]
        if self.offloads:
            before, after = np.where(actions.is_one_of(Op.I), whole, 0), np.where(actions.is_one_of(Op.W), whole, 0)
            during = np.where(actions.is_one_of(Op.B), whole, 0)
        else:
            before = np.where(actions.is_one_of(Op.F), kept_bytes, 0)
            after = np.where(actions.is_one_of(Op.B, until), kept_bytes, 0)
            during = np.where(actions.is_one_of(Op.B, Op.I), whole - kept_bytes, 0)
        before = before + opens * self.context[stage]
        # gradients exist once the backward that makes them has freed its activations
        makes = first_of(stage, actions.is_one_of(Op.B, Op.W))
        after = after + closes * self.context[stage] - makes * self.gradients[stage]
        peaks = row_peaks(actions.firsts, before, during, after)
        if SCHEDULES[shape.name].holds_all:
            stays = (before - closes * self.context[stage]) * actions.is_one_of(Op.F)  # but where nothing is trained
            held = np.bincount(actions.rank, stays, shape.num_ranks) / few.num_microbatches
            peaks = np.maximum(peaks, shape.num_microbatches * held)
        return peaks

    def away(self, shape: ScheduleShape) -> float:
        """Returns a lower bound of the most bytes on one rank's host.

        All slices between forward and backward are there but a few, which are needed soon or whose backward follows too
        soon.
        """
        kept_bound = MemoryBound(self.kept, self.kept, 0 * self.context, 0 * self.gradients, offloads=False)
        return float(kept_bound.peaks(shape, until=Op.I).max() - _NOT_AWAY * self.kept.max())
