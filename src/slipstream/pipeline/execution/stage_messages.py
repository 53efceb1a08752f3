"""What the stages of a rank receive and hand on in a step: as messages, or directly to stages of the same rank."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from slipstream.comm import Message, SkipMessages, Transport
from slipstream.model import Tensors, TensorSpec
from slipstream.pipeline.batch import Stage
from slipstream.pipeline.execution.step_state import SliceKey, StepState, key_of
from slipstream.schedule import Action, Op, Schedule, awaited_send, channel
from slipstream.timeline import Span


class StageMessages:
    """The inputs, outputs and gradients of one rank's stages in one step, with the skips past others.

    Args:
        rank: whose they are.
        schedule: lowered.
        stages: of the rank.
        transport: sends and receives.
        state: holds what waits to be sent, and what stages of this rank left for each other.
        stopwatch: records how long messages were under way.
    """

    def __init__(
        self,
        rank: int,
        schedule: Schedule,
        stages: Mapping[int, Stage],
        transport: Transport,
        state: StepState,
        stopwatch: Stopwatch,
    ) -> None:
        self._rank, self._schedule = rank, schedule
        self._transport, self._state, self._stopwatch = transport, state, stopwatch
        self._posted: dict[Action, Any] = {}  # when the message's receive was posted
        # nothing here knows itself: such a circle would hold the step's tensors until it is collected
        self.specs = partial(_specs, schedule, stages, state)
        """Returns the specs of what a stage receives or sends in messages of an op, given that and the slice's key."""
        self._skips = SkipMessages(rank, schedule, transport, self.specs)

    def take_inputs(self, action: Action) -> Tensors:
        """Returns the inputs of F of a stage but the first: received, or passed on by stages of this rank."""
        awaited = awaited_send(action, self._schedule)
        regular = self._receive(awaited) if awaited else self._state.handed.pop(key_of(action))
        return (*regular, *self._skips.take(Op.SEND_F, action))

    def take_gradients(self, action: Action) -> Tensors:
        """Returns the outputs' gradients, from which B starts: received, or left by stages of this rank."""
        awaited = awaited_send(action, self._schedule)
        regular = self._receive(awaited) if awaited else self._state.gradients.pop(key_of(action))
        return (*regular, *self._skips.take(Op.SEND_B, action))

    def hand_on(self, send: Action, tensors: Tensors, local: dict[SliceKey, Tensors], key: SliceKey) -> None:
        """Passes tensors to the next stage in the direction of `send`: as a message, or directly where that stage is
        here too. Skips are sent to their stages immediately."""
        tensors = self._skips.hand_on(send, tensors)
        if self._schedule.placement[key[0]] == self._rank:
            local[key] = tuple(tensor.detach() for tensor in tensors)
        else:
            self._state.outgoing[send] = tensors

    def send(self, action: Action) -> None:
        """Runs a SEND."""
        self._transport.send(channel(action, self._schedule), action, self._state.outgoing.pop(action))

    def post_receive(self, action: Action) -> None:
        """Runs a RECV: from now on the message may arrive."""
        self._posted[action.other_end] = self._stopwatch.mark()
        specs = [spec for spec in self.specs(action.op, key_of(action)) if spec.peer is None]
        self._transport.post_receive(channel(action, self._schedule), action.other_end, specs)

    def received(self, action: Action) -> list[Message]:
        """Returns the messages that `action` works on."""
        awaited = awaited_send(action, self._schedule)
        skips = self._skips.received(Op.SEND_F if action.op is Op.F else Op.SEND_B, action)
        return [*([] if awaited is None else [awaited]), *skips]

    def release(self, messages: Sequence[Message]) -> None:
        """Gives the buffers of messages back."""
        for message in messages:
            self._transport.release(message)

    def needing(self, op: Op, key: SliceKey) -> list[int]:
        """Returns the indices of those of a stage's inputs or outputs that have gradients."""
        return [index for index, spec in enumerate(self.specs(op, key)) if spec.needs_gradient]

    def leftovers(self) -> list[str]:
        """Returns a description of each skip that nobody took."""
        return self._skips.leftovers()

    def _receive(self, message: Action) -> Tensors:
        tensors = self._transport.receive(message)
        self._stopwatch.record(message.other_end, self._posted.pop(message))
        return tensors


def _specs(
    schedule: Schedule, stages: Mapping[int, Stage], state: StepState, op: Op, key: SliceKey
) -> Sequence[TensorSpec]:
    """Returns the specs of what a stage receives or sends in such a message, with skips for SEND_F and SEND_B."""
    g, m, i = key
    stage, piece = stages[g], state.batch.slices[m][i]
    inwards = op in (Op.RECV_F, Op.SEND_B)  # of its forward
    specs = stage.receives(piece) if inwards else stage.sends(piece)
    if inwards and 0 < g == schedule.num_frozen_stages:  # nobody below needs their gradients
        specs = tuple(spec._replace(needs_gradient=False) for spec in specs)
    return specs if op in (Op.RECV_F, Op.SEND_F) else [spec for spec in specs if spec.needs_gradient]


_Mark = float | torch.cuda.Event


class Stopwatch:
    """Collects marks in order; CUDA events are read only when the step is over."""

    def __init__(self, rank: int, device: torch.device) -> None:
        self._rank = rank
        self._on_gpu = device.type == "cuda"
        self._marks: list[tuple[Action, _Mark, _Mark]] = []
        self._origin: tuple[float, _Mark] = time.perf_counter(), self.mark()

    def mark(self) -> _Mark:
        if not self._on_gpu:
            return time.perf_counter()
        event: torch.cuda.Event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def record(self, action: Action, began: _Mark) -> None:
        """Records that the action which began at a mark ends now."""
        self._marks.append((action, began, self.mark()))

    def spans(self) -> list[Span]:
        if self._on_gpu:
            torch.cuda.synchronize()
        return [Span(self._rank, action, self._seconds(a), self._seconds(b)) for action, a, b in self._marks]

    def _seconds(self, mark: _Mark) -> float:
        began, origin = self._origin
        if isinstance(mark, float):
            return mark
        assert not isinstance(origin, float)
        return began + float(origin.elapsed_time(mark)) / 1e3
