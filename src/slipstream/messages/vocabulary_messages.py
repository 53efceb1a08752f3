"""What goes between the last stage and the ranks' rows of a spread head: its input, their parts, and the sums."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from slipstream.messages.message import SkipSend
from slipstream.messages.transport import Transport
from slipstream.model import Tensors, TensorSpec
from slipstream.schedule import Action, Channel, Op, Schedule

Specs = Callable[[SkipSend], Sequence[TensorSpec]]


class VocabularyMessages:
    """One rank's end of these messages in one step.

        last stage  --- F: the head's input --->  rows of stage g
                    <-- V: their part ----------
                    --- L: the sums ----------->

    Like skips they are no actions of the schedule, and have communicators of their own, on which a send waits for
    nothing. What a V, L or VW waits for was sent when an action ended that the schedule puts before it. Receives are
    posted in the order in which the other end sends, one ahead of what is needed.
    """

    def __init__(self, rank: int, schedule: Schedule, transport: Transport, specs: Specs) -> None:
        self._rank, self._schedule, self._transport, self._specs = rank, schedule, transport, specs
        self._local: dict[SkipSend, Tensors] = {}
        self._due: dict[Channel, deque[SkipSend]] = {}  # receives that are not posted yet
        self._posted: set[SkipSend] = set()

    def incoming(self, action: Action) -> list[SkipSend]:
        """Returns the messages that a V, L or VW works on; none of other actions."""
        _, g, m, i = action
        last = self._schedule.num_stages - 1
        if action.op is Op.V:
            return [SkipSend(Op.F, last, m, i, to=g)]
        if action.op is Op.L:
            return [SkipSend(Op.V, stage, m, i, to=last) for stage in self._schedule.vocabulary_stages]
        return [SkipSend(Op.L, last, m, i, to=g)] if action.op is Op.VW else []

    def outgoing(self, action: Action) -> list[SkipSend]:
        """Returns the messages with the result of the last stage's F, of a V, or of an L."""
        op, g, m, i = action
        last = self._schedule.num_stages - 1
        if op is Op.V:
            return [SkipSend(op, g, m, i, to=last)]
        return [SkipSend(op, last, m, i, to=stage) for stage in self._schedule.vocabulary_stages]

    def may_run(self, action: Action) -> bool:
        """Returns whether all that the action works on can be received without another rank of this process running."""
        remote = [message for message in self.incoming(action) if not self._is_here(message.stage)]
        for message in remote:
            self._post_up_to(message)
        return all(self._transport.may_receive(message) for message in remote)

    def hand_on(self, action: Action, tensors: Tensors) -> None:
        """Sends the result of an action to all that work on it."""
        for message in self.outgoing(action):
            if self._is_here(message.to):
                self._local[message] = tuple(tensor.detach() for tensor in tensors)
            else:
                self._transport.send(vocabulary_channel(message, self._schedule), message, tensors)

    def take(self, message: SkipSend) -> Tensors:
        """Waits for a message and returns its tensors, which are the caller's until `release`."""
        if self._is_here(message.stage):
            return self._local.pop(message)
        due = self._post_up_to(message)
        if due:
            self._post(due.popleft())
        self._posted.remove(message)
        tensors = self._transport.receive(message)
        if message.op is not Op.F:  # it answers one that must have come
            asked = Op.F if message.op is Op.V else Op.V
            answered = SkipSend(asked, message.to, message.microbatch, message.slice, to=message.stage)
            self._transport.settle(vocabulary_channel(answered, self._schedule), answered)
        return tensors

    def release(self, message: SkipSend) -> None:
        """Frees the tensors of a message."""
        if not self._is_here(message.stage):
            self._transport.release(message)

    def leftovers(self) -> list[str]:
        left = [*self._local, *self._posted]
        return [f"vocabulary: {list(map(str, left))}"] if left else []

    def _post_up_to(self, message: SkipSend) -> deque[SkipSend]:
        """Posts the receives up to this message's, and returns those that are left on its channel."""
        line = vocabulary_channel(message, self._schedule)
        due = self._due.setdefault(line, deque(self._sent_like(message)))
        while message not in self._posted:
            self._post(due.popleft())
        return due

    def _post(self, message: SkipSend) -> None:
        self._transport.post_receive(vocabulary_channel(message, self._schedule), message, self._specs(message))
        self._posted.add(message)

    def _sent_like(self, like: SkipSend) -> list[SkipSend]:
        """Returns all messages on its channel, in the order in which they are sent."""
        row = self._schedule.actions[self._schedule.placement[like.stage]]
        made = (action for action in row if action.op is like.op and action.stage == like.stage)
        return [SkipSend(like.op, like.stage, action.microbatch, action.slice, to=like.to) for action in made]

    def _is_here(self, stage: int) -> bool:
        return self._schedule.placement[stage] == self._rank


def vocabulary_channel(message: SkipSend, schedule: Schedule) -> Channel:
    """Returns the communicator of these messages; each kind has one."""
    source, destination = schedule.placement[message.stage], schedule.placement[message.to]
    ends = message.stage, message.to
    return Channel("gradients" if message.op is Op.L else "activations", source, destination, ends)


def vocabulary_channels(schedule: Schedule) -> list[Channel]:
    """Returns all of them, in one order; none where the head is whole."""
    if not schedule.spreads_vocabulary:
        return []
    last = schedule.num_stages - 1
    ends = [(Op.F, last, g) for g in schedule.vocabulary_stages] + [(Op.L, last, g) for g in schedule.vocabulary_stages]
    ends += [(Op.V, g, last) for g in schedule.vocabulary_stages]
    lines = [vocabulary_channel(SkipSend(op, stage, 0, 0, to=to), schedule) for op, stage, to in ends]
    return [line for line in lines if line.source != line.destination]
