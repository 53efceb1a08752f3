"""Tensors that go from one stage to a later one past those between, and their gradients straight back."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence

from slipstream.messages.message import SkipSend
from slipstream.messages.transport import Transport
from slipstream.model import Tensors, TensorSpec
from slipstream.schedule import Action, Channel, Op, Schedule

# Of a stage's messages, by (stage, microbatch, slice)
Specs = Callable[[Op, tuple[int, int, int]], Sequence[TensorSpec]]


class SkipMessages:
    """One rank's skips in one step.

        stage 0  --- F ---> stage 1 --- F ---> stage 2        what the stages hand on to each other
            \\________________________________/                a skip, sent when F of stage 0 ends

    They are no actions of the schedule. Each pair of stages has separate communicators, on which a send is waited for
    only when it is known to be received, or the step ends. What is waited for was sent when an F or B ended that the
    schedule puts before: so skips add nothing that a rank could wait for in a circle. Receives are posted in the order
    in which the other end's schedule sends, one ahead of what is needed.
    """

    def __init__(self, rank: int, schedule: Schedule, transport: Transport, specs: Specs) -> None:
        self._rank, self._schedule, self._transport, self._specs = rank, schedule, transport, specs
        self._local: dict[SkipSend, Tensors] = {}  # between stages of this rank
        self._due: dict[Channel, deque[SkipSend]] = {}  # receives that are not posted yet
        self._posted: set[SkipSend] = set()

    def take(self, op: Op, action: Action) -> Tensors:
        """Returns the skips that F (SEND_F) works on, or the gradients of skips that B or I (SEND_B) does, in order."""
        return tuple(tensor for message in self._messages(op, action) for tensor in self._taken(message))

    def received(self, op: Op, action: Action) -> list[SkipSend]:
        """Returns those of these skips that came as messages."""
        return [message for message in self._messages(op, action) if not self._is_here(message.stage)]

    def hand_on(self, send: Action, tensors: Tensors) -> Tensors:
        """Sends what goes elsewhere than the regular message `send`; returns what goes with that."""
        specs = self._specs(send.op, (send.stage, send.microbatch, send.slice))
        for peer in _peers(specs):
            message = SkipSend(send.op, send.stage, send.microbatch, send.slice, to=peer)
            chosen = tuple(t for t, spec in zip(tensors, specs, strict=True) if spec.peer == peer)
            if self._is_here(peer):
                self._local[message] = tuple(tensor.detach() for tensor in chosen)
            else:
                self._transport.send(skip_channel(message, self._schedule), message, chosen)
        return tuple(t for t, spec in zip(tensors, specs, strict=True) if spec.peer is None)

    def leftovers(self) -> list[str]:
        left = [*self._local, *self._posted]
        return [f"skips: {list(map(str, left))}"] if left else []

    def _messages(self, op: Op, action: Action) -> list[SkipSend]:
        specs = self._specs(_receive(op), (action.stage, action.microbatch, action.slice))
        return [SkipSend(op, peer, action.microbatch, action.slice, to=action.stage) for peer in _peers(specs)]

    def _taken(self, message: SkipSend) -> Tensors:
        if self._is_here(message.stage):
            return self._local.pop(message)
        line = skip_channel(message, self._schedule)
        due = self._due.setdefault(line, deque(self._sent_by(message)))
        while message not in self._posted:
            self._post(line, due.popleft())
        if due:
            self._post(line, due.popleft())
        self._posted.remove(message)
        tensors = self._transport.receive(message)
        proven = self._proven_by(message)
        if proven is not None:
            self._transport.settle(skip_channel(proven, self._schedule), proven)
        return tensors

    def _proven_by(self, message: SkipSend) -> SkipSend | None:
        """Returns the last message the other way that this one's sender must have received before it; None: none.

        A gradient proves that its skip arrived; a skip, that the gradient of its sender's last backward did.
        """
        there, here = message.stage, message.to
        if message.op is Op.SEND_B:
            return SkipSend(Op.SEND_F, here, message.microbatch, message.slice, to=there)
        rank, end = self._schedule.positions[Action(Op.F, there, message.microbatch, message.slice)]
        for action in reversed(self._schedule.actions[rank][:end]):
            if action.op in (Op.B, Op.I) and action.stage == there:
                return SkipSend(Op.SEND_B, here, action.microbatch, action.slice, to=there)
        return None

    def _sent_by(self, like: SkipSend) -> Iterator[SkipSend]:
        """Returns all messages between two stages, in the order in which they are sent."""
        producers = (Op.F,) if like.op is Op.SEND_F else (Op.B, Op.I)
        for action in self._schedule.actions[self._schedule.placement[like.stage]]:
            if action.op in producers and action.stage == like.stage:
                message = SkipSend(like.op, like.stage, action.microbatch, action.slice, to=like.to)
                if self._specs_of(message):  # a skip before CutTokens is the first slice's alone
                    yield message

    def _post(self, line: Channel, message: SkipSend) -> None:
        self._transport.post_receive(line, message, self._specs_of(message))
        self._posted.add(message)

    def _specs_of(self, message: SkipSend) -> list[TensorSpec]:
        """Returns the specs of the tensors in a message that comes here."""
        specs = self._specs(_receive(message.op), (message.to, message.microbatch, message.slice))
        return [spec for spec in specs if spec.peer == message.stage]

    def _is_here(self, stage: int) -> bool:
        return self._schedule.placement[stage] == self._rank


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
    """Returns the other ends of skips, in the order in which their tensors are listed."""
    return list(dict.fromkeys(spec.peer for spec in specs if spec.peer is not None))
