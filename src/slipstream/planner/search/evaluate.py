"""What a plan's step takes: its seconds, where they go, and every rank's memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import product
from math import inf

import numpy as np

from slipstream.array_types import Floats
from slipstream.cost import (
    ANY_HOST,
    EXCHANGES,
    NOTHING_BESIDE,
    REPLAYED,
    Costs,
    HeldBeside,
    HostMemorySpec,
    Stage,
    StageParts,
    StateBytes,
    Update,
    check_partition,
    head_part_memory,
    memory_table,
    unit_bounds,
    with_context,
    with_loss_tokens,
)
from slipstream.errors import SlipstreamError
from slipstream.options import host_share
from slipstream.planner.joint import JointProblem, spread_costs
from slipstream.planner.plan import Plan
from slipstream.planner.plan_fields import PLAN_FIELDS
from slipstream.planner.search.placed_partition import PlacedPartition
from slipstream.planner.search.savings import SAVINGS
from slipstream.planner.search.schedule_shape import ScheduleShape, cached_schedule, with_savings
from slipstream.planner.search.stage_times import Slicing, StageTimes, part_times, stage_times
from slipstream.schedule import VOCABULARY, Op, Schedule
from slipstream.schedule.action import OPS
from slipstream.schedule.action_arrays import ActionArrays
from slipstream.simulator import MemoryKind, MemoryTable, RankMemory, TableCost
from slipstream.simulator.memory_account import OrderBytes, order_bytes
from slipstream.simulator.simulation import end_times

# Groups of microbatches that are simulated of a long step: with fewer, copies to the host haven't piled up yet.
GROUPS = 12
_AFTER = "gradient reduction", "weight gathering", "optimizer"  # what follows a rank's last action
_STEADY = 1e-3  # by which share two groups of such a step may differ


def _itself(stage: Stage) -> Stage:
    return stage


@dataclass(frozen=True)
class GlobalBatch:
    """The sequences of a step, over all devices.

    Args:
        seq_len: tokens of each.
        global_batch: their number.
    """

    seq_len: int
    global_batch: int

    def check(self, plan: Plan) -> None:
        """Raises SlipstreamError where a closed plan is for other sequences."""
        rows = plan.data_parallel * plan.num_microbatches * plan.microbatch_size
        if rows != self.global_batch:
            raise SlipstreamError(
                f"global_batch={self.global_batch}, but data_parallel={plan.data_parallel} times num_microbatches="
                f"{plan.num_microbatches} times microbatch_size={plan.microbatch_size} are {rows}. Make them equal."
            )
        if sum(plan.slices) != self.seq_len:
            raise SlipstreamError(
                f"slices={[*plan.slices]} have {sum(plan.slices)} tokens, but seq_len={self.seq_len}. Make them equal."
            )


@dataclass(frozen=True)
class StepTimes:
    """The seconds of a step's actions, and of what follows them.

    Args:
        stages: of the stages, on the slices.
        reductions: of reducing each stage's gradients over the replicas.
        tails: what always follows a rank's last action, (3, ranks): see `tail_seconds`.
        head: of a spread head's actions by (stage, slice, op).
    """

    stages: StageTimes
    reductions: Floats
    tails: Floats
    head: Mapping[tuple[int, int, Op], float]


@dataclass(frozen=True)
class Evaluation:
    """A step of a plan: its seconds, where they go, and every rank's peak on the device and on the host.

    Once a pipeline is full, each group of microbatches takes as long as the one before, and nothing more is held. So a
    long step may be extrapolated: `arrays` have its first and its last groups, and `num_extrapolated` microbatches are
    between the two.

    Bytes need no speeds: `find_times` is called where seconds are asked for.

    Args:
        plan: the choices; cut, slices and order may be open in it.
        cut: the parts of each stage, the rank that holds it, and the stages' costs.
        slices: tokens of each slice.
        arrays: the actions, with R, OFFLOAD and RELOAD.
        find_times: returns the seconds of the actions, and of what follows them.
        state: bytes per parameter, where nothing is sharded.
        host: the memory of the host. None: unknown.
        alike: returns one of the stages with equal costs, so that their bytes are computed once.
        num_extrapolated: microbatches that are left out.
        beside: what a rank holds beside what the costs say.
    """

    plan: Plan
    cut: PlacedPartition
    slices: Slicing
    arrays: ActionArrays
    find_times: Callable[[], StepTimes]
    update: Update
    host: HostMemorySpec | None = None
    alike: Callable[[Stage], Stage] = _itself
    num_extrapolated: int = 0
    beside: HeldBeside = NOTHING_BESIDE

    @cached_property
    def step_times(self) -> StepTimes:
        """The seconds of the actions, and of what follows them."""
        return self.find_times()

    @property
    def times(self) -> StageTimes:
        """The seconds of the stages, on the slices."""
        return self.step_times.stages

    @property
    def num_alike(self) -> float:
        """The microbatches of the step for each of those in `arrays`."""
        return 1 + self.num_extrapolated / self.schedule.num_microbatches

    @property
    def is_steady(self) -> bool:
        """Whether the groups of an extrapolated step take equally long."""
        before, after = self._group_seconds(self.run[0])
        return abs(after - before) <= _STEADY * after

    def _group_seconds(self, ends: Floats) -> tuple[float, float]:
        """Returns from when one of the middle groups has gone back through all stages to when the next has, twice."""
        arrays = self.arrays
        back = arrays.is_one_of(Op.B, Op.I)
        done = np.zeros(self.schedule.num_microbatches)
        np.maximum.at(done, arrays.microbatch[back], ends[back])
        last = done[:: -(len(done) // GROUPS)][::-1]
        return float(last[-4] - last[-5]), float(last[-3] - last[-4])

    def _later(self, ends: Floats) -> float:
        """Returns how much later the whole step ends: no rank takes less than its work, and its copies."""
        if not self.num_extrapolated:
            return 0.0
        work, group = [self.run[1]], self.schedule.num_microbatches / GROUPS
        if self.cost.copies:
            copies = self.arrays.is_one_of(Op.OFFLOAD, Op.RELOAD)
            work.append(copies * self.arrays.each(self.cost.copy_seconds))
        busiest = max(np.bincount(self.arrays.rank, each).max() for each in work) / self.schedule.num_microbatches
        return self.num_extrapolated * max(self._group_seconds(ends)[1] / group, float(busiest))

    @cached_property
    def cost(self) -> TableCost:
        """The seconds of its actions, messages and copies."""
        c, placement = self.plan, self.cut.placement
        units, tables = list(product(range(len(placement)), range(len(self.slices)))), self.times.seconds(c.recompute)
        ran = [op for op in tables if op in self.schedule.ops]
        seconds = {(g, s, op): float(tables[op][g, s]) for op in ran for g, s in units}
        seconds |= self.step_times.head
        cost = self.cut.costs.action_costs(seconds, self.slices, c.data_parallel)
        return replace(cost, copies=self._copies) if c.offload else cost

    @property
    def _copies(self) -> dict[tuple[int, int], float]:
        """The seconds in which a slice of a stage is copied to the host, or back."""
        host = host_of_copies(self.plan, self.host)
        moved = self.arrays.is_one_of(Op.OFFLOAD)
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
        c = self.plan
        saved = c.recompute, self.update
        host = self.host or ANY_HOST
        if self.cut.spreads_head:
            whole = StageParts.of_units(self.cut.bounds)
            table = head_part_memory(self.cut.costs, whole, self.schedule, self.slices, *saved, host=host)
        else:
            table = memory_table(
                self.cut.costs, self.cut.stages, self.schedule, self.slices, *saved, alike=self.alike, host=host
            )
        return replace(table, header_bytes=self.beside.header)

    def fits(self, memory: float) -> bool:
        """Returns whether all devices, of so many bytes, and hosts have room."""
        host = self.host
        return (host is None or max(self.host_peaks()) <= host.capacity) and max(self.peaks()) <= memory

    def host_peaks(self) -> list[float]:
        """Returns the most bytes that each rank has on its host."""
        peaks: list[float] = self.bytes.host_peaks().tolist()
        return peaks

    def peaks(self) -> list[float]:
        """Returns the most bytes that each rank holds."""
        return [self.beside.added(float(peak)) for peak in self.bytes.rank_peaks()]

    def peaks_within_hosts(self) -> list[float]:
        """Returns the most bytes that each rank holds, infinite where its host has no room."""
        peaks = self.peaks()
        if self.host is None or self.host.capacity == inf:
            return peaks
        capacity = self.host.capacity
        return [inf if away > capacity else peak for peak, away in zip(peaks, self.host_peaks(), strict=True)]

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
        _, *after = self.step_times.tails
        last = self.run[0][self.arrays.firsts[1:] - 1]
        return np.stack([last + self._later(self.run[0]), self._reduced() - last, *after])

    def _reduced(self) -> Floats:
        """Returns when each rank's gradients are reduced: those of its stages one after the other, from the last stage
        to the first, each from the stage's last backward on (`add_reductions`). So of several stages on a rank all but
        the first may be reduced while others still compute."""
        arrays, seconds = self.arrays, self.step_times.reductions
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
        again = np.zeros_like(self.times.compute[Op.F]) + self.times.within_backwards(self.plan.recompute)
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

    @property
    def idle_fraction(self) -> float:
        """The share of the ranks' time between the first action and the last in which they wait."""
        ends, seconds = self.run
        end, work = ends.max() + self._later(ends), self.num_alike * seconds.sum()
        return max(0.0, float(1 - work / (self.schedule.num_ranks * end)))

    def memory(self) -> tuple[dict[MemoryKind, float], ...]:
        """Returns each rank's bytes by kind, at the moment of its peak, as the costs say them."""
        return tuple(map(_by_kind, self._rank_memory))

    def host_memory(self) -> tuple[dict[MemoryKind, float], ...]:
        """Returns by kind what each rank has on its host at the moment of the host's peak."""
        worst = (rank.worst_on_host.on_host for rank in self._rank_memory)
        return tuple({kind: size for kind, size in on_host.items() if size} for on_host in worst)

    @cached_property
    def _rank_memory(self) -> tuple[RankMemory, ...]:
        return self.bytes.memory()


def _by_kind(memory: RankMemory) -> dict[MemoryKind, float]:
    during = dict(memory.worst.during)
    if during[MemoryKind.WORKSPACE] < 0:  # activations are freed while gradients are made
        during[MemoryKind.ACTIVATIONS] += during.pop(MemoryKind.WORKSPACE)
    return {kind: size for kind, size in during.items() if size}


def update_of(plan: Plan, state: StateBytes, batch: GlobalBatch) -> Update:
    """Returns the update that ends a plan's step, by the bytes per parameter where nothing is sharded."""
    num_microbatches = batch.global_batch // (plan.data_parallel * plan.microbatch_size)
    return Update(state, plan.num_copies, plan.shard, plan.optimizer, batch.seq_len, num_microbatches)


def evaluate(
    plan: Plan,
    costs: Costs,
    batch: GlobalBatch,
    state: StateBytes,
    host: HostMemorySpec | None = None,
    beside: HeldBeside = NOTHING_BESIDE,
) -> Evaluation:
    """Returns what a step of a plan takes and holds.

    Args:
        plan: of which nothing is open.
        costs: of the model's parts on a rank, for the plan's degrees and microbatches.
        batch: the sequences of the step.
        state: bytes per parameter, where nothing is sharded.
        host: the memory of the host, where something is offloaded, or the optimizer runs.
        beside: what a rank holds beside what the costs say.

    Raises:
        SlipstreamError: with the names of the fields that are open, or where the plan contradicts itself or the batch.
    """
    plan.check_closed("evaluate")
    plan.check()
    batch.check(plan)
    _check_known(plan, costs, host)
    check_partition(plan.partition, costs.num_layers, costs.units_per_layer)
    bounds = unit_bounds(plan.partition, costs.num_layers, costs.units_per_layer)
    tiled = with_loss_tokens(costs, plan.loss_tokens)
    costs = with_context(tiled, plan.context, host_of_copies(plan, host), batch.seq_len)
    cut = PlacedPartition(costs, plan.placement, bounds, plan.vocabulary == "spread")
    update = update_of(plan, state, batch)
    return Evaluation(
        plan=plan,
        cut=cut,
        slices=plan.slices,
        arrays=_actions(plan, cut),
        find_times=partial(_step_times, plan, cut, update, host),
        update=update,
        host=host,
        beside=beside,
    )


def host_of_copies(plan: Plan, host: HostMemorySpec | None) -> HostMemorySpec | None:
    """Returns the host as each kind of a plan's copies sees it. Offloaded activations, and keys and values, may be
    copied at the same time: where there are both, each gets half of the bandwidth."""
    has_both = plan.offload and host_share(plan.context)
    return host.halved() if host is not None and has_both else host


def _check_known(plan: Plan, costs: Costs, host: HostMemorySpec | None) -> None:
    """Raises SlipstreamError for choices of a training whose costs aren't known, and for costs of other ranks."""
    known, schedule = PLAN_FIELDS["recompute"].names, plan.schedule
    if plan.recompute not in known:
        raise SlipstreamError(
            f"recompute={plan.recompute!r} can't be predicted: what it takes isn't known. Choose one of "
            f"{', '.join(known)}."
        )
    if plan.vocabulary == "spread" and isinstance(schedule, str):
        raise SlipstreamError(
            f"vocabulary='spread' can't be predicted with schedule={schedule!r}: it is planned together with the "
            "order. Give vocabulary='whole', or an order that spreads it (slipstream.schedule.spread_vocabulary)."
        )
    if isinstance(schedule, Schedule) and (schedule.is_ragged or schedule.is_lowered):
        what = "messages" if schedule.is_lowered else f"microbatches of {[*schedule.slice_counts]} slices"
        raise SlipstreamError(
            f"the schedule {schedule.name!r} has {what}. Give one of compute actions alone, with equal microbatches."
        )
    for saving in SAVINGS if host is None else ():
        if saving.copies(value := getattr(plan, saving.choice)):
            without, instead = saving.setting(value), saving.setting(saving.fastest)
            raise SlipstreamError(f"{without} without a host: give its memory as `host`, or {instead}.")
    own, theirs = plan.degrees.comparable, costs.degrees.comparable
    if (own, plan.microbatch_size) != (theirs, costs.microbatch_size):
        raise SlipstreamError(
            f"the costs are of {costs.degrees} and microbatches of {costs.microbatch_size}, but the plan has "
            f"{plan.degrees} and microbatch_size={plan.microbatch_size}. Give costs of the plan's."
        )


def _actions(plan: Plan, cut: PlacedPartition) -> ActionArrays:
    """Returns the actions of a closed plan, with R, OFFLOAD and RELOAD."""
    replays = plan.recompute in REPLAYED
    if isinstance(plan.schedule, Schedule):
        return with_savings(plan.schedule, replays, plan.offload)
    shape = ScheduleShape.of(plan, plan.num_microbatches, cut.trains, cut.costs.system)
    return cached_schedule(shape, replays, plan.offload)


def _step_times(plan: Plan, cut: PlacedPartition, update: Update, host: HostMemorySpec | None) -> StepTimes:
    """Returns the seconds of a closed plan's actions, and of what follows them."""
    recomputations = tuple(dict.fromkeys(("none", "full", plan.recompute)))
    parts = part_times(cut.costs, recomputations, (plan.slices,))
    return StepTimes(
        stages=stage_times(cut, parts, recomputations, plan.slices),
        reductions=reduction_seconds(cut, update, host),
        tails=tail_seconds(cut, update, host),
        head=head_times(plan, cut.costs),
    )


def head_times(plan: Plan, costs: Costs) -> dict[tuple[int, int, Op], float]:
    """Returns the seconds of the actions of a head that is spread over the ranks of an order, by (stage, slice, op)."""
    if plan.vocabulary != "spread":
        return {}
    assert isinstance(plan.schedule, Schedule), "a search's named schedules have a whole head"
    problem = JointProblem(
        costs=costs,
        seq_len=sum(plan.slices),
        num_ranks=plan.pipeline_parallel,
        num_microbatches=plan.num_microbatches,
        tied=plan.schedule.spreads_embedding,
    )
    times = spread_costs(problem, plan.partition, plan.slices).times
    return {key: seconds for key, seconds in times.items() if key[2] in VOCABULARY}


def reduction_seconds(cut: PlacedPartition, update: Update, host: HostMemorySpec | None) -> Floats:
    """Returns the seconds in which the gradients of each stage are reduced over the replicas, and copied to the host
    where the optimizer runs there, (stages,)."""
    seconds = cut.per_stage(partial(cut.costs.gradient_seconds, update=update))
    if update.place == "host" and host is not None:
        seconds = seconds + host.copy_seconds(update.state.gradients * _optimized(cut, update))
    return seconds


def state_on_host(cut: PlacedPartition, update: Update) -> Floats:
    """Returns the bytes that each rank's optimizer keeps on its host."""
    return cut.per_rank(update.on_host * _optimized(cut, update)) if update.on_host else np.zeros(cut.num_ranks)


def _optimized(cut: PlacedPartition, update: Update) -> Floats:
    """Returns how many parameters of each stage have their optimizer state on its rank, (stages,)."""
    return cut.per_stage(partial(cut.costs.num_optimized, update=update))


def tail_seconds(cut: PlacedPartition, update: Update, host: HostMemorySpec | None) -> Floats:
    """Returns each rank's seconds that always follow its last action, (3, ranks): of reducing the gradients of its
    first stage, of gathering weights, which come from the host where the optimizer runs there, and of the optimizer."""
    firsts = [cut.placement.index(rank) for rank in range(cut.num_ranks)]
    gathered = cut.per_rank(cut.per_stage(partial(cut.costs.gather_seconds, update=update)))
    optimizer = cut.per_rank(cut.per_stage(partial(cut.costs.optimizer_step_seconds, update=update)))
    gradients = reduction_seconds(cut, update, host)[firsts]
    if update.place == "host" and host is not None:
        optimized = cut.per_rank(_optimized(cut, update))
        gathered = gathered + host.copy_seconds(update.state.weights * optimized)
        # No host is taken to be faster than its device, as bounds of the step are without one.
        optimizer = np.maximum(optimizer, update.moved_on_host * optimized / host.memory_bandwidth)
    return np.stack([gradients, gathered, optimizer])
