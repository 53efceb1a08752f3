"""Lower bounds of a configuration's step time and memory, which no simulation beats."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import product
from math import inf
from typing import Any, ClassVar

import numpy as np

from slipstream.array_types import Flags, Floats
from slipstream.cost import BY_LAYER, REPLAYED, CostSource, Update
from slipstream.options import host_share
from slipstream.planner.order.makespan_bounds import rank_bounds
from slipstream.planner.plan import Plan
from slipstream.planner.search.placed_partition import PlacedPartition
from slipstream.planner.search.savings import SAVINGS, Savings
from slipstream.planner.search.schedule_shape import ScheduleShape, cached_schedule
from slipstream.planner.search.stage_times import Slicing, StageTimes
from slipstream.schedule import (
    SCHEDULES,
    Op,
)
from slipstream.schedule.action_arrays import first_of
from slipstream.simulator.memory_account import row_peaks

_FILLED = 3  # groups of microbatches: a schedule that bounds its memory has no more under way


@dataclass(frozen=True)
class StageSizes:
    """The bytes of each stage's weights, how many parameters are trained, and the bytes of one microbatch's keys and
    values and of the activations that its F keep."""

    weights: Floats
    trained: Floats
    optimized: Callable[[Update], Floats]  # how many have their optimizer state here
    context: Floats
    kept: dict[str, Floats]  # by kind of recomputation
    largest: Floats  # without recomputation, of each rank's largest stage


@dataclass(frozen=True, eq=False)
class GroupBounds:
    """The bounds of configurations with the same cut, which differ in their slices and in how they save memory.

    That no simulation beats them is tested (`test_no_simulation_beats_a_bound`).
    """

    cut: PlacedPartition
    # Returns those of a sequence's first slice, of all others, and of its last, (slicing, stage, 3): bytes need none.
    find_times: Callable[[], StageTimes]
    sizes: StageSizes
    source: CostSource
    num_microbatches: int
    updates: Sequence[Update]  # of `savings.updates`
    splits_all: bool  # whether all backwards are I and W, or only those that send their result to another rank
    slicings: Sequence[Slicing]
    savings: Savings

    @cached_property
    def times(self) -> StageTimes:
        """The seconds of the stages."""
        return self.find_times()

    def least_seconds(self, tails: Floats) -> Floats:
        """Returns lower bounds of the step, (slicing, saving), where each rank's last action is followed by its tail.

        It is the longest of the ranks' times: the time before a stage's first forward, the work on it and on the rank's
        stages after it, the time after its last backward, in which weight gradients may be late, and the optimizer; or
        the copies to the host and back, if longer. The last backward's gradient ends on another rank, with its tail.

        Args:
            tails: seconds, (update, rank).
        """
        along, along_updates = partial(self.savings.along, "recompute"), self.savings.along_updates
        done, sent = map(along, self._last_action_ends)
        own = along_updates(tails[:, None, list(self.cut.placement)])
        least = along_updates(tails.min(axis=-1)[:, None, None])
        ends = np.maximum(done + own, sent + least).max(axis=-1)
        return self._by_slicing(np.maximum(ends, self._copy_seconds))

    def _by_slicing(self, bounds: Floats) -> Floats:
        # From an axis of each saving, and one of slicings, to (slicing, saving).
        num_slicings = len(self.slicings)
        every = np.array(np.broadcast_to(bounds, (*self.savings.shape, num_slicings)))
        return every.reshape(-1, num_slicings).T

    @cached_property
    def _recomputations(self) -> tuple[str, ...]:
        return self.savings.values["recompute"]

    @cached_property
    def _shares(self) -> Floats:
        """The share of slices that is offloaded, with an axis of each saving."""
        return self.savings.along("offload", np.array(self.savings.values["offload"]))

    @cached_property
    def _by_layer(self) -> Flags:
        return np.array([what in BY_LAYER for what in self._recomputations])

    @cached_property
    def _last_action_ends(self) -> tuple[Floats, Floats]:
        """The earliest end of a rank's work on a stage and those after it, and of the way of its last gradient through
        the stages before, (recomputation, slicing, stage) each.

        The last slice of a microbatch isn't recomputed where its backward directly follows its forward, but then the
        rank waits in between for the stages after: the shorter of the two counts.
        """
        times, cut, kinds = self.times, self.cut, self._recomputations
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
        """The seconds of a rank's copies to the host and back, by slicing, with an axis of each saving.

        A slice stays on the device where its backward follows too soon: on each rank at most one of a microbatch, on
        one of its stages; and on some rank of a pipeline at most two of all.
        """
        host = self.source.host
        longest = np.array([max(slices, default=1) / max(1, sum(slices)) for slices in self.slicings])
        slice_bytes = np.stack([self.sizes.kept[what].max() for what in self._recomputations])[:, None] * longest
        held = self.num_microbatches * self._kept
        sent = held.max(axis=1)[:, None] - self.num_microbatches * slice_bytes
        if len(set(self.cut.placement)) > 1:
            sent = np.maximum(sent, held.min(axis=1)[:, None] - 2 * slice_bytes)
        copied: Floats = 2 * np.maximum(0.0, sent) / (host.bandwidth if host else inf)
        return self.savings.along("recompute", copied) * self._shares[..., None]

    @cached_property
    def _kept(self) -> Floats:
        """The bytes that a microbatch keeps on each rank, (recomputation, rank)."""
        return np.stack([self.cut.per_rank(self.sizes.kept[what]) for what in self._recomputations])

    def least_bytes(self) -> Floats:
        """Returns lower bounds of the fullest rank's bytes, (slicing, saving): its state and one microbatch.

        Between its forwards and its backwards every rank holds a microbatch whole, on the device or on its host. For
        the first microbatch there are no gradients yet.
        """
        sizes, state, per_rank = self.sizes, self.source.state, self.cut.per_rank
        by_layer = self._by_layer[:, None, None]
        gradients = state.gradients if self.num_microbatches > 1 else 0
        has_several = len(self.cut.placement) > self.cut.num_ranks
        states = []
        for update in self.updates:
            # The gradients of one stage may be on the host before those of another are made.
            made = 0 if update.place == "host" and has_several else gradients
            optimized = update.held.optimizer * sizes.optimized(update)
            states.append(sizes.weights + made * sizes.trained + optimized)
        state_bytes = per_rank(np.stack(states))
        # a backward has all of its slice's activations, or a layer's, whatever was dropped or offloaded before
        longest = np.array([max(slices, default=0) / max(1, sum(slices)) for slices in self.slicings])
        working = sizes.largest * longest[:, None] * ~by_layer
        whole = np.maximum(working, self._kept[:, None])
        along = partial(self.savings.along, "recompute")
        activations = np.where(self._shares[..., None, None], along(working), along(whole))
        # a stage without backwards frees it after its forwards
        is_lone = np.array([len(slices) < 2 for slices in self.slicings])
        context = per_rank(sizes.context * self.cut.trains) * ~(by_layer & is_lone[:, None])
        is_here = np.array([not host_share(place) for place in self.savings.values["context"]])[:, None, None]
        contexts = along(context) * self.savings.along("context", is_here)
        held = activations + contexts + self.savings.along_updates(state_bytes[:, None])
        return self._by_slicing(held.max(axis=-1))


Promise = tuple[float, ...]  # least seconds of the step, then cheap ways of saving memory first


@dataclass(frozen=True, eq=False)
class PlanGroup:
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

    VARIED: ClassVar = ("schedule", "num_slices", "slicing", *(saving.choice for saving in SAVINGS))

    first: Plan
    names: tuple[str, ...]
    slicings: list[tuple[int, str]]
    savings: Savings
    seconds: Floats
    sizes: Floats
    least_seconds: float

    def bounded(self) -> Iterator[tuple[float, float, Plan]]:
        """Yields (least seconds of the step, 0 for one that is too large, least bytes of the fullest rank,
        configuration)."""
        seconds, sizes = np.where(np.isfinite(self.seconds), self.seconds, 0.0).tolist(), self.sizes.tolist()
        for name, slicing, saving in product(*map(range, (len(self.names), *self.seconds.shape))):
            plan = replace(self.first, **self._varied(name, slicing, saving))
            yield seconds[slicing][saving], sizes[slicing][saving], plan

    def in_order(self, choice: str = "", value: object = None) -> Iterator[tuple[Promise, Plan]]:
        """Yields those that may fit, the most promising first; of a varied `choice` those with another value alone."""
        costs = self.savings.costs
        seconds, fits = self.seconds, np.isfinite(self.seconds)
        keys = *np.broadcast_to(np.transpose(costs)[::-1, None], (len(SAVINGS), *seconds.shape)), seconds
        places = np.flatnonzero(fits)[np.lexsort([key[fits] for key in keys])]
        # One after the other: of most groups few are asked for.
        for slicing, saving in (divmod(int(place), len(costs)) for place in places):
            promise = (float(seconds[slicing, saving]), *costs[saving])
            for varied in (self._varied(name, slicing, saving) for name in range(len(self.names))):
                if varied.get(choice, self) != value:
                    yield promise, replace(self.first, **varied)

    def _varied(self, name: int, slicing: int, saving: int) -> dict[str, Any]:
        num_slices, how = self.slicings[slicing]
        chosen = self.savings.every[saving]
        return {"schedule": self.names[name], "num_slices": num_slices, "slicing": how, **chosen}


NOT_AWAY = 4  # slices of a rank that may be on the device


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
        return float(kept_bound.peaks(shape, until=Op.I).max() - NOT_AWAY * self.kept.max())
