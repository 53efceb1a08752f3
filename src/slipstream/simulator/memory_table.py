"""The bytes that each action of a model takes and leaves, from which the account of memory is made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from slipstream.errors import SlipstreamError
from slipstream.schedule import Action, Op, Schedule


class MemoryKind(StrEnum):
    """The purpose of held bytes; the comments say from when to when."""

    PARAMETERS = "parameters"  # and buffers: always
    GRADIENTS = "gradients"  # .grad: from the stage's first backward on
    OPTIMIZER = "optimizer state"  # always
    MESSAGES = "messages"  # the transport's buffers: always, after the first step; and messages that wait
    # a stage of the same rank
    ACTIVATIONS = "activations"  # saved: from F, or R, to B or I; not while they are on the host
    WEIGHT_INPUTS = "inputs of W"  # left by I: activations and output gradients that weight gradients need
    VOCABULARY = "parts of the head"  # of a spread one: the probabilities of a rank's rows, from V to VW
    CONTEXT = "context"  # K and V: from a microbatch's first F on the stage to its last B or I there, or last F
    CONTEXT_GRADIENTS = "context gradients"  # from its first B or I to its last
    WORKSPACE = "workspace"  # tensors that the running action has made so far


class StageSlice(NamedTuple):
    """One slice on one stage, and how its memory is saved; microbatches of one table are alike."""

    stage: int
    slice: int
    recomputed: bool = False
    offloaded: bool = False

    @classmethod
    def of(cls, action: Action, schedule: Schedule) -> StageSlice:
        """Returns the unit that an action of the schedule belongs to."""
        ops, positions = schedule.ops, schedule.positions
        recomputed = Op.R in ops and action.with_op(Op.R) in positions
        offloaded = Op.OFFLOAD in ops and action.with_op(Op.OFFLOAD) in positions
        return cls(action.stage, action.slice, recomputed, offloaded)


@dataclass(frozen=True, slots=True)
class Footprint:
    """One action's bytes: what it `leaves` for the backward (below 0: frees), and its `peak` over those in use before.

    The bytes it leaves don't include messages, context and weight gradients, which are counted apart; its peak includes
    everything that it makes, those too.
    """

    leaves: float
    peak: float


@dataclass(frozen=True)
class MemoryTable:
    """The bytes of a model's actions and parts, as `slipstream.pipeline.memory.rehearsal` measures them.

    Its microbatches are alike.

    Args:
        footprints: of the compute actions, OFFLOAD and RELOAD of every unit that runs.
        first: the peak of a stage's first backward of its kind, which makes the weight gradients too.
        context: per stage, K and V of one microbatch.
        context_gradients: per stage, their gradients.
        message_bytes: per slice, of the message between two stages.
        header_bytes: the header of each message.
        parameters: per stage.
        gradients: per stage and B, I, W or VW, the weight gradients that it makes.
        optimizer: per stage.
        vocabulary_bytes: per V and L of a spread head and slice, the buffer of its message, header included; and per E,
            where it isn't as large as a message between stages.
        w_shares: per slice, whether W of the first stage works on the very gradient of its input that EW adds, as that
            of learned positions does, which are added to the embeddings.
    """

    footprints: Mapping[tuple[StageSlice, Op], Footprint]
    first: Mapping[tuple[StageSlice, Op], float] = field(default_factory=dict)
    context: Mapping[int, float] = field(default_factory=dict)
    context_gradients: Mapping[int, float] = field(default_factory=dict)
    message_bytes: Sequence[float] = ()
    header_bytes: float = 0
    parameters: Mapping[int, float] = field(default_factory=dict)
    gradients: Mapping[tuple[int, Op], float] = field(default_factory=dict)
    optimizer: Mapping[int, float] = field(default_factory=dict)
    vocabulary_bytes: Mapping[tuple[Op, int], float] = field(default_factory=dict)
    w_shares: Mapping[int, bool] = field(default_factory=dict)

    def footprint(self, unit: StageSlice, op: Op) -> Footprint:
        """Returns the bytes of an action; raises SlipstreamError if the table lacks them."""
        if (unit, op) not in self.footprints:
            raise SlipstreamError(f"No bytes for {op} of {unit}: add footprints[{unit}, Op.{op}].")
        return self.footprints[unit, op]

    def payload(self, index: int) -> float:
        """Returns the bytes of a slice's message, without its header."""
        return self.message_bytes[index] if self.message_bytes else 0

    def buffer(self, op: Op, index: int) -> float:
        """Returns the bytes of the buffer of a spread head's message of V, L or E, header included."""
        looked_up = self.payload(index) + self.header_bytes
        return self.vocabulary_bytes.get((op, index), looked_up if op is Op.E else 0)


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


MemoryTables = MemoryTable | Sequence[MemoryTable]  # of all microbatches alike, or of each


def table_of(tables: MemoryTables, microbatch: int) -> MemoryTable:
    """Returns the table of a microbatch."""
    return tables if isinstance(tables, MemoryTable) else tables[microbatch]
