"""Interprets one rank's lowered actions with real tensors: a handler per op, and a timeline of what ran when."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from slipstream.attention import ContextStore
from slipstream.model.stage import Stage
from slipstream.model.weight_gradients import WeightGradient, deferring
from slipstream.pipeline.batch import Batch
from slipstream.pipeline.stopwatch import Stopwatch
from slipstream.pipeline.transport import Transport
from slipstream.schedule.action import Action, Op, Schedule
from slipstream.schedule.lowering import channel
from slipstream.timeline import Span

LossFunction = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]  # (outputs, targets) -> (sum, count)
_Key = tuple[int, int, int]  # stage, microbatch, slice


@dataclass
class _Flight:
    """What a step holds between its actions; all of it is empty when the step ends."""

    batch: Batch
    loss: Tensor  # sum over this rank's slices so far, float64
    count: Tensor
    inputs: dict[_Key, Tensor] = field(default_factory=dict)  # leaves whose gradient goes to the stage before
    outputs: dict[_Key, Tensor] = field(default_factory=dict)  # roots of the backward: hidden states or the loss
    handed: dict[_Key, Tensor] = field(default_factory=dict)  # from a stage of the same rank: its output
    gradients: dict[_Key, Tensor] = field(default_factory=dict)  # of a stage's output, from the same rank
    outgoing: dict[Action, Tensor] = field(default_factory=dict)  # computed, not yet sent
    weights: dict[_Key, list[WeightGradient]] = field(default_factory=dict)  # left by I for W
    stores: dict[tuple[int, int], ContextStore] = field(default_factory=dict)  # by stage and microbatch

    def leftovers(self) -> list[str]:
        held = {name: value for name, value in vars(self).items() if isinstance(value, dict) and value}
        return [f"{name}: {list(value)}" for name, value in held.items()]


class Executor:
    """One pipeline rank. `start` a batch, then `run` its actions; `finish` checks that nothing is left."""

    def __init__(
        self,
        rank: int,
        stages: dict[int, Stage],
        transport: Transport,
        loss_function: LossFunction,
        device: torch.device,
    ) -> None:
        self._rank = rank
        self._stages = stages
        self._transport = transport
        self._loss_function = loss_function
        self._device = device
        self._handlers: dict[Op, Callable[[Action], None]] = {
            Op.F: self._forward,
            Op.B: self._backward,
            Op.I: self._backward_input,
            Op.W: self._backward_weights,
            Op.SEND_F: self._send,
            Op.SEND_B: self._send,
            Op.RECV_F: self._post_receive,
            Op.RECV_B: self._post_receive,
        }

    def start(self, schedule: Schedule, batch: Batch) -> Iterator[Action]:
        """Run this rank's actions of a lowered schedule, yielding before each that must wait for a message.

        Only ranks that share a process need to look at what is yielded: the next one's turn has come.
        """
        self._schedule = schedule
        zero = torch.zeros((), dtype=torch.float64, device=self._device)
        self._flight = _Flight(batch, zero, zero.clone())
        self._stopwatch = Stopwatch(self._rank, self._device)
        self._posted: dict[Action, Any] = {}  # when the message's receive was posted
        return self._actions(schedule.actions[self._rank])

    def finish(self) -> tuple[Tensor, Tensor]:
        """The (sum, count) of the losses of this rank's slices. Raises if anything of the step is left over."""
        self._transport.finish()
        leftovers = self._flight.leftovers()
        if leftovers:
            raise RuntimeError(f"rank {self._rank} still holds {'; '.join(leftovers)} at the end of a step")
        return self._flight.loss, self._flight.count

    @property
    def spans(self) -> list[Span]:
        """What ran when in the last step."""
        return self._stopwatch.spans()

    def _actions(self, actions: tuple[Action, ...]) -> Iterator[Action]:
        for action in actions:
            awaited = self._awaited(action)
            while awaited is not None and not self._transport.may_receive(awaited):
                yield action
            self._handlers[action.op](action)

    def _awaited(self, action: Action) -> Action | None:
        """The message that brings what `action` works on, named by its SEND; None if it comes from this rank."""
        g, m, i = action.stage, action.microbatch, action.slice
        if action.op is Op.F and g > 0 and not self._is_here(g - 1):
            return Action(Op.SEND_F, g - 1, m, i)
        if action.op in (Op.B, Op.I) and g + 1 < self._schedule.num_stages and not self._is_here(g + 1):
            return Action(Op.SEND_B, g + 1, m, i)
        return None

    def _is_here(self, stage: int) -> bool:
        return self._schedule.placement[stage] == self._rank

    def _forward(self, action: Action) -> None:
        g, m, i = key = _key(action)
        stage, flight = self._stages[g], self._flight
        hidden = self._input(action)
        began = self._stopwatch.mark()
        if hidden is not None and self._schedule.has_backward:
            hidden = flight.inputs[key] = hidden.detach().requires_grad_()
        piece = flight.batch.slices[m][i]
        store = flight.stores.setdefault((g, m), ContextStore(piece.length))
        output = stage.forward(piece, hidden, store)
        if stage.is_last:
            output = self._loss(output, flight.batch.targets[m][i])
        self._stopwatch.record(action, began)
        if self._schedule.has_backward:
            flight.outputs[key] = output
        else:
            self._end_forward_only(action)
        if not stage.is_last:
            self._hand_on(Action(Op.SEND_F, g, m, i), output, flight.handed, (g + 1, m, i))

    def _input(self, action: Action) -> Tensor | None:
        """The hidden states F works on: received, or handed on by a stage of this rank; None on the first stage."""
        awaited = self._awaited(action)
        if awaited is not None:
            return self._receive(awaited)
        return None if action.stage == 0 else self._flight.handed.pop(_key(action))

    def _loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """This slice's part of the global mean: its sum over the valid tokens of the whole batch (rule 9)."""
        total, count = self._loss_function(logits, targets)
        self._flight.loss += total.detach()
        self._flight.count += count
        return total / self._flight.batch.num_valid

    def _end_forward_only(self, action: Action) -> None:
        awaited = self._awaited(action)
        if awaited is not None:
            self._transport.release(awaited)
        if action.slice == self._schedule.num_slices - 1:
            self._flight.stores.pop((action.stage, action.microbatch)).free()

    def _backward(self, action: Action) -> None:
        for message in self._differentiate(action):
            self._transport.release(message)

    def _backward_input(self, action: Action) -> None:
        """I: everything but the weight gradients of linear layers. W needs what came in, so it releases that."""
        with deferring() as work:
            messages = self._differentiate(action)
        work += [partial(self._transport.release, message) for message in messages]
        self._flight.weights[_key(action)] = work

    def _differentiate(self, action: Action) -> list[Action]:
        """The backward of one slice. Returns the messages whose buffers it worked on."""
        g, m, i = key = _key(action)
        stage, flight = self._stages[g], self._flight
        gradient = None if stage.is_last else self._output_gradient(action)
        began = self._stopwatch.mark()
        output, hidden = flight.outputs.pop(key), flight.inputs.pop(key, None)
        if output.requires_grad:  # false where the first stages are frozen
            torch.autograd.backward(output, gradient)
        if i == 0:
            flight.stores.pop((g, m)).free()
        self._stopwatch.record(action, began)
        if hidden is not None:
            sent = torch.zeros_like(hidden) if hidden.grad is None else hidden.grad
            if gradient is not None and sent.data_ptr() == gradient.data_ptr():
                sent = sent.clone()  # a stage that changed nothing: the buffer goes back to the pool before it is sent
            self._hand_on(Action(Op.SEND_B, g, m, i), sent, flight.gradients, (g - 1, m, i))
        received = self._awaited(action), self._awaited(Action(Op.F, g, m, i))
        return [message for message in received if message is not None]

    def _backward_weights(self, action: Action) -> None:
        began = self._stopwatch.mark()
        for add_gradient in self._flight.weights.pop(_key(action)):
            add_gradient()
        self._stopwatch.record(action, began)

    def _output_gradient(self, action: Action) -> Tensor:
        """The gradient B starts from: received, or left by a stage of this rank."""
        awaited = self._awaited(action)
        return self._receive(awaited) if awaited else self._flight.gradients.pop(_key(action))

    def _hand_on(self, send: Action, tensor: Tensor, local: dict[_Key, Tensor], key: _Key) -> None:
        """To the next stage in the direction of `send`: as a message, or directly where that stage is here too."""
        if self._is_here(key[0]):
            local[key] = tensor.detach()
        else:
            self._flight.outgoing[send] = tensor

    def _send(self, action: Action) -> None:
        began = self._stopwatch.mark()
        self._transport.send(channel(action, self._schedule), action, self._flight.outgoing.pop(action))
        self._stopwatch.record(action, began)

    def _post_receive(self, action: Action) -> None:
        self._posted[action.other_end] = self._stopwatch.mark()
        piece = self._flight.batch.slices[action.microbatch][action.slice]
        stage = self._stages[action.stage]
        shape = torch.Size((*piece.input_ids.shape, stage.hidden_size))
        self._transport.post_receive(channel(action, self._schedule), action.other_end, shape, stage.hidden_dtype)

    def _receive(self, message: Action) -> Tensor:
        tensor = self._transport.receive(message)
        self._stopwatch.record(message.other_end, self._posted.pop(message))
        return tensor


def run_together(executors: list[Executor], schedule: Schedule, batch: Batch) -> None:
    """Run the ranks of this process in turn, each as far as it gets: one rank, or all of a pipeline in one process."""
    awaiting: dict[Iterator[Action], Action | None]
    awaiting = {executor.start(schedule, batch): None for executor in executors}
    while awaiting:
        before = dict(awaiting)
        awaiting = {actions: action for actions in awaiting if (action := next(actions, None)) is not None}
        if awaiting == before:
            raise RuntimeError(f"no rank can go on; they wait at {[str(action) for action in awaiting.values()]}")


def _key(action: Action) -> _Key:
    return action.stage, action.microbatch, action.slice
