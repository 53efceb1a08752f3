"""The tensors of messages past neighbours, between a rank's actions: skips, and those of a spread head."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from slipstream.comm import Transport
from slipstream.model import Tensors, TensorSpec
from slipstream.pipeline.execution.rank_program import ProgramStep
from slipstream.schedule import Action, Op, Schedule, is_here


class FarTensors:
    """The messages that skip stages, which a rank sends and receives in one step.

    Args:
        schedule: with these messages.
        transport: of the rank.
        outgoing: gets what a SEND sends.
        received: is called with each message that was received.
    """

    def __init__(
        self,
        schedule: Schedule,
        transport: Transport,
        outgoing: dict[Action, Tensors],
        received: Callable[[Action], None],
    ) -> None:
        self._schedule = schedule
        self._transport = transport
        self._outgoing = outgoing
        self._received = received
        self._here: dict[Action, Tensors] = {}  # between stages of this rank

    def hand_on(self, send: Action, tensors: Tensors) -> None:
        """Leaves tensors to a stage of this rank, or to the SEND."""
        if is_here(send, self._schedule):
            self._here[send] = tuple(map(Tensor.detach, tensors))
        else:
            self._outgoing[send] = tensors

    def take(self, send: Action, step: ProgramStep) -> Tensors:
        """Returns the tensors of a message that a step works on, which are the caller's until `release`."""
        if send in self._here:
            tensors = self._here.pop(send)
        else:
            tensors = self._transport.receive(send)
            self._received(send)
        if (told := step.told.get(send)) is not None:
            self._transport.settle(*told)
        return tensors

    def take_all(self, step: ProgramStep, specs: Sequence[TensorSpec]) -> Tensors:
        """Returns the skips that a step works on, or their gradients, as their specs have them."""
        # A message may be empty: that of a skip which needs no gradient.
        by_peer = {send.stage: self.take(send, step) for send in step.far}
        g, m, i = step.key
        op = Op.SEND_F if step.action.op is Op.F else Op.SEND_B
        for peer in peers_of(specs):
            if peer not in by_peer:
                by_peer[peer] = self._here.pop(Action(op, peer, m, i, g))
        return tuple(tensor for peer in peers_of(specs) for tensor in by_peer[peer])

    def hand_on_all(self, step: ProgramStep, tensors: Tensors, specs: Sequence[TensorSpec]) -> Tensors:
        """Hands on the tensors that skip stages, and returns those that go to the neighbour."""
        for peer in peers_of(specs):
            skipping = tuple(t for t, spec in zip(tensors, specs, strict=True) if spec.peer == peer)
            self.hand_on(step.result._replace(peer=peer), skipping)
        return tuple(t for t, spec in zip(tensors, specs, strict=True) if spec.peer is None)

    def release(self, send: Action) -> None:
        """Gives the buffer of a message back, if it came from another rank."""
        if not is_here(send, self._schedule):
            self._transport.release(send)

    def leftovers(self) -> list[str]:
        """Returns a description of the messages that nobody took."""
        return [f"messages past stages: {list(map(str, self._here))}"] if self._here else []


def peers_of(specs: Sequence[TensorSpec]) -> list[int]:
    """Returns the stages at the other ends of skips, in order."""
    return list(dict.fromkeys(spec.peer for spec in specs if spec.peer is not None))
