"""Messages beside those of neighbouring stages: skip connections, and the rows of a spread vocabulary.

They are no actions of the schedule. Each kind, between two stages, has a communicator of its own, on which a send is
waited for only when it is known to be received, or the step ends.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property

from slipstream.comm.message import SkipSend
from slipstream.comm.transport import Transport
from slipstream.model import Tensors, TensorSpec
from slipstream.schedule import BACKWARDS, Action, Channel, Direction, Op, Schedule, gradients_before, input_gradient

# Of a stage's messages, by (stage, microbatch, slice)
Specs = Callable[[Op, tuple[int, int, int]], Sequence[TensorSpec]]
VocabularySpecs = Callable[[SkipSend], Sequence[TensorSpec]]


class SideMessages(ABC):
    """One rank's end of these messages in one step.

    An awaited message was sent at the end of an action that the schedule puts before: so no ranks wait for each other
    in a circle. Receives are posted in the order in which the other end's schedule sends, one ahead of what is needed.
    """

    def __init__(self, rank: int, schedule: Schedule, transport: Transport) -> None:
        self._rank, self._schedule, self._transport = rank, schedule, transport
        self._local: dict[SkipSend, Tensors] = {}  # between stages of this rank
        self._due: dict[Channel, deque[SkipSend]] = {}  # receives that are not posted yet
        self._posted: set[SkipSend] = set()

    @abstractmethod
    def incoming(self, action: Action) -> list[SkipSend]:
        """Returns the messages that an action works on."""

    @abstractmethod
    def channel_of(self, message: SkipSend) -> Channel:
        """Returns the communicator of a message."""

    @abstractmethod
    def specs_of(self, message: SkipSend) -> Sequence[TensorSpec]:
        """Returns the specs of the tensors in a message that comes here."""

    @abstractmethod
    def sent_like(self, message: SkipSend) -> Iterable[SkipSend]:
        """Returns all messages on the channel of this one, in the order in which they are sent."""

    @abstractmethod
    def proven_by(self, message: SkipSend) -> SkipSend | None:
        """Returns the last message from here of which this one tells that it came; None where it tells of none."""

    def may_run(self, action: Action) -> bool:
        """Returns whether all that the action works on can be received without another rank of this process running."""
        remote = [message for message in self.incoming(action) if not self._is_here(message.stage)]
        for message in remote:
            self._post_up_to(message)
        return all(self._transport.may_receive(message) for message in remote)

    def send(self, message: SkipSend, tensors: Tensors) -> None:
        """Sends tensors, or hands them to a stage of this rank."""
        if self._is_here(message.to):
            self._local[message] = tuple(tensor.detach() for tensor in tensors)
        else:
            self._transport.send(self.channel_of(message), message, tensors)

    def take(self, message: SkipSend) -> Tensors:
        """Waits for a message and returns its tensors, which are the caller's until `release`."""
        if self._is_here(message.stage):
            tensors = self._local.pop(message)
        else:
            due = self._post_up_to(message)
            if due:
                self._post(due.popleft())
            self._posted.remove(message)
            tensors = self._transport.receive(message)
        if (proven := self.proven_by(message)) is not None:
            self._transport.settle(self.channel_of(proven), proven)
        return tensors

    def release(self, message: SkipSend) -> None:
        """Frees the tensors of a message."""
        if not self._is_here(message.stage):
            self._transport.release(message)

    def received(self, action: Action) -> list[SkipSend]:
        """Returns those of an action's messages that came from other ranks."""
        return [message for message in self.incoming(action) if not self._is_here(message.stage)]

    def leftovers(self) -> list[str]:
        """Returns a description of the messages that nobody took."""
        left = [*self._local, *self._posted]
        return [f"messages past stages: {list(map(str, left))}"] if left else []

    def _post_up_to(self, message: SkipSend) -> deque[SkipSend]:
        """Posts the receives up to this message's, and returns those that are left on its channel."""
        due = self._due.setdefault(self.channel_of(message), deque(self.sent_like(message)))
        while message not in self._posted:
            self._post(due.popleft())
        return due

    def _post(self, message: SkipSend) -> None:
        self._transport.post_receive(self.channel_of(message), message, self.specs_of(message))
        self._posted.add(message)

    def _is_here(self, stage: int) -> bool:
        return self._schedule.placement[stage] == self._rank


class SkipMessages(SideMessages):
    """The skips past stages.

    stage 0  --- F ---> stage 1 --- F ---> stage 2        the stages' own messages
        \\________________________________/                a skip, sent when F of stage 0 ends
    """

    def __init__(self, rank: int, schedule: Schedule, transport: Transport, specs: Specs) -> None:
        super().__init__(rank, schedule, transport)
        self._specs = specs

    def take_all(self, action: Action) -> Tensors:
        """Returns the skips that F works on, or the gradients of skips that B or I does, in order."""
        return tuple(tensor for message in self.incoming(action) for tensor in self.take(message))

    def hand_on(self, send: Action, tensors: Tensors) -> Tensors:
        """Sends the tensors that skip stages, and returns those that go with the regular message `send`."""
        specs = self._specs(send.op, (send.stage, send.microbatch, send.slice))
        for peer in _peers(specs):
            message = SkipSend(send.op, send.stage, send.microbatch, send.slice, to=peer)
            self.send(message, tuple(t for t, spec in zip(tensors, specs, strict=True) if spec.peer == peer))
        return tuple(t for t, spec in zip(tensors, specs, strict=True) if spec.peer is None)

    def incoming(self, action: Action) -> list[SkipSend]:
        send = Op.SEND_F if action.op is Op.F else Op.SEND_B
        specs = self._specs(_receive(send), (action.stage, action.microbatch, action.slice))
        return [SkipSend(send, peer, action.microbatch, action.slice, to=action.stage) for peer in _peers(specs)]

    def channel_of(self, message: SkipSend) -> Channel:
        return skip_channel(message, self._schedule)

    def specs_of(self, message: SkipSend) -> list[TensorSpec]:
        specs = self._specs(_receive(message.op), (message.to, message.microbatch, message.slice))
        return [spec for spec in specs if spec.peer == message.stage]

    def sent_like(self, message: SkipSend) -> list[SkipSend]:
        producers = (Op.F,) if message.op is Op.SEND_F else (Op.B, Op.I)
        row = self._schedule.actions[self._schedule.placement[message.stage]]
        made = [action for action in row if action.op in producers and action.stage == message.stage]
        sent = [message._replace(microbatch=action.microbatch, slice=action.slice) for action in made]
        # A skip before CutTokens is the first slice's alone.
        return [send for send in sent if self.specs_of(send)]

    def proven_by(self, message: SkipSend) -> SkipSend | None:
        """A gradient proves that its skip arrived; a skip, that the gradient of its sender's last backward did."""
        there, here = message.stage, message.to
        if message.op is Op.SEND_B:
            return SkipSend(Op.SEND_F, here, message.microbatch, message.slice, to=there)
        rank, end = self._schedule.positions[Action(Op.F, there, message.microbatch, message.slice)]
        for action in reversed(self._schedule.actions[rank][:end]):
            if action.op in (Op.B, Op.I) and action.stage == there:
                return SkipSend(Op.SEND_B, here, action.microbatch, action.slice, to=there)
        return None


def skip_channel(message: SkipSend, schedule: Schedule) -> Channel:
    source, destination = schedule.placement[message.stage], schedule.placement[message.to]
    stages = message.stage, message.to
    return Channel("activations" if message.op is Op.SEND_F else "gradients", source, destination, stages)


def skip_channels(routes: Sequence[tuple[int, int]], schedule: Schedule) -> list[Channel]:
    """Returns both directions of every route (stage of the stash, stage of the pop) between two ranks, in one order."""
    there = [SkipSend(Op.SEND_F, stash, 0, 0, to=pop) for stash, pop in sorted(routes)]
    back = [SkipSend(Op.SEND_B, pop, 0, 0, to=stash) for stash, pop in sorted(routes)]
    channels = [skip_channel(message, schedule) for message in (*there, *back)]
    return [line for line in channels if line.source != line.destination]


def _receive(send: Op) -> Op:
    return Op.RECV_F if send is Op.SEND_F else Op.RECV_B


def _peers(specs: Sequence[TensorSpec]) -> list[int]:
    return list(dict.fromkeys(spec.peer for spec in specs if spec.peer is not None))


_DIRECTIONS: dict[Op, Direction] = {Op.F: "activations", Op.V: "activations", Op.E: "lookups"}


class VocabularyMessages(SideMessages):
    """The messages between the ranks' rows of a spread vocabulary and the two ends of the model.

    last stage  --- F: the head's input --->  rows of stage g
                <-- V: their part ----------
                --- L: the sums ----------->

    first stage <-- E: the embeddings ------  rows of stage g, where they embed too
                --- B or I: its gradient -->
    """

    def __init__(self, rank: int, schedule: Schedule, transport: Transport, specs: VocabularySpecs) -> None:
        super().__init__(rank, schedule, transport)
        self._specs = specs

    def incoming(self, action: Action) -> list[SkipSend]:
        """Returns the messages that a V, L or VW, an EW or the first stage's F works on; none of other actions."""
        _, g, m, i = action
        last = self._schedule.num_stages - 1
        if action.op is Op.F and g == 0 and self._schedule.spreads_embedding:
            return [SkipSend(Op.E, stage, m, i, to=0) for stage in self._embedding_stages]
        if action.op is Op.EW:
            return [SkipSend(input_gradient(0, m, i, self._schedule).op, 0, m, i, to=g)]
        if action.op is Op.V:
            return [SkipSend(Op.F, last, m, i, to=g)]
        if action.op is Op.L:
            return [SkipSend(Op.V, stage, m, i, to=last) for stage in self._schedule.vocabulary_stages]
        return [SkipSend(Op.L, last, m, i, to=g)] if action.op is Op.VW else []

    def hand_on(self, action: Action, tensors: Tensors) -> None:
        """Sends the result of a V, L or E, the last stage's F, or the first stage's B or I to all that work on it."""
        op, g, m, i = action
        stages: Sequence[int] = self._schedule.vocabulary_stages
        if op in (Op.V, Op.E):
            stages = [self._schedule.num_stages - 1 if op is Op.V else 0]
        elif g == 0 and op in BACKWARDS:
            stages = self._embedding_stages
        for stage in stages:
            self.send(SkipSend(op, g, m, i, to=stage), tensors)

    @cached_property
    def _embedding_stages(self) -> list[int]:
        """The stages next to which rows embed: of every rank, but where only some of a schedule is rehearsed."""
        looked_up = {action.stage for action in self._schedule.positions if action.op is Op.E}
        return [stage for stage in self._schedule.vocabulary_stages if stage in looked_up]

    def channel_of(self, message: SkipSend) -> Channel:
        return vocabulary_channel(message, self._schedule)

    def specs_of(self, message: SkipSend) -> Sequence[TensorSpec]:
        return self._specs(message)

    def proven_by(self, message: SkipSend) -> SkipSend | None:
        op, stage, m, i, to = message
        if op in (Op.V, Op.L):
            return SkipSend(Op.F if op is Op.V else Op.V, to, m, i, to=stage)
        if op is Op.F:  # the first stage's output has gone through all stages
            return SkipSend(Op.E, to, m, i, to=0)
        before = self._gradients_before.get(Action(op, stage, m, i))
        return None if before is None else self.incoming(before)[0]

    @cached_property
    def _gradients_before(self) -> dict[Action, Action]:
        return gradients_before(self._schedule)

    def sent_like(self, message: SkipSend) -> list[SkipSend]:
        row = self._schedule.actions[self._schedule.placement[message.stage]]
        ops = (Op.B, Op.I) if message.op in BACKWARDS else (message.op,)
        made = (action for action in row if action.op in ops and action.stage == message.stage)
        return [SkipSend(action.op, message.stage, action.microbatch, action.slice, to=message.to) for action in made]


def vocabulary_channel(message: SkipSend, schedule: Schedule) -> Channel:
    """Returns the communicator of these messages; each kind has one."""
    source, destination = schedule.placement[message.stage], schedule.placement[message.to]
    ends = message.stage, message.to
    direction = _DIRECTIONS.get(message.op, "gradients")
    return Channel(direction, source, destination, ends)


def vocabulary_channels(schedule: Schedule) -> list[Channel]:
    """Returns all of them, in one order; none where the head is whole."""
    if not schedule.spreads_vocabulary:
        return []
    last, stages = schedule.num_stages - 1, schedule.vocabulary_stages
    ends = [(op, last, g) for op in (Op.F, Op.L) for g in stages] + [(Op.V, g, last) for g in stages]
    if schedule.spreads_embedding:
        ends += [(Op.E, g, 0) for g in stages] + [(Op.B, 0, g) for g in stages]
    lines = [vocabulary_channel(SkipSend(op, stage, 0, 0, to=to), schedule) for op, stage, to in ends]
    return [line for line in lines if line.source != line.destination]
