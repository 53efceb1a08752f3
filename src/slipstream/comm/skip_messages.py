"""The messages of skip connections, between stages that aren't neighbours."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from slipstream.comm.transport import Transport
from slipstream.model import Tensors, TensorSpec
from slipstream.schedule import Action, Channel, Op, Schedule, SideMessages, SkipSend, side_channels

# Of a stage's messages, by (stage, microbatch, slice)
Specs = Callable[[Op, tuple[int, int, int]], Sequence[TensorSpec]]


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


def skip_channels(routes: Sequence[tuple[int, int]], schedule: Schedule) -> list[Channel]:
    """Returns both directions of every route (stage of the stash, stage of the pop) between two ranks, in one order."""
    there = [SkipSend(Op.SEND_F, stash, 0, 0, to=pop) for stash, pop in sorted(routes)]
    back = [SkipSend(Op.SEND_B, pop, 0, 0, to=stash) for stash, pop in sorted(routes)]
    return side_channels((*there, *back), schedule)


def _receive(send: Op) -> Op:
    return Op.RECV_F if send is Op.SEND_F else Op.RECV_B


def _peers(specs: Sequence[TensorSpec]) -> list[int]:
    return list(dict.fromkeys(spec.peer for spec in specs if spec.peer is not None))
