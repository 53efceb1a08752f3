"""The memory that a rank holds while its actions run, by kind, and its peak: a matter of their order, not of times."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from slipstream.schedule import (
    BACKWARDS,
    RECEIVES,
    SENDS,
    VOCABULARY,
    Action,
    Op,
    Schedule,
    add_communication,
    input_gradient,
    send_windows,
)
from slipstream.simulator.buffers import Windows, pool_bytes
from slipstream.simulator.memory_table import Footprint, MemoryKind, MemoryTables, StageSlice, table_of


@dataclass(frozen=True, slots=True)
class Moment:
    """One action of a rank: the most that is held `during` it, by kind, and the total that is held `after` it."""

    action: Action
    during: Mapping[MemoryKind, float]
    after: float

    @property
    def most(self) -> float:
        return sum(self.during.values())


@dataclass(frozen=True)
class RankMemory:
    """The bytes of one rank over a step."""

    moments: tuple[Moment, ...]

    @property
    def worst(self) -> Moment:
        """The moment of the peak; the first if there are several."""
        return max(self.moments, key=lambda moment: moment.most)

    @property
    def peak(self) -> float:
        return self.worst.most


def memory_of(schedule: Schedule, tables: MemoryTables, frees_late: bool = False) -> tuple[RankMemory, ...]:
    """Returns what every rank holds in a training step after the first, whose gradients start from none.

    A schedule without communication gets the executor's. Where microbatches differ, give a table for each. With
    `frees_late`, what an OFFLOAD copies stays until the copy had the time of an action, as in a step of CUDA graphs.

    Raises:
        SlipstreamError: the table lacks a unit.
    """
    if not schedule.is_lowered:
        schedule = add_communication(schedule)
    windows = send_windows(schedule)
    return tuple(rank_memory(schedule, rank, tables, windows, frees_late) for rank in range(schedule.num_ranks))


def rank_memory(
    schedule: Schedule, rank: int, tables: MemoryTables, windows: Windows | None = None, frees_late: bool = False
) -> RankMemory:
    """Returns what one rank of a lowered schedule holds.

    Args:
        schedule: with sends and receives.
        rank: the pipeline rank.
        tables: bytes of the actions of that rank's stages, of all microbatches or of each.
        windows: the `send_windows` of the schedule, if they are known already.
        frees_late: see `memory_of`.
    """
    account = _Account(schedule, rank, tables, windows)
    row = [*_freeing_late(schedule.actions[rank])] if frees_late else schedule.actions[rank]
    return RankMemory(tuple(account.run(action) for action in row if action.op not in RECEIVES | {Op.REDUCE_GRAD}))


def _freeing_late(row: Sequence[Action]) -> Iterator[Action]:
    """Yields the actions of a row, each OFFLOAD where its memory is free: before the second action that computes."""
    started, copied = list[Action](), list[Action]()
    for action in row:
        if action.op is Op.OFFLOAD:
            started.append(action)
            continue
        if action.op in BACKWARDS | {Op.F, Op.R}:
            yield from copied
            started, copied = [], started
        yield action
    yield from (*copied, *started)


def ends_context(forward: Action, schedule: Schedule) -> bool:
    """Returns whether keys and values of a microbatch are freed after a forward: the last, where no backward comes."""
    return forward.stage < schedule.num_frozen_stages and forward.slice == schedule.slice_counts[forward.microbatch] - 1


class _Account:
    """Counts what one rank holds, action by action."""

    def __init__(self, schedule: Schedule, rank: int, tables: MemoryTables, windows: Windows | None) -> None:
        self.schedule, self.tables = schedule, tables
        self.table = table_of(tables, 0)  # of the action that runs
        self.stages = [stage for stage, there in enumerate(schedule.placement) if there == rank]
        self.held: dict[MemoryKind, float] = dict.fromkeys(MemoryKind, 0)
        self.held[MemoryKind.PARAMETERS] = sum(self.table.parameters.get(stage, 0) for stage in self.stages)
        self.held[MemoryKind.OPTIMIZER] = sum(self.table.optimizer.get(stage, 0) for stage in self.stages)
        self.held[MemoryKind.MESSAGES] = pool_bytes(schedule, rank, tables, windows)
        self.ran: set[tuple[int, Op]] = set()  # backwards of which a stage has run one
        self.made: defaultdict[int, float] = defaultdict(float)  # weight gradients of a stage
        self.left: dict[tuple[int, int], int] = {}  # backwards to come, of a stage and microbatch that has context
        self.saved: defaultdict[tuple[StageSlice, int], float] = defaultdict(float)  # and microbatch, after I

    def run(self, action: Action) -> Moment:
        self.table = table_of(self.tables, action.microbatch)
        if action.op in SENDS:
            during = dict(self.held)
            self.held[MemoryKind.MESSAGES] -= self.table.payload(action.slice)
            return Moment(action, during, sum(self.held.values()))
        unit = StageSlice.of(action, self.schedule)
        footprint = self.table.footprint(unit, action.op)
        # What RELOAD brings back is activations, as before.
        kind = MemoryKind.ACTIVATIONS if action.op is Op.RELOAD else MemoryKind.WORKSPACE
        during = self.held | {kind: self.held[kind] + self._peak(action, unit, footprint)}
        self._leave(action, unit, footprint.leaves)
        self._count_context(action)
        self._hand_over(action, unit)
        if self.schedule.spreads_vocabulary and action.stage == self.schedule.num_stages - 1:
            self._share_output(action)
        if self.schedule.spreads_embedding and 0 in self.stages:
            self._pass_lookup(action)
        return Moment(action, during, sum(self.held.values()))

    def _peak(self, action: Action, unit: StageSlice, footprint: Footprint) -> float:
        """Returns the peak over what is held; a stage's first B, I, W or VW makes gradients that later ones add to.

        B makes all that I and W make. VW and EW make the same, whichever comes first.
        """
        key = stage, op = action.stage, Op.VW if action.op is Op.EW else action.op
        if op not in BACKWARDS | {Op.VW} or key in self.ran or (op is not Op.VW and (stage, Op.B) in self.ran):
            return footprint.peak
        self.ran.add(key)
        made = self.table.gradients.get(key, 0)
        self.held[MemoryKind.GRADIENTS] += (more := made - self.made[stage] if op is Op.B else made)
        self.made[stage] += 0 if op is Op.VW else more
        return self.table.first.get((unit, action.op), footprint.peak + made) - made

    def _leave(self, action: Action, unit: StageSlice, leaves: float) -> None:
        """Counts what an action leaves: from F to I as activations, from I to W as the inputs of W.

        Of what L leaves, the last stage's backward frees the gradient that it starts from.
        """
        if action.op in VOCABULARY:
            gradient = self.table.payload(action.slice) if action.op is Op.L else 0
            self.held[MemoryKind.VOCABULARY] += leaves - gradient
            leaves = gradient
        before = self.saved[unit, action.microbatch]
        self.saved[unit, action.microbatch] += leaves
        if action.op is Op.I:
            self.held[MemoryKind.ACTIVATIONS] -= before
            self.held[MemoryKind.WEIGHT_INPUTS] += before + leaves
        else:
            self.held[MemoryKind.WEIGHT_INPUTS if action.op is Op.W else MemoryKind.ACTIVATIONS] += leaves

    def _share_output(self, action: Action) -> None:
        """Keeps the last stage's output, which goes with VW, until the backward of its slice where that comes later."""
        if action.op not in (Op.B, Op.I, Op.VW):
            return
        rows, backward = action.with_op(Op.VW), input_gradient(*action[1:], self.schedule)
        if self.schedule.positions[rows] < self.schedule.positions[backward]:
            payload = self.table.payload(action.slice)
            self.held[MemoryKind.ACTIVATIONS] += payload if action == rows else -payload

    def _pass_lookup(self, action: Action) -> None:
        """Counts what this rank's rows look up until the first stage's forward takes it, and the gradient of that
        stage's input, which goes with W where that works on it, until they have added it where that is later."""
        rows = self.stages[-1], *action[2:]
        gradient = input_gradient(0, *action[2:], self.schedule)
        if gradient.op is Op.I and self.table.w_shares.get(action.slice, False):
            gradient = gradient.with_op(Op.W)
        size = self.table.buffer(Op.E, action.slice) - self.table.header_bytes
        for made, taken in ((Action(Op.E, *rows), gradient.with_op(Op.F)), (gradient, Action(Op.EW, *rows))):
            if action in (made, taken) and self.schedule.positions[made] < self.schedule.positions[taken]:
                self.held[MemoryKind.MESSAGES] += size if action == made else -size

    def _count_context(self, action: Action) -> None:
        key = stage, microbatch = action.stage, action.microbatch
        num_slices = self.schedule.slice_counts[microbatch]
        context, gradients = self.table.context.get(stage, 0), self.table.context_gradients.get(stage, 0)
        if action.op is Op.F:
            if key not in self.left:
                self.left[key] = num_slices
                self.held[MemoryKind.CONTEXT] += context
            self.held[MemoryKind.CONTEXT] -= context if ends_context(action, self.schedule) else 0
        elif action.op in (Op.B, Op.I):
            self.held[MemoryKind.CONTEXT_GRADIENTS] += gradients if self.left[key] == num_slices else 0
            self.left[key] -= 1
            if not self.left[key]:
                self.held[MemoryKind.CONTEXT] -= context
                self.held[MemoryKind.CONTEXT_GRADIENTS] -= gradients

    def _hand_over(self, action: Action, unit: StageSlice) -> None:
        """Counts a result until it is sent or, if the next stage is on this rank, until that no longer needs it.

        Hidden states are the next stage's first activation, unless that is frozen. A gradient belongs to the factors of
        W.
        """
        payload = self.table.payload(action.slice)
        stage, last, frozen = action.stage, self.schedule.num_stages - 1, self.schedule.num_frozen_stages
        made = (action.op is Op.F and stage < last) + (action.op in (Op.B, Op.I) and stage > frozen)
        taken = 0
        if stage - 1 in self.stages:
            taken += action.op is Op.F if unit.offloaded or stage < frozen else action.op in (Op.B, Op.I)
        if stage + 1 in self.stages:
            taken += action.op in (Op.B, Op.W)
        self.held[MemoryKind.MESSAGES] += (made - taken) * payload
