"""Messages beside those of neighbouring stages: skip connections, and the rows of a spread vocabulary.

They are no actions of the schedule. Each kind, between two stages, has a communicator of its own, on which a send is
waited for only when it is known to be received, or the step ends. The executor's transport carries their tensors, and
the simulator's account counts the buffers that it takes for them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import Any, NamedTuple, Protocol

from slipstream.schedule.action import BACKWARDS, Action, Op
from slipstream.schedule.lowering import Channel, Direction
from slipstream.schedule.rules import gradients_before, input_gradient
from slipstream.schedule.schedule import Schedule

Payload = tuple[Any, ...]  # tensors


class SkipSend(NamedTuple):
    """A SEND to the stage `to`, which is neither the one before nor the one after."""

    op: Op
    stage: int
    microbatch: int
    slice: int
    to: int

    def __str__(self) -> str:
        return f"{Action(self.op, self.stage, self.microbatch, self.slice)} to stage {self.to}"


class SideTransport(Protocol):
    """A rank's end of the communicators of these messages."""

    def send(self, channel: Channel, message: SkipSend, tensors: Payload) -> None:
        """Posts the message and returns without waiting."""

    def settle(self, channel: Channel, message: SkipSend) -> None:
        """Frees the memory of this message and of those before it, as the other end has received it."""

    def post_receive(self, channel: Channel, message: SkipSend, specs: Sequence[Any]) -> None:
        """Makes room for the message and returns without waiting."""

    def may_receive(self, message: SkipSend) -> bool:
        """Returns whether `receive` may be called now."""
        ...

    def receive(self, message: SkipSend) -> Payload:
        """Waits for a posted message and returns its tensors. They are the caller's until `release`."""
        ...

    def release(self, message: SkipSend) -> None:
        """Gives the buffer of a received message back."""


class SideMessages(ABC):
    """One rank's end of these messages in one step.

    An awaited message was sent at the end of an action that the schedule puts before: so no ranks wait for each other
    in a circle. Receives are posted in the order in which the other end's schedule sends, one ahead of what is needed.
    """

    def __init__(self, rank: int, schedule: Schedule, transport: SideTransport) -> None:
        self._rank, self._schedule, self._transport = rank, schedule, transport
        self._local: dict[SkipSend, Payload] = {}  # between stages of this rank
        self._due: dict[Channel, deque[SkipSend]] = {}  # receives that are not posted yet
        self._posted: set[SkipSend] = set()

    @abstractmethod
    def incoming(self, action: Action) -> list[SkipSend]:
        """Returns the messages that an action works on."""

    @abstractmethod
    def specs_of(self, message: SkipSend) -> Sequence[Any]:
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

    def send(self, message: SkipSend, tensors: Payload) -> None:
        """Sends tensors, or hands them to a stage of this rank."""
        if self._is_here(message.to):
            self._local[message] = tuple(tensor.detach() for tensor in tensors)
        else:
            self._transport.send(_channel(message, self._schedule), message, tensors)

    def take(self, message: SkipSend) -> Payload:
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
            self._transport.settle(_channel(proven, self._schedule), proven)
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
        channel = _channel(message, self._schedule)
        if channel not in self._due:
            self._due[channel] = deque(self.sent_like(message))
        due = self._due[channel]
        while message not in self._posted:
            self._post(due.popleft())
        return due

    def _post(self, message: SkipSend) -> None:
        self._transport.post_receive(_channel(message, self._schedule), message, self.specs_of(message))
        self._posted.add(message)

    def _is_here(self, stage: int) -> bool:
        return self._schedule.placement[stage] == self._rank


_DIRECTIONS: dict[Op, Direction] = {
    Op.SEND_F: "activations",
    Op.F: "activations",
    Op.V: "activations",
    Op.E: "lookups",
}


def side_channels(messages: Iterable[SkipSend], schedule: Schedule) -> list[Channel]:
    """Returns the communicators of some messages, one of each kind, where they pass between ranks; in this order."""
    channels = [_channel(message, schedule) for message in messages]
    return [channel for channel in channels if channel.source != channel.destination]


def _channel(message: SkipSend, schedule: Schedule) -> Channel:
    stages = message.stage, message.to
    source, destination = (schedule.placement[stage] for stage in stages)
    return Channel(_DIRECTIONS.get(message.op, "gradients"), source, destination, stages)


class VocabularyMessages(SideMessages):
    """The messages between the ranks' rows of a spread vocabulary and the two ends of the model.

    last stage  --- F: the head's input --->  rows of stage g
                <-- V: their part ----------
                --- L: the sums ----------->

    first stage <-- E: the embeddings ------  rows of stage g, where they embed too
                --- B or I: its gradient -->
    """

    def __init__(
        self, rank: int, schedule: Schedule, transport: SideTransport, specs: Callable[[SkipSend], Sequence[Any]]
    ) -> None:
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

    def hand_on(self, action: Action, tensors: Payload) -> None:
        """Sends the result of an action to all rows or the end of the model that work on it."""
        for stage in self._readers(action):
            self.send(SkipSend(*action, to=stage), tensors)

    def _readers(self, action: Action) -> Sequence[int]:
        """Returns the stages that work on the result of a V, L or E, the last stage's F, or the first stage's B or I,
        and none for other actions."""
        op, last = action.op, self._schedule.num_stages - 1
        if op in (Op.V, Op.E):
            return (last if op is Op.V else 0,)
        if op is Op.L or (op is Op.F and action.stage == last):
            return self._schedule.vocabulary_stages
        return self._embedding_stages if op in (Op.B, Op.I) and action.stage == 0 else ()

    @cached_property
    def _embedding_stages(self) -> list[int]:
        """The stages next to which rows embed: of every rank, but where only some of a schedule is rehearsed."""
        looked_up = {action.stage for action in self._schedule.positions if action.op is Op.E}
        return [stage for stage in self._schedule.vocabulary_stages if stage in looked_up]

    def specs_of(self, message: SkipSend) -> Sequence[Any]:
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


def vocabulary_channels(schedule: Schedule) -> list[Channel]:
    """Returns all of them, in one order; none where the head is whole."""
    if not schedule.spreads_vocabulary:
        return []
    last, stages = schedule.num_stages - 1, schedule.vocabulary_stages
    ends = [(op, last, g) for op in (Op.F, Op.L) for g in stages] + [(Op.V, g, last) for g in stages]
    if schedule.spreads_embedding:
        ends += [(Op.E, g, 0) for g in stages] + [(Op.B, 0, g) for g in stages]
    return side_channels((SkipSend(op, stage, 0, 0, to=to) for op, stage, to in ends), schedule)
