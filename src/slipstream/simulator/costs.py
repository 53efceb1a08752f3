"""The costs of actions and messages: a protocol for their seconds, of unit, table and measured costs, and their bytes.

The bytes that each action of a model takes and leaves make the account of memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple, Protocol

from slipstream.errors import SlipstreamError
from slipstream.schedule import OPERATIONS, Action, Held, Op, Schedule
from slipstream.timeline import Span, Timeline

if TYPE_CHECKING:
    from slipstream.array_types import Floats


class CostModel(Protocol):
    """Times in seconds, sizes in bytes. Exact numbers (int, Fraction) stay exact through the simulator."""

    def seconds(self, action: Action) -> float:
        """Returns the seconds that a compute action (F, B, I, W, R) or REDUCE_GRAD keeps its rank busy."""

    def link_seconds(self, send: Action, source: int, destination: int) -> float:
        """Returns the seconds that a message travels between two ranks: latency + bytes / bandwidth."""

    def link_occupied(self, send: Action, source: int, destination: int) -> float:
        """Returns the seconds for which a message occupies its channel: bytes / bandwidth, or 0 if none waits."""
        return 0

    def copy_seconds(self, copy: Action) -> float:
        """Returns the seconds that an OFFLOAD or RELOAD copies; a rank's copies take turns, while the rank computes."""
        return 0

    def activation_bytes(self, forward: Action) -> float:
        """Returns the bytes that F keeps until B, or W if the backward is split, has run; 0 unless counted."""
        return 0

    def kept_bytes(self, forward: Action) -> float:
        """Returns the bytes that F keeps of them if the slice is recomputed; R brings back the rest."""
        return 0

    def own_bytes(self, action: Action) -> float:
        """Returns the bytes that an action takes or frees which aren't a slice's activations."""
        return 0


def activation_step(span: Span, schedule: Schedule, cost: CostModel) -> tuple[float, float] | None:
    """Returns when a compute action changes the activations that its rank holds, and by how many bytes, if it does."""
    forward, operation = span.action.with_op(Op.F), OPERATIONS[span.action.op]
    whole = cost.activation_bytes(forward)
    kept = cost.kept_bytes(forward) if span.action.with_op(Op.R) in schedule.positions else whole
    sizes = {Held.ALL: whole, Held.KEPT: kept, Held.REST: whole - kept, Held.OWN: cost.own_bytes(span.action)}
    if operation.takes is not None:
        return span.start, sizes[operation.takes]
    return None if operation.frees is None else (span.end, -sizes[operation.frees])


@dataclass(frozen=True)
class UnitCost(CostModel):
    """Equal costs of every stage and slice. `UnitCost(backward=1)` makes forwards and backwards equal.

    Args:
        forward: seconds of F and R.
        backward: seconds of B.
        input_gradient: seconds of I.
        weight_gradient: seconds of W.
        link: seconds that a message travels; messages don't delay each other.
        activation: bytes that F keeps for the backward.
        kept: bytes of them that recomputation keeps.
    """

    forward: float = 1
    backward: float = 2
    input_gradient: float = 1
    weight_gradient: float = 1
    link: float = 0
    activation: float = 1
    kept: float = 0

    def seconds(self, action: Action) -> float:
        given = {
            **dict.fromkeys((Op.F, Op.R, Op.V), self.forward),
            **dict.fromkeys((Op.W, Op.VW), self.weight_gradient),
            Op.B: self.backward,
            Op.I: self.input_gradient,
        }
        return given[action.op] if action.op in given else OPERATIONS[action.op].seconds

    def link_seconds(self, send: Action, source: int, destination: int) -> float:
        return self.link

    def link_occupied(self, send: Action, source: int, destination: int) -> float:
        return self.link

    def activation_bytes(self, forward: Action) -> float:
        return self.activation

    def kept_bytes(self, forward: Action) -> float:
        return self.kept


@dataclass(frozen=True)
class TableCost(CostModel):
    """Costs per stage, slice and op, the same for every microbatch, and one kind of link between all ranks.

    Args:
        times: seconds by (stage, slice, op).
        message_bytes: bytes of each slice's message, for activations and gradients alike.
        latency: seconds that every message takes.
        bandwidth: bytes per second; None for messages that take their latency only.
        activations: bytes by (stage, slice) that F keeps for the backward; 0 if missing.
        kept: bytes by (stage, slice) of them that recomputation keeps until R.
        copies: seconds by (stage, slice) that an OFFLOAD or RELOAD copies; 0 if missing.

    Raises:
        SlipstreamError: `bandwidth` is not above 0, or given without `message_bytes`; later, if an action has no time.
    """

    times: Mapping[tuple[int, int, Op], float]
    message_bytes: Sequence[float] = ()
    latency: float = 0
    bandwidth: float | None = None
    activations: Mapping[tuple[int, int], float] = field(default_factory=dict)
    kept: Mapping[tuple[int, int], float] = field(default_factory=dict)
    copies: Mapping[tuple[int, int], float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.bandwidth is not None and (self.bandwidth <= 0 or not self.message_bytes):
            raise SlipstreamError(
                f"bandwidth={self.bandwidth} with message_bytes={self.message_bytes!r}: a bandwidth must be "
                "above 0 and needs the bytes of every slice; None leaves messages their latency only."
            )

    def seconds(self, action: Action) -> float:
        key = action.stage, action.slice, action.op
        if not OPERATIONS[action.op].is_timed:
            return self.times.get(key, 0)
        if key not in self.times:
            raise SlipstreamError(f"No time for {action}: add times[{action.stage}, {action.slice}, Op.{action.op}].")
        return self.times[key]

    def link_seconds(self, send: Action, source: int, destination: int) -> float:
        return self.latency + self.link_occupied(send, source, destination)

    def link_occupied(self, send: Action, source: int, destination: int) -> float:
        return 0 if self.bandwidth is None else self.message_bytes[send.slice] / self.bandwidth

    def copy_seconds(self, copy: Action) -> float:
        return self.copies.get((copy.stage, copy.slice), 0)

    def activation_bytes(self, forward: Action) -> float:
        return self.activations.get((forward.stage, forward.slice), 0)

    def kept_bytes(self, forward: Action) -> float:
        return self.kept.get((forward.stage, forward.slice), 0)


def result_seconds(cost: CostModel, action: Action, source: int, destination: int) -> float:
    """Returns the seconds that the result of an action travels to or from the ranks' rows of a spread vocabulary.

    The last stage's F, an E and the first stage's backward send one tensor of hidden states, V two of that size, and L
    a number for each token, of which only the latency counts.
    """
    send = action.with_op(Op.SEND_F)
    occupied = cost.link_occupied(send, source, destination)
    more = {Op.V: occupied, Op.L: -occupied}.get(action.op, 0)
    return cost.link_seconds(send, source, destination) + more


class MicrobatchCost(CostModel):
    """The costs of microbatches that differ, in rows or in lengths: a cost model for each.

    Args:
        costs: of each microbatch, such as its `TableCost`.
    """

    def __init__(self, costs: Sequence[CostModel]) -> None:
        self._costs = costs

    def seconds(self, action: Action) -> float:
        return self._costs[action.microbatch].seconds(action)

    def link_seconds(self, send: Action, source: int, destination: int) -> float:
        return self._costs[send.microbatch].link_seconds(send, source, destination)

    def link_occupied(self, send: Action, source: int, destination: int) -> float:
        return self._costs[send.microbatch].link_occupied(send, source, destination)

    def activation_bytes(self, forward: Action) -> float:
        return self._costs[forward.microbatch].activation_bytes(forward)

    def kept_bytes(self, forward: Action) -> float:
        return self._costs[forward.microbatch].kept_bytes(forward)


class MeasuredCost(CostModel):
    """The times of every action and message in a measured run, so that only the waiting is computed again.

    A simulation of the same schedule with these costs is the run without the executor's time between actions. A
    message's time includes its wait behind others on the channel, so here messages don't delay each other.

    Args:
        timeline: a measured timeline.
    """

    def __init__(self, timeline: Timeline) -> None:
        self._seconds = {span.action: span.seconds for span in timeline.spans}
        self._link = {message.send.action: message.seconds for message in timeline.messages}

    def seconds(self, action: Action) -> float:
        if action not in self._seconds:
            raise SlipstreamError(f"{action} did not run in the measured timeline; simulate the one that was measured.")
        return self._seconds[action]

    def link_seconds(self, send: Action, source: int, destination: int) -> float:
        return self._link.get(send, 0.0)


class MemoryKind(StrEnum):
    """The purpose of held bytes; the comments say from when to when."""

    PARAMETERS = "parameters"  # with buffers: always
    GRADIENTS = "gradients"  # .grad: from the stage's first backward on
    OPTIMIZER = "optimizer state"  # always
    MESSAGES = "messages"  # the transport's buffers: always, after the first step; and messages that wait
    # a stage of the same rank
    ACTIVATIONS = "activations"  # saved: from F, or R, to B or I; not while they are on the host
    WEIGHT_INPUTS = "inputs of W"  # left by I: activations and output gradients that weight gradients need
    VOCABULARY = "parts of the head"  # a spread head's: the probabilities of a rank's rows, from V to VW
    CONTEXT = "context"  # K and V: from a microbatch's first F on the stage to its last B or I there, or last F
    CONTEXT_GRADIENTS = "context gradients"  # their gradients: from the microbatch's first B or I to its last
    WORKSPACE = "workspace"  # the tensors that the running action has made so far


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
        kept_gradients: per stage, the weight gradients that stay until the step's end, where others go to the host once
            a stage's are complete. None: all stay.
        vocabulary_bytes: per V and L of a spread head and slice, the buffer of its message, header included; and per E,
            where it isn't as large as a message between stages.
        host_context: the bytes on the host of actions whose keys, values and gradients lie there, by (stage, slice,
            op).
        host_optimizer: per stage, the optimizer's state, its copies and gradients on the host.
        host_shares: per slice, how many bytes offloaded activations take on the host for each of the device's, where
            these aren't equal.
        w_shares: per slice, whether W of the first stage works on the very gradient of its input that EW adds, as that
            of learned positions does, which are added to the embeddings.
        like: of each stage, the one whose footprints it has; not given: its own.
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
    kept_gradients: Mapping[int, float] | None = None
    vocabulary_bytes: Mapping[tuple[Op, int], float] = field(default_factory=dict)
    host_context: Mapping[tuple[int, int, Op], Footprint] = field(default_factory=dict)
    host_optimizer: Mapping[int, float] = field(default_factory=dict)
    host_shares: Sequence[float] = ()
    w_shares: Mapping[int, bool] = field(default_factory=dict)
    like: Sequence[int] = ()

    def footprint(self, unit: StageSlice, op: Op) -> Footprint:
        """Returns the bytes of an action; raises SlipstreamError if the table lacks them."""
        if (unit, op) not in self.footprints:
            raise SlipstreamError(f"No bytes for {op} of {unit}: add footprints[{unit}, Op.{op}].")
        return self.footprints[unit, op]

    def host_footprint(self, stage: int, index: int, op: Op) -> tuple[float, float]:
        """Returns the bytes of keys, values and gradients that an action leaves on the host, and needs there."""
        found = self.host_context.get((stage, index, op))
        return (0.0, 0.0) if found is None else (found.leaves, found.peak)

    def host_share(self, index: int) -> float:
        """Returns how many bytes a slice's offloaded activations take on the host for each of the device's."""
        return self.host_shares[index] if self.host_shares else 1.0

    def payload(self, index: int) -> float:
        """Returns the bytes of a slice's message, without its header."""
        return self.message_bytes[index] if self.message_bytes else 0

    def buffer(self, op: Op, index: int) -> float:
        """Returns the bytes of the buffer of a spread head's message of V, L or E, header included."""
        looked_up = self.payload(index) + self.header_bytes
        return self.vocabulary_bytes.get((op, index), looked_up if op is Op.E else 0)


@dataclass(frozen=True, slots=True)
class Moment:
    """One action of a rank: the most that is held `during` it, by kind, and the total that is held `after` it; and by
    kind the most that is `on_host` meanwhile."""

    action: Action
    during: Mapping[MemoryKind, float]
    after: float
    on_host: Mapping[MemoryKind, float]

    @property
    def most(self) -> float:
        return sum(self.during.values())


@dataclass(frozen=True, eq=False)
class RankMemory:
    """The bytes of one rank over a step.

    Args:
        action: returns what the rank does at each moment.
        during: the most that is held then, (kind, moment), of each of `MemoryKind`.
        after: all that is held after it.
        on_host: the most that is on the host meanwhile, (kind, moment): keys, values and their gradients are all of the
            kind CONTEXT.
    """

    action: Callable[[int], Action]
    during: Floats
    after: Floats
    on_host: Floats

    @property
    def moments(self) -> tuple[Moment, ...]:
        """All moments in order."""
        return tuple(map(self._moment, range(len(self.after))))

    @property
    def worst(self) -> Moment:
        """The moment of the peak; the first if there are several."""
        return self._moment(int(self.during.sum(axis=0).argmax()))

    def _moment(self, number: int) -> Moment:
        during, on_host = (
            dict(zip(MemoryKind, held[:, number].tolist(), strict=True)) for held in (self.during, self.on_host)
        )
        return Moment(self.action(number), during, float(self.after[number]), on_host)

    @property
    def peak(self) -> float:
        return self.worst.most

    @property
    def worst_on_host(self) -> Moment:
        """The moment of the host's peak; the first if there are several."""
        return self._moment(int(self.on_host.sum(axis=0).argmax()))

    @property
    def host_peak(self) -> float:
        """The most bytes on the host."""
        return float(self.on_host.sum(axis=0).max(initial=0.0))


MemoryTables = MemoryTable | Sequence[MemoryTable]  # one table for all microbatches, or one for each


def table_of(tables: MemoryTables, microbatch: int) -> MemoryTable:
    """Returns the table of a microbatch."""
    return tables if isinstance(tables, MemoryTable) else tables[microbatch]
