"""Lower bounds of a configuration's step time and memory, which no simulation beats."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from math import prod
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np

from slipstream.array_types import Flags, Floats, Ints
from slipstream.cost import BY_LAYER, REPLAYED, CostSource, StageCosts, StageParts
from slipstream.planner.order.makespan_bounds import rank_bounds
from slipstream.planner.plans import Configuration
from slipstream.schedule import (
    Op,
    Schedule,
    add_offload,
    add_recompute,
    freeze_stages,
    make_schedule,
    split_backwards,
)
from slipstream.simulator.action_graph import OPS, ActionArrays, first_of
from slipstream.simulator.memory_arrays import row_peaks

_Result = TypeVar("_Result")


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


class NewestResults(Generic[_Result]):
    """A function of schedules' shapes that keeps its newest results: of at most so many slices of stages in all."""

    def __init__(self, most: int, make: Callable[..., _Result]) -> None:
        self._most, self._make = most, make
        self._kept: dict[tuple[Any, ...], _Result] = {}

    def __call__(self, shape: ScheduleShape, *saving: Any) -> _Result:
        key = (shape, *saving)
        found = self._kept.pop(key) if key in self._kept else self._make(*key)
        self._kept[key] = found
        while len(self._kept) > 1 and sum(prod(each.counts) for each, *_ in self._kept) > self._most:
            del self._kept[next(iter(self._kept))]
        return found

    def clear(self) -> None:
        """Forgets all results."""
        self._kept.clear()


def _make_schedule(shape: ScheduleShape, recompute: bool = False, offload: float = 0.0) -> ActionArrays:
    """Returns a schedule of compute actions, R, OFFLOAD and RELOAD.

    Frozen stages have no backwards.
    """
    if offload:
        return with_savings(cached_schedule(shape, recompute).schedule, offload=offload)
    if recompute:
        return with_savings(cached_schedule(shape).schedule, recompute)
    schedule = make_schedule(shape.name, *shape.counts)
    schedule = split_backwards(schedule) if shape.splits else schedule
    return ActionArrays.of(freeze_stages(schedule, shape.num_frozen) if shape.num_frozen else schedule)


# With what follows from it a schedule takes up to two kilobytes for each slice of a stage.
cached_schedule = NewestResults(250_000, _make_schedule)


def with_savings(schedule: Schedule, recompute: bool = False, offload: float = 0.0) -> ActionArrays:
    """Returns a schedule of compute actions with R, and with OFFLOAD and RELOAD for a share of the slices."""
    schedule = add_recompute(schedule) if recompute else schedule
    return ActionArrays.of(add_offload(schedule, offload) if offload else schedule)


@dataclass(frozen=True, eq=False)
class PlacedPartition:
    """The parts of each stage, the rank that holds it, and what stages cost."""

    costs: StageCosts
    placement: tuple[int, ...]
    bounds: tuple[int, ...]  # the first part of each stage, and the number of parts

    @cached_property
    def stages(self) -> list[StageParts]:
        return StageParts.of_units(self.bounds)

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

    def per_stage(self, value: Callable[[StageParts], float]) -> Floats:
        """Returns the value of each stage."""
        return np.array([value(stage) for stage in self.stages])

    def per_rank(self, values: Sequence[float] | Floats) -> Floats:
        """Returns the sum over the stages of each rank."""
        return np.bincount(self.placement, values, self.num_ranks).astype(np.float64)


@dataclass(frozen=True)
class StageSizes:
    """The bytes of each stage's weights, how many parameters are trained, and the bytes of one microbatch's keys and
    values and of what its F keep."""

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
    replay: dict[str, Floats]  # of R, by kind of recomputation; with "full", what B and I take longer
    exchanged: dict[Op, Floats]  # the parts of F and of I that are `EXCHANGES`, (kind, stage, slice)
    slices: tuple[int, ...]

    def within_backwards(self, recompute: str) -> Floats | float:
        """Returns how much longer B and I take, in which layers are recomputed."""
        return self.replay["full"] if recompute in BY_LAYER else 0.0

    def seconds(self, recompute: str) -> dict[Op, Floats]:
        """Returns the times of all ops with a kind of recomputation."""
        again = self.within_backwards(recompute)
        found = self.compute | {op: self.compute[op] + again for op in (Op.B, Op.I)}
        return found | ({Op.R: self.replay[recompute]} if recompute in REPLAYED else {})


@dataclass(frozen=True, eq=False)
class ConfigurationGroup:
    """The bounds of configurations that differ only in how they save memory.

    That no simulation beats the bounds is tested (`test_no_simulation_beats_a_bound`).
    """

    cut: PlacedPartition
    make_times: Callable[[], StageTimes]  # once they are asked for
    sizes: StageSizes
    source: CostSource
    num_microbatches: int
    splits_all: bool  # whether all backwards are I and W, or only those that send their result to another rank
    slices: tuple[int, ...]  # empty where any number will do, for memory

    @cached_property
    def times(self) -> StageTimes:
        return self.make_times()

    def least_seconds(self, configuration: Configuration, tail: Floats) -> float:
        """Returns a lower bound of the step, where each rank's last action is followed by `tail` seconds.

        It is the longest of the ranks' times: what precedes their first stage's first forward, their work, what follows
        their first stage's last backward, and the optimizer; or the copies to the host and back, if longer. Where a
        backward is split, what follows overlaps with late weight gradients: the larger counts.
        """
        ends = float((self._last_action_ends[configuration.recompute] + tail).max())
        return max(ends, self._copy_seconds(configuration))

    @cached_property
    def _last_action_ends(self) -> dict[str, Floats]:
        """The earliest end of each rank's last action, by kind of recomputation.

        The last slice of a microbatch isn't recomputed where its backward directly follows its forward, but then the
        rank waits in between for the stages after: the shorter of the two counts.
        """
        return {what: self._ends(what) for what in self.times.replay}

    def _ends(self, recompute: str) -> Floats:
        seconds, cut, number = self.times.seconds(recompute), self.cut, self.num_microbatches
        split = (self.splits_all | (cut.sends_back & (recompute not in BY_LAYER)))[:, None]
        back = np.where(split, seconds[Op.I], seconds[Op.B])
        weights = np.where(split, seconds[Op.W], 0.0)
        computed = {Op.F: seconds[Op.F], Op.B: back + weights, Op.I: back, Op.W: weights}
        ends = rank_bounds(computed, np.array(cut.placement), [0], np.zeros(1), number)
        if Op.R not in seconds:
            return ends
        around = seconds[Op.F][:, -1] + back[:, -1]
        waits = np.append(np.cumsum(around[:0:-1])[::-1], 0.0)
        again = seconds[Op.R][:, :-1].sum(axis=1) + np.minimum(seconds[Op.R][:, -1], waits)
        return ends + number * cut.per_rank(again)

    def _copy_seconds(self, configuration: Configuration) -> float:
        """Returns the seconds of a rank's copies to the host; a slice or two of a microbatch may stay on the device."""
        c, host, slices = configuration, self.source.host, self.slices
        if not c.offload or host is None:
            return 0.0
        sent = c.offload * self.num_microbatches * self.cut.per_rank(self.sizes.kept[c.recompute]).min()
        return float(sent * sum(sorted(slices)[:-2]) / sum(slices) / host.bandwidth)

    def least_bytes(self, configuration: Configuration) -> float:
        """Returns a lower bound of the fullest rank's bytes: its state and one microbatch.

        Between its forwards and its backwards every rank holds a microbatch whole, on the device or on its host. For
        the first microbatch there are no gradients yet.
        """
        sizes, per_rank = self.sizes, self.cut.per_rank
        state = self.source.state.of_shards(configuration.shard)
        gradients = state.gradients if self.num_microbatches > 1 else 0
        slices, recompute = self.slices, configuration.recompute
        by_layer = recompute in BY_LAYER
        # a backward has all of its slice's activations, or a layer's, whatever was dropped or offloaded before
        activations = sizes.largest * (max(slices) / sum(slices) if slices and not by_layer else 0.0)
        if not configuration.offload:
            activations = np.maximum(activations, per_rank(sizes.kept[recompute]))
        context = per_rank(sizes.context * self.cut.trains)  # a stage without backwards frees it after its forwards
        if by_layer and len(slices) < 2:
            context = np.zeros_like(context)
        kept = per_rank(sizes.weights) + gradients * per_rank(sizes.trained)
        kept = kept + state.optimizer * per_rank(sizes.optimized(configuration.optimizer_shards))
        return float((kept + context + activations).max())


_F, _B, _I, _W = (OPS.index(op) for op in (Op.F, Op.B, Op.I, Op.W))
_NOT_AWAY = 4  # slices of a rank that may be on the device


@dataclass(frozen=True)
class MarkedActions:
    """The actions of a schedule as arrays; rank r's are `firsts[r]` up to `firsts[r + 1]`."""

    firsts: Ints
    op: Ints
    stage: Ints
    slice: Ints
    opens: Flags  # the first forward of a microbatch on the stage
    closes: Flags  # the last B or I of one, or the last F of a stage without backwards
    reduces: Flags  # the first B or W of the stage


def _mark_actions(shape: ScheduleShape) -> MarkedActions:
    """Returns the actions of a named schedule, without the schedule itself, which takes more memory."""
    arrays = cached_schedule(shape)
    op, stage, (opens, _, closes) = arrays.op, arrays.stage, arrays.context_marks
    reduces = first_of(stage, (op == _B) | (op == _W))
    return MarkedActions(arrays.firsts, op, stage, arrays.slice, opens, closes, reduces)


marked_actions = NewestResults(2_000_000, _mark_actions)


@dataclass(frozen=True)
class MemoryBound:
    """The bytes of activations, keys, values and gradients of a configuration's stages."""

    whole: Floats  # (stage, slice): all activations of F
    kept: Floats  # (stage, slice): what is kept of them where the slice is recomputed
    context: Floats  # per stage, of one microbatch
    gradients: Floats  # per stage
    offloads: bool  # whether activations may be on the host until their backward; what I keeps for W never is

    def peaks(self, shape: ScheduleShape) -> Floats:
        """Returns a lower bound of each rank's bytes at its peak."""
        actions = marked_actions(shape)
        op, stage = actions.op, actions.stage
        whole, kept = self.whole[stage, actions.slice], self.kept[stage, actions.slice]
        backward, last = (op == _B) | (op == _I), (op == _B) | (op == _W)
        if self.offloads:
            before, after = np.where(op == _I, whole, 0), np.where(op == _W, whole, 0)
            during = np.where(op == _B, whole, 0)
        else:
            before, after = np.where(op == _F, kept, 0), np.where(last, kept, 0)
            during = np.where(backward, whole - kept, 0)
        before = before + actions.opens * self.context[stage]
        # gradients exist once the backward that makes them has freed its activations
        after = after + actions.closes * self.context[stage] - actions.reduces * self.gradients[stage]
        return row_peaks(actions.firsts, before, during, after)

    def away(self, shape: ScheduleShape) -> float:
        """Returns a lower bound of the most bytes on one rank's host.

        All slices between forward and backward are there but a few, which are needed soon or whose backward follows too
        soon.
        """
        kept = MemoryBound(self.kept, self.kept, 0 * self.context, 0 * self.gradients, offloads=False)
        return float(kept.peaks(shape).max() - _NOT_AWAY * self.kept.max())
