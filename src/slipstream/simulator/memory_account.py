"""What a rank holds while its actions run, by kind, and the most of it at once: no times are needed, only the order."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from slipstream.errors import SlipstreamError
from slipstream.schedule import (
    BACKWARDS,
    RECEIVES,
    SENDS,
    Action,
    Channel,
    Op,
    Schedule,
    add_communication,
    channel,
    send_windows,
)


class Kind(StrEnum):
    """What bytes are held for, and from when to when."""

    PARAMETERS = "parameters"  # and buffers: always
    GRADIENTS = "gradients"  # .grad: from the stage's first backward on
    OPTIMIZER = "optimizer state"  # always
    MESSAGES = "messages"  # the transport's buffers: always, once the first step filled its pool; and what waits to be
    # sent, or for a stage of the same rank
    ACTIVATIONS = "activations"  # saved: from F, or R, to B or I; not while they are on the host
    WEIGHT_INPUTS = "inputs of W"  # what I leaves: activations and output gradients that weight gradients need
    CONTEXT = "context"  # K and V: from a microbatch's first F on the stage to its last B or I there
    CONTEXT_GRADIENTS = "context gradients"  # from its first B or I to its last
    WORKSPACE = "workspace"  # what the running action has made so far


class Unit(NamedTuple):
    """One slice on one stage, and what is done to save its memory; all microbatches are alike."""

    stage: int
    slice: int
    recomputed: bool = False
    offloaded: bool = False

    @classmethod
    def of(cls, action: Action, schedule: Schedule) -> Unit:
        ops, positions = schedule.ops, schedule.positions
        recomputed = Op.R in ops and action.with_op(Op.R) in positions
        offloaded = Op.OFFLOAD in ops and action.with_op(Op.OFFLOAD) in positions
        return cls(action.stage, action.slice, recomputed, offloaded)


@dataclass(frozen=True, slots=True)
class Footprint:
    """One action's bytes: what it `leaves` (below 0: frees) for the backward, and its `peak` over what was there.

    What it leaves does not include messages, context, weight gradients, which have lives of their own; its peak
    includes everything that it makes, those too.
    """

    leaves: float
    peak: float


@dataclass(frozen=True)
class MemoryTable:
    """Bytes of the parts of a model, as `slipstream.pipeline.memory.rehearsal` measures them.

    Args:
        footprints: of the compute actions, OFFLOAD and RELOAD of every unit that runs.
        first: the peak of a stage's first backward of its kind, which makes the weight gradients too.
        context: per stage, K and V of one microbatch.
        context_gradients: per stage, their gradients.
        message_bytes: per slice, what travels between two stages.
        header_bytes: what a message has besides.
        parameters: per stage.
        gradients: per stage and B, I or W, the weight gradients that it makes.
        optimizer: per stage.
    """

    footprints: Mapping[tuple[Unit, Op], Footprint]
    first: Mapping[tuple[Unit, Op], float] = field(default_factory=dict)
    context: Mapping[int, float] = field(default_factory=dict)
    context_gradients: Mapping[int, float] = field(default_factory=dict)
    message_bytes: Sequence[float] = ()
    header_bytes: float = 0
    parameters: Mapping[int, float] = field(default_factory=dict)
    gradients: Mapping[tuple[int, Op], float] = field(default_factory=dict)
    optimizer: Mapping[int, float] = field(default_factory=dict)

    def footprint(self, unit: Unit, op: Op) -> Footprint:
        try:
            return self.footprints[unit, op]
        except KeyError:
            raise SlipstreamError(f"No bytes for {op} of {unit}: add footprints[{unit}, Op.{op}].") from None

    def payload(self, index: int) -> float:
        return self.message_bytes[index] if self.message_bytes else 0


@dataclass(frozen=True, slots=True)
class Moment:
    """One action of a rank: what is held `during` it, at most, by kind, and the sum of what it leaves held `after`."""

    action: Action
    during: Mapping[Kind, float]
    after: float

    @property
    def most(self) -> float:
        return sum(self.during.values())


@dataclass(frozen=True)
class RankMemory:
    """One rank's bytes over a step."""

    moments: tuple[Moment, ...]

    @property
    def worst(self) -> Moment:
        """The moment of the peak: the first, where there are several."""
        return max(self.moments, key=lambda moment: moment.most)

    @property
    def peak(self) -> float:
        return self.worst.most


def memory_of(schedule: Schedule, table: MemoryTable) -> tuple[RankMemory, ...]:
    """What every rank holds in a training step after the first, whose gradients start from none.

    A schedule without communication is given the executor's. Raises SlipstreamError where the table lacks a unit.
    """
    if not schedule.is_lowered:
        schedule = add_communication(schedule)
    windows = send_windows(schedule)
    return tuple(rank_memory(schedule, rank, table, windows) for rank in range(schedule.num_ranks))


def rank_memory(
    schedule: Schedule, rank: int, table: MemoryTable, windows: Mapping[Channel, int] | None = None
) -> RankMemory:
    """One rank of a lowered schedule; the table needs to know that rank's stages only. `windows`: if known already."""
    account = _Account(schedule, rank, table, windows)
    row = schedule.actions[rank]
    return RankMemory(tuple(account.run(action) for action in row if action.op not in RECEIVES | {Op.REDUCE_GRAD}))


class _Account:
    """What one rank holds, action by action."""

    def __init__(
        self, schedule: Schedule, rank: int, table: MemoryTable, windows: Mapping[Channel, int] | None
    ) -> None:
        self.schedule, self.rank, self.table = schedule, rank, table
        stages = [stage for stage, there in enumerate(schedule.placement) if there == rank]
        self.held: dict[Kind, float] = dict.fromkeys(Kind, 0)
        self.held[Kind.PARAMETERS] = sum(table.parameters.get(stage, 0) for stage in stages)
        self.held[Kind.OPTIMIZER] = sum(table.optimizer.get(stage, 0) for stage in stages)
        self.held[Kind.MESSAGES] = pool_bytes(schedule, rank, table, windows)
        self.ran: set[tuple[int, Op]] = set()  # backwards of which a stage has run one
        self.forwards: set[tuple[int, int]] = set()  # (stage, microbatch) that has context
        self.backwards: Counter[tuple[int, int]] = Counter()
        self.saved: defaultdict[Unit, dict[int, float]] = defaultdict(dict)  # of each microbatch, after I

    def run(self, action: Action) -> Moment:
        if action.op in SENDS:
            during = dict(self.held)
            self.held[Kind.MESSAGES] -= self.table.payload(action.slice)
            return Moment(action, during, sum(self.held.values()))
        unit = Unit.of(action, self.schedule)
        footprint = self.table.footprint(unit, action.op)
        kind = Kind.ACTIVATIONS if action.op is Op.RELOAD else Kind.WORKSPACE  # what comes back is what it was
        during = self.held | {kind: self.held[kind] + self._peak(action, unit, footprint)}
        self._leave(action, unit, footprint.leaves)
        self._count_context(action)
        self._hand_over(action, unit)
        return Moment(action, during, sum(self.held.values()))

    def _peak(self, action: Action, unit: Unit, footprint: Footprint) -> float:
        """A stage's first B, I or W makes gradients that later ones add to."""
        key = action.stage, action.op
        if action.op not in BACKWARDS or key in self.ran:
            return footprint.peak
        self.ran.add(key)
        self.held[Kind.GRADIENTS] += (made := self.table.gradients.get(key, 0))
        return self.table.first.get((unit, action.op), footprint.peak + made) - made

    def _leave(self, action: Action, unit: Unit, leaves: float) -> None:
        """What stays from F to I is activations; what I leaves of it, W's inputs."""
        saved = self.saved[unit]
        before = saved.get(action.microbatch, 0)
        saved[action.microbatch] = before + leaves
        if action.op is Op.I:
            self.held[Kind.ACTIVATIONS] -= before
            self.held[Kind.WEIGHT_INPUTS] += before + leaves
        else:
            self.held[Kind.WEIGHT_INPUTS if action.op is Op.W else Kind.ACTIVATIONS] += leaves

    def _count_context(self, action: Action) -> None:
        key = stage, _ = action.stage, action.microbatch
        context, gradients = self.table.context.get(stage, 0), self.table.context_gradients.get(stage, 0)
        if action.op is Op.F and key not in self.forwards:
            self.forwards.add(key)
            self.held[Kind.CONTEXT] += context
        elif action.op in (Op.B, Op.I):
            self.backwards[key] += 1
            if self.backwards[key] == 1:
                self.held[Kind.CONTEXT_GRADIENTS] += gradients
            if self.backwards[key] == self.schedule.num_slices:
                self.held[Kind.CONTEXT] -= context
                self.held[Kind.CONTEXT_GRADIENTS] -= gradients

    def _hand_over(self, action: Action, unit: Unit) -> None:
        """A result stays until it is sent, or where the next stage is here, until that no longer needs it.

        Hidden states are the next stage's first activation. A gradient belongs to the factors of W.
        """
        payload = self.table.payload(action.slice)
        stage, last = action.stage, self.schedule.num_stages - 1
        made = (action.op is Op.F and stage < last) + (action.op in (Op.B, Op.I) and stage > 0)
        taken = 0
        if stage > 0 and self._is_here(stage - 1):
            taken += action.op is Op.F if unit.offloaded else action.op in (Op.B, Op.I)
        if stage < last and self._is_here(stage + 1):
            taken += action.op in (Op.B, Op.W)
        self.held[Kind.MESSAGES] += (made - taken) * payload

    def _is_here(self, stage: int) -> bool:
        return self.schedule.placement[stage] == self.rank


def pool_bytes(
    schedule: Schedule, rank: int, table: MemoryTable, windows: Mapping[Channel, int] | None = None
) -> float:
    """The transport's buffers on a rank: of each size as many as are ever in use at once.

    One for every receive from when it is posted until the backward of its slice is done (W's where it is split, since
    a forward's input and an output's gradient belong to a weight gradient's factors; F's where the input is moved to
    the host), and one for every send until as many later ones have gone out on its channel as its window is wide.
    """
    pool, windows = _Pool(), windows or send_windows(schedule)
    sent: defaultdict[Channel, deque[float]] = defaultdict(deque)
    posted: set[Action] = set()
    for action in schedule.actions[rank]:
        size = table.payload(action.slice) + table.header_bytes
        if action.op in SENDS:
            line = sent[channel(action, schedule)]
            if len(line) >= windows[channel(action, schedule)]:
                pool.give_back(line.popleft())
            line.append(size)
            pool.take(size)
        elif action.op in RECEIVES:
            posted.add(action)
            pool.take(size)
        else:
            for receive in _released(action, schedule) & posted:
                posted.remove(receive)
                pool.give_back(size)
    return pool.num_bytes


def _released(action: Action, schedule: Schedule) -> set[Action]:
    """The receives whose buffers are free after an action."""
    forward, backward = action.with_op(Op.RECV_F), action.with_op(Op.RECV_B)
    offloaded = action.with_op(Op.OFFLOAD) in schedule.positions
    if action.op is Op.F and offloaded:
        return {forward}
    return {forward, backward} if action.op in (Op.B, Op.W) else set()


class _Pool:
    """Buffers by size, never given up."""

    def __init__(self) -> None:
        self._used: Counter[float] = Counter()
        self._most: Counter[float] = Counter()

    def take(self, size: float) -> None:
        self._used[size] += 1
        self._most[size] = max(self._most[size], self._used[size])

    def give_back(self, size: float) -> None:
        self._used[size] -= 1

    @property
    def num_bytes(self) -> float:
        return sum(size * number for size, number in self._most.items())
