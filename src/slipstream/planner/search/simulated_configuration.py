"""One simulated configuration: its step, where the step's time goes, and every rank's memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from math import prod

import numpy as np

from slipstream.array_types import Floats
from slipstream.cost import BY_LAYER, EXCHANGES, StageParts, head_part_memory, memory_table, partition_of
from slipstream.planner.plans import AUTO, Configuration, Prediction
from slipstream.planner.search.bounds import MemoryBound
from slipstream.planner.search.placed_partition import PlacedPartition
from slipstream.planner.search.plan_space import PlanSpace
from slipstream.planner.search.schedule_shape import ScheduleShape
from slipstream.planner.search.stage_times import StageTimes
from slipstream.schedule import SCHEDULES, Op, Schedule
from slipstream.schedule.action import OPS
from slipstream.schedule.action_arrays import ActionArrays
from slipstream.simulator import MemoryKind, MemoryTable, RankMemory, TableCost
from slipstream.simulator.memory_account import OrderBytes, order_bytes
from slipstream.simulator.simulation import end_times

_LONG = 4000  # slices of stages, in a step that isn't simulated whole
_GROUPS = 12  # of microbatches that are simulated of it: with fewer, copies to the host haven't piled up yet
_AFTER = "gradient reduction", "weight gathering", "optimizer"  # what follows a rank's last action
_STEADY = 1e-3  # by which share two groups of such a step may differ


@dataclass(frozen=True)
class SimulatedConfiguration:
    """A configuration with its partition, slices and schedule, and its actions' costs.

    Once a pipeline is full, each group of microbatches takes as long as the one before, and nothing more is held. So a
    long step may be extrapolated: `arrays` have its first and its last groups, and `num_extrapolated` microbatches are
    between the two.
    """

    space: PlanSpace
    configuration: Configuration
    cut: PlacedPartition
    times: StageTimes
    arrays: ActionArrays
    num_extrapolated: int = 0

    @classmethod
    def of(cls, space: PlanSpace, configuration: Configuration) -> SimulatedConfiguration:
        """Returns the configuration with all actions of a step."""
        return cls._of(space, configuration, space.shape(configuration))

    @classmethod
    def extrapolated(cls, space: PlanSpace, configuration: Configuration) -> SimulatedConfiguration:
        """Returns the configuration with few groups of a long step, where these take equally long."""
        c, shape = configuration, space.shape(configuration)
        few = shape.with_groups(_GROUPS)
        is_long = prod(shape.counts) > _LONG and shape.num_microbatches > 2 * few.num_microbatches
        if not is_long or c.schedule == AUTO or SCHEDULES[c.schedule].holds_all:
            return cls.of(space, c)
        candidate = cls._of(space, c, few)
        return candidate if candidate._is_steady else cls.of(space, c)

    @classmethod
    def _of(cls, space: PlanSpace, configuration: Configuration, shape: ScheduleShape) -> SimulatedConfiguration:
        c, num_extrapolated = configuration, space.num_microbatches(configuration) - shape.num_microbatches
        return cls(space, c, space.cut(c), space.times(c), space.actions(c, shape), num_extrapolated)

    @property
    def num_alike(self) -> float:
        """The microbatches of the step for each of those in `arrays`."""
        return 1 + self.num_extrapolated / self.schedule.num_microbatches

    @property
    def _is_steady(self) -> bool:
        before, after = self._group_seconds(self.run[0])
        return abs(after - before) <= _STEADY * after

    def _group_seconds(self, ends: Floats) -> tuple[float, float]:
        """Returns from when one of the middle groups has gone back through all stages to when the next has, twice."""
        arrays, first = self.arrays, self.cut.num_frozen
        back = (arrays.stage == first) & arrays.is_one_of(Op.B, Op.I)
        done = np.zeros(self.schedule.num_microbatches)
        np.maximum.at(done, arrays.microbatch[back], ends[back])
        last = done[:: -(len(done) // _GROUPS)][::-1]
        return float(last[-4] - last[-5]), float(last[-3] - last[-4])

    def _later(self, ends: Floats) -> float:
        """Returns how much later the whole step ends: no rank takes less than its work, and its copies."""
        if not self.num_extrapolated:
            return 0.0
        work, group = [self.run[1]], self.schedule.num_microbatches / _GROUPS
        if self.cost.copies:
            copies = self.arrays.is_one_of(Op.OFFLOAD, Op.RELOAD)
            work.append(copies * self.arrays.each(self.cost.copy_seconds))
        busiest = max(np.bincount(self.arrays.rank, each).max() for each in work) / self.schedule.num_microbatches
        return self.num_extrapolated * max(self._group_seconds(ends)[1] / group, float(busiest))

    @cached_property
    def cost(self) -> TableCost:
        """The seconds of its actions, messages and copies."""
        space, c, placement = self.space, self.configuration, self.cut.placement
        units, tables = list(product(range(len(placement)), range(c.num_slices))), self.times.seconds(c.recompute)
        ran = [op for op in tables if op in self.schedule.ops]
        seconds = {(g, s, op): float(tables[op][g, s]) for op in ran for g, s in units}
        seconds |= space.found[c].of_head if c.schedule == AUTO else {}
        cost = self.cut.costs.action_costs(seconds, self.times.slices, c.data_parallel)
        return replace(cost, copies=self._copies) if c.offload else cost

    @property
    def _copies(self) -> dict[tuple[int, int], float]:
        """The seconds in which a slice of a stage is copied to the host, or back."""
        host, moved = self.space.source.host, self.arrays.is_one_of(Op.OFFLOAD)
        assert host is not None, "offloads to an unknown host"
        columns = (column[moved].tolist() for column in (self.arrays.stage, self.arrays.slice, self.bytes.leaves))
        return {(stage, index): host.copy_seconds(-left) for stage, index, left in {*zip(*columns, strict=True)}}

    @property
    def schedule(self) -> Schedule:
        """Compute actions, R, OFFLOAD and RELOAD, with backwards split as in a Pipeline."""
        return self.arrays.schedule

    @cached_property
    def table(self) -> MemoryTable:
        """The bytes of its actions."""
        c = self.configuration
        saved = c.recompute, self.space.source.state.of_shards(c.shard), c.optimizer_shards
        if self.cut.spreads_head:
            whole = StageParts.of_units(self.cut.bounds)
            return head_part_memory(self.cut.costs, whole, self.schedule, self.times.slices, *saved)
        return memory_table(
            self.cut.costs, self.cut.stages, self.schedule, self.times.slices, *saved, alike=self.space.alike
        )

    def fits(self) -> bool:
        """Returns whether all devices and hosts have room."""
        host = self.space.source.host
        return (host is None or self.host_peak() <= host.capacity) and max(self.peaks()) <= self.space.memory

    def host_peak(self) -> float:
        """Returns the most bytes that a rank holds on its host."""
        return float(self.bytes.host_peaks().max())

    def peaks(self) -> list[float]:
        """Returns the most bytes that each rank holds."""
        return [*map(float, self.bytes.rank_peaks())]

    @cached_property
    def bytes(self) -> OrderBytes:
        """The bytes that its actions take and leave."""
        return order_bytes(self.arrays, self.table)

    @cached_property
    def run(self) -> tuple[Floats, Floats]:
        """The end and the duration of each action, in seconds."""
        return end_times(self.arrays, self.cost)

    @property
    def seconds(self) -> float:
        """The seconds of the step, optimizer included."""
        return float(self._parts.sum(axis=0).max())

    @property
    def causes(self) -> dict[str, float]:
        """Where these go on the rank that ends last."""
        rank = int(np.argmax(self._parts.sum(axis=0)))
        end, *after = self._parts[:, rank].tolist()
        return self._causes(rank, end) | dict(zip(_AFTER, after, strict=True))

    @cached_property
    def _parts(self) -> Floats:
        """The seconds until each rank's last action ends, and those of `_AFTER`, (4, rank)."""
        _, *after = self.space.tails(self.configuration)
        last = self.run[0][self.arrays.firsts[1:] - 1]
        return np.stack([last + self._later(self.run[0]), self._reduced() - last, *after])

    def _reduced(self) -> Floats:
        """Returns when each rank's gradients are reduced: those of its stages one after the other, from the last stage
        to the first, each from the stage's last backward on (`add_reductions`). So of several stages on a rank all but
        the first may be reduced while others still compute."""
        arrays, seconds = self.arrays, self.space.gradient_seconds(self.configuration)
        done: Floats = self.run[0][arrays.firsts[1:] - 1].copy()
        if not seconds.any():
            return done
        backward = arrays.is_one_of(Op.B, Op.I, Op.W, Op.VW, Op.EW)
        last = np.zeros(len(seconds))
        np.maximum.at(last, arrays.stage[backward], self.run[0][backward])
        free = np.zeros(len(done))
        for stage in reversed(range(len(seconds))):
            rank = self.schedule.placement[stage]
            free[rank] = max(free[rank], last[stage]) + seconds[stage]
        return np.maximum(done, free)

    def _causes(self, rank: int, end: float) -> dict[str, float]:
        """Returns the causes of one rank's seconds until its last action ends."""
        arrays = self.arrays
        here = slice(*arrays.firsts[rank : rank + 2])
        op, stage, index, seconds = arrays.op[here], arrays.stage[here], arrays.slice[here], self.run[1][here]
        recomputed = float(seconds[op == OPS.index(Op.R)].sum())
        again = np.zeros_like(self.times.compute[Op.F]) + self.times.within_backwards(self.configuration.recompute)
        backward = (op == OPS.index(Op.B)) | (op == OPS.index(Op.I))
        recomputed += float(again[stage[backward], index[backward]].sum())
        exchanged = np.zeros(len(EXCHANGES))
        for forward_op, like in ((Op.F, Op.F), (Op.B, Op.I), (Op.I, Op.I)):
            chosen = op == OPS.index(forward_op)
            exchanged += self.times.exchanged[like][:, stage[chosen], index[chosen]].sum(axis=1)
        recomputed, exchanged = self.num_alike * recomputed, self.num_alike * exchanged
        work = self.num_alike * float(seconds.sum()) - recomputed
        causes = {"compute": work - float(exchanged.sum())} | dict(zip(EXCHANGES, exchanged.tolist(), strict=True))
        copied = 0.0
        if self.cost.copies:
            ends, _ = end_times(arrays, replace(self.cost, copies={}))
            copied = end - float(ends[arrays.firsts[rank + 1] - 1]) - self._later(ends)
        return causes | {"recomputation": recomputed, "offload": copied, "waiting": end - work - recomputed - copied}


# Kinds of recomputation by how little they hold, each with those that are never slower.
_SAVINGS = {
    "none": ("none",),
    "selective": ("none", "selective"),
    "full": ("none", "selective", "full"),
    "stage": ("none", "selective", "stage"),
    "stage+full": ("none", "selective", "full", "stage", "stage+full"),
}


def cheaper(configuration: Configuration) -> Iterator[Configuration]:
    """Yields the configuration with less saving of memory at the cost of time."""
    shards = {configuration.shard, "optimizer"}
    for recompute, offload, shard in product(_SAVINGS[configuration.recompute], {0.0, configuration.offload}, shards):
        other = replace(configuration, recompute=recompute, offload=offload, shard=shard)
        if other != configuration:
            yield other


def may_fit(space: PlanSpace, configuration: Configuration) -> bool:
    """Returns False only if a configuration is too large, even without messages and gradients of keys and values."""
    c, cut, shape = configuration, space.cut(configuration), space.shape(configuration)
    state = space.source.state.of_shards(c.shard)
    sizes, slices, by_layer = space.sizes(cut), np.array(space.slices(c)), c.recompute in BY_LAYER
    bound = MemoryBound(
        whole=np.outer(sizes.kept["full" if by_layer else "none"], slices / space.seq_len),
        kept=np.outer(sizes.kept[c.recompute], slices / space.seq_len),
        context=sizes.context * (not by_layer or len(slices) > 1),
        gradients=state.gradients * sizes.trained,
        offloads=bool(c.offload),
    )
    state_bytes = sizes.weights + state.optimizer * sizes.optimized(c.optimizer_shards)
    if (bound.peaks(shape) + cut.per_rank(state_bytes)).max() > space.memory:
        return False
    host = space.source.host
    return c.offload < 1 or host is None or bound.away(shape) <= host.capacity


def predict(candidate: SimulatedConfiguration) -> Prediction:
    """Returns the configuration's step, its causes, and all ranks' memory at their peaks."""
    space, c, schedule = candidate.space, candidate.configuration, candidate.schedule
    step = candidate.seconds
    ends, seconds = candidate.run
    end, work = ends.max() + candidate._later(ends), candidate.num_alike * seconds.sum()
    peak = space.source.peak_seconds(space.global_batch, space.seq_len)
    return Prediction(
        configuration=c,
        partition=partition_of(candidate.cut.bounds, space.source.units_per_layer),
        placement=candidate.cut.placement,
        slices=candidate.times.slices,
        num_microbatches=space.num_microbatches(c),
        step_seconds=step,
        tokens_per_second=space.global_batch * space.seq_len / step,
        mfu=None if peak is None else peak / (step * c.num_devices),
        idle_fraction=max(0.0, float(1 - work / (schedule.num_ranks * end))),
        seconds_by_cause=candidate.causes,
        memory=tuple(_by_kind(rank_memory) for rank_memory in candidate.bytes.memory()),
        memory_limit=space.memory,
        joint=space.found[c].plan if c.schedule == AUTO else None,
    )


def _by_kind(memory: RankMemory) -> dict[MemoryKind, float]:
    during = dict(memory.worst.during)
    if during[MemoryKind.WORKSPACE] < 0:  # activations are freed while gradients are made
        during[MemoryKind.ACTIVATIONS] += during.pop(MemoryKind.WORKSPACE)
    return {kind: size for kind, size in during.items() if size}
