"""One simulated configuration: its step, where the step's time goes, and what every rank's memory holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import product

import numpy as np

from slipstream.array_types import Floats
from slipstream.planner.plans import Configuration, Prediction
from slipstream.planner.search.action_memory import memory_table
from slipstream.planner.search.memory_bound import MemoryBound, least_messages
from slipstream.planner.search.plan_space import PlanSpace
from slipstream.planner.search.schedule_cache import CachedSchedule, cached_schedule
from slipstream.planner.search.step_bounds import PlacedPartition, StageTimes
from slipstream.schedule import Op, Schedule
from slipstream.simulator import CostModel, MemoryKind, MemoryTable, RankMemory, StageSlice, memory_of, quick_peaks
from slipstream.simulator.compiled_simulation import OPS


@dataclass(frozen=True)
class SimulatedConfiguration:
    """A configuration with its partition, slices and schedule, and what its actions cost."""

    space: PlanSpace
    configuration: Configuration
    cut: PlacedPartition
    times: StageTimes
    cached: CachedSchedule
    cost: CostModel
    table: MemoryTable

    @classmethod
    def of(cls, space: PlanSpace, configuration: Configuration) -> SimulatedConfiguration:
        c = configuration
        cut = space.cut(c.tensor_parallel, c.microbatch_size, c.pipeline_parallel, c.stages_per_rank, c.schedule)
        times = space.times(c.tensor_parallel, c.microbatch_size, cut, c.num_slices)
        num_microbatches = space.num_microbatches(c.data_parallel, c.microbatch_size)
        shape = c.schedule, c.pipeline_parallel, num_microbatches, c.num_slices, c.stages_per_rank
        found = cached_schedule(*shape, c.recompute != "none", c.offload)
        costs = space.costs(c.tensor_parallel, c.microbatch_size)
        cost = costs.action_costs(_seconds(times, c.recompute), times.slices, c.data_parallel)
        return cls(space, c, cut, times, found, cost, memory_table(space, c, cut, times, found.schedule))

    @property
    def schedule(self) -> Schedule:
        """Compute actions, R, OFFLOAD and RELOAD, with backwards split as in a Pipeline."""
        return self.cached.schedule

    def fits(self) -> bool:
        """Returns whether all devices and hosts have room, with the fewest message buffers that may be needed."""
        host = self.space.source.host
        most_on_host = max(on_host for _, on_host in self._most_bytes)
        return max(self.peaks()) <= self.space.memory and (host is None or most_on_host <= host.capacity)

    def peaks(self) -> list[float]:
        """Returns a lower bound of each rank's bytes; only the lowered schedule says how many buffers messages need."""
        messages = least_messages(self.cached.arrays, self.table.message_bytes)
        return [peak + buffers for (peak, _), buffers in zip(self._most_bytes, messages, strict=True)]

    @cached_property
    def _most_bytes(self) -> list[tuple[float, float]]:
        return [quick_peaks(row, self.schedule, self.table) for row in self.schedule.actions]

    @cached_property
    def run(self) -> tuple[Floats, Floats]:
        """The end and the duration of each action, in seconds."""
        return self.cached.arrays.ends(self.cost)

    def step_seconds(self) -> float:
        """Returns the seconds of the step, optimizer included."""
        return _step(self)[0]


def may_fit(space: PlanSpace, configuration: Configuration) -> bool:
    """Returns False only if a configuration is too large, even without messages and gradients of keys and values."""
    c, state = configuration, space.source.state
    cut = space.cut(c.tensor_parallel, c.microbatch_size, c.pipeline_parallel, c.stages_per_rank, c.schedule)
    slices = np.array(space.slices(c.tensor_parallel, c.microbatch_size, c.num_slices)) / space.seq_len
    sizes = space.sizes(c.tensor_parallel, c.microbatch_size, cut)
    per_parameter = state.weights + state.optimizer / c.optimizer_shards
    bound = MemoryBound(
        whole=np.outer(sizes.of_stages["none"], slices),
        kept=np.outer(sizes.of_stages[c.recompute], slices),
        context=sizes.context_of_stages,
        gradients=state.gradients * sizes.parameters_of_stages,
        offloads=bool(c.offload),
    )
    counts = (space.num_microbatches(c.data_parallel, c.microbatch_size), c.num_slices)
    peaks = bound.peaks(c.schedule, cut, *counts)
    if (peaks + per_parameter * sizes.parameters).max() > space.memory:
        return False
    host = space.source.host
    return c.offload < 1 or host is None or bound.away(c.schedule, cut, *counts) <= host.capacity


def _seconds(times: StageTimes, recompute: str) -> dict[tuple[int, int, Op], float]:
    tables = {Op.F: times.forward, Op.B: times.backward, Op.I: times.input_gradient, Op.W: times.weight_gradient}
    tables[Op.R] = times.replay[recompute]
    stages, slices = times.forward.shape
    return {(g, s, op): float(t[g, s]) for op, t in tables.items() for g, s in product(range(stages), range(slices))}


def predict(candidate: SimulatedConfiguration) -> Prediction:
    """Returns the configuration's step, its causes, and what all ranks hold at their peaks."""
    space, c, schedule = candidate.space, candidate.configuration, candidate.schedule
    step, causes = _step(candidate)
    ends, seconds = candidate.run
    num_devices = c.tensor_parallel * c.pipeline_parallel * c.data_parallel
    peak = space.source.peak_seconds(space.global_batch, space.seq_len)
    return Prediction(
        configuration=c,
        partition=candidate.cut.partition,
        placement=candidate.cut.placement,
        slices=candidate.times.slices,
        num_microbatches=schedule.num_microbatches,
        step_seconds=step,
        tokens_per_second=space.global_batch * space.seq_len / step,
        mfu=None if peak is None else peak / (step * num_devices),
        idle_fraction=float(1 - seconds.sum() / (schedule.num_ranks * ends.max())),
        seconds_by_cause=causes,
        memory=tuple(_by_kind(each) for each in memory_of(schedule, candidate.table)),
        memory_limit=space.memory,
    )


def _step(candidate: SimulatedConfiguration) -> tuple[float, dict[str, float]]:
    """The seconds of the step, optimizer included, and where they go on the rank that ends last."""
    c = candidate.configuration
    tails = candidate.space.tails(
        c.tensor_parallel, c.microbatch_size, candidate.cut, c.data_parallel, c.optimizer_shards
    )
    ends = candidate.run[0][candidate.cached.arrays.firsts[1:] - 1]
    rank = int(np.argmax(ends + tails.total))
    causes = _causes(candidate, rank, float(ends[rank]))
    causes |= {"gradient reduction": float(tails.gradients[rank]), "optimizer": float(tails.optimizer[rank])}
    return _with_host(candidate, float((ends + tails.total)[rank]), causes)


def _by_kind(memory: RankMemory) -> dict[MemoryKind, float]:
    during = dict(memory.worst.during)
    if during[MemoryKind.WORKSPACE] < 0:  # activations are freed while gradients are made
        during[MemoryKind.ACTIVATIONS] += during.pop(MemoryKind.WORKSPACE)
    return {kind: size for kind, size in during.items() if size}


def _causes(candidate: SimulatedConfiguration, rank: int, end: float) -> dict[str, float]:
    """The causes of one rank's seconds until its last action ends."""
    arrays = candidate.cached.arrays
    here = slice(*arrays.firsts[rank : rank + 2])
    op, stage, index, seconds = arrays.op[here], arrays.stage[here], arrays.slice[here], candidate.run[1][here]
    chosen = {each: op == OPS.index(each) for each in (Op.F, Op.B, Op.I, Op.R)}
    recomputed = float(seconds[chosen[Op.R]].sum())
    reduced = 0.0
    for each, like in ((Op.F, Op.F), (Op.B, Op.I), (Op.I, Op.I)):
        reduced += float(candidate.times.reduce[like][stage[chosen[each]], index[chosen[each]]].sum())
    work = float(seconds.sum()) - recomputed
    found = {"compute": work - reduced, "tensor parallel": reduced, "recomputation": recomputed}
    return found | {"waiting": end - work - recomputed}


def _with_host(
    candidate: SimulatedConfiguration, step: float, causes: Mapping[str, float]
) -> tuple[float, dict[str, float]]:
    """The step takes at least as long as the copies to the host; those back run at the same time."""
    host, c = candidate.space.source.host, candidate.configuration
    if not c.offload or host is None:
        return step, dict(causes)
    sent = np.zeros(candidate.schedule.num_ranks)
    for action in candidate.schedule.positions:
        if action.op is Op.OFFLOAD:
            unit = StageSlice.of(action, candidate.schedule)
            left = -candidate.table.footprint(unit, Op.OFFLOAD).leaves
            sent[candidate.schedule.placement[action.stage]] += left
    longest = float(sent.max()) / host.bandwidth
    return max(step, longest), {**causes, "offload": max(0.0, longest - step)}
