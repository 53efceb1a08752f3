"""Interprets one rank's lowered actions with real tensors: a handler per op, and a timeline of what ran when."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, ExitStack, closing, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from slipstream.attention import ContextStore
from slipstream.model.recompute import Recompute, Replay
from slipstream.model.saved_tensors import SavedTensors
from slipstream.model.stage import Stage
from slipstream.model.weight_gradients import deferring
from slipstream.pipeline.batch import Batch
from slipstream.pipeline.flight import Flight, Key, entrance, key_of, root_of
from slipstream.pipeline.offload import host_of
from slipstream.pipeline.stopwatch import Stopwatch
from slipstream.pipeline.transport import Transport, TransportError
from slipstream.schedule.action import Action, Op, Schedule
from slipstream.schedule.hang import report_wait
from slipstream.schedule.lowering import channel
from slipstream.timeline import Span

LossFunction = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]  # (outputs, targets) -> (sum, count)


class Executor:
    """One pipeline rank. `start` a batch, then `run` its actions; `finish` checks that nothing is left."""

    def __init__(
        self,
        rank: int,
        stages: dict[int, Stage],
        transport: Transport,
        loss_function: LossFunction,
        device: torch.device,
        recompute: Recompute | None = None,
        reduce_gradients: Callable[[int], None] | None = None,
    ) -> None:
        """`recompute` says what the schedule's R actions recompute; by default all. `reduce_gradients` is what
        REDUCE_GRAD does to a stage."""
        self._rank = rank
        self._stages = stages
        self._transport = transport
        self._loss_function = loss_function
        self._device = device
        self._recompute = recompute or Recompute()
        self._reduce_gradients = reduce_gradients
        self._host = host_of(device)
        self._handlers: dict[Op, Callable[[Action], None]] = {
            Op.F: self._forward,
            Op.B: self._backward,
            Op.I: self._backward_input,
            Op.W: self._backward_weights,
            Op.R: self._replay,
            Op.OFFLOAD: self._offload,
            Op.RELOAD: self._reload,
            Op.SEND_F: self._send,
            Op.SEND_B: self._send,
            Op.RECV_F: self._post_receive,
            Op.RECV_B: self._post_receive,
            Op.REDUCE_GRAD: self._reduce,
        }

    def start(self, schedule: Schedule, batch: Batch) -> Generator[Action]:
        """Run this rank's actions of a lowered schedule, yielding before each that must wait for a message.

        Only ranks that share a process need to look at what is yielded: the next one's turn has come.
        """
        self._schedule = schedule
        zero = torch.zeros((), dtype=torch.float64, device=self._device)
        self._flight = Flight(batch, zero, zero.clone())
        self._stopwatch = Stopwatch(self._rank, self._device)
        self._posted: dict[Action, Any] = {}  # when the message's receive was posted
        self._storages = {number: stage.storages() for number, stage in self._stages.items()} if self._saves() else {}
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

    def _actions(self, actions: tuple[Action, ...]) -> Generator[Action]:
        flight = self._flight
        try:
            for action in actions:
                awaited = self._awaited(action)
                while awaited is not None and not self._transport.may_receive(awaited):
                    yield action
                self._handlers[action.op](action)
        except TransportError as error:
            raise TransportError(f"{error}\n{report_wait(self._schedule, self._rank, action)}") from error
        finally:
            for offloaded in flight.offloaded.values():  # of a step that failed
                offloaded.close()

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
        g, m, i = key = key_of(action)
        stage, flight = self._stages[g], self._flight
        hidden = self._input(action)
        began = self._stopwatch.mark()
        store = flight.stores.setdefault((g, m), ContextStore(flight.batch.slices[m][i].length))
        if self._schedule.has_backward:
            with self._keeping(action, hidden, store):
                leave = partial(flight.input_gradients.__setitem__, key)
                output = self._compute(action, None if hidden is None else entrance(hidden, leave), store)
        else:
            output = self._compute(action, hidden, store)
        if isinstance(output, tuple):
            output = self._loss(*output)
        self._stopwatch.record(action, began)
        if self._schedule.has_backward:
            flight.roots[key] = root_of(output)
        else:
            self._end_forward_only(action)
        if not stage.is_last:
            self._hand_on(Action(Op.SEND_F, g, m, i), output, flight.handed, (g + 1, m, i))

    def _compute(self, action: Action, hidden: Tensor | None, store: ContextStore) -> Tensor | tuple[Tensor, Tensor]:
        """What F runs and R repeats: the stage's output, the last one's (sum, count) of losses."""
        g, m, i = key_of(action)
        output = self._stages[g].forward(self._flight.batch.slices[m][i], hidden, store)
        if self._stages[g].is_last:
            return self._loss_function(output, self._flight.batch.targets[m][i])
        return output

    def _input(self, action: Action) -> Tensor | None:
        """The hidden states F works on: received, or handed on by a stage of this rank; None on the first stage."""
        awaited = self._awaited(action)
        if awaited is None:
            return None if action.stage == 0 else self._flight.handed.pop(key_of(action))
        hidden = self._receive(awaited)
        if not self._is_scheduled(Op.OFFLOAD, action):
            return hidden
        hidden = hidden.clone()  # to be moved to the host, which the transport's buffer can't be
        self._transport.release(awaited)
        return hidden

    def _keeping(self, action: Action, hidden: Tensor | None, store: ContextStore) -> AbstractContextManager[None]:
        """Around a forward: prepare for its R and OFFLOAD. Without them what is saved is autograd's business."""
        recomputed = self._is_scheduled(Op.R, action)
        if not recomputed and not self._is_scheduled(Op.OFFLOAD, action):
            return nullcontext()
        g, m, i = key = key_of(action)
        stage, piece, targets = self._stages[g], self._flight.batch.slices[m][i], self._flight.batch.targets[m][i]
        tokens = (piece.input_ids, piece.position_ids, targets)
        shared = self._storages[g] | {tensor.untyped_storage().data_ptr() for tensor in tokens}
        replay = Replay(SavedTensors(shared), self._recompute if recomputed else None, stage.owned.layers.start, hidden)
        self._flight.replays[key] = replay
        return replay.forward(store)

    def _saves(self) -> bool:
        """Whether what a forward saves is recomputed or moved."""
        return any(action.op in (Op.R, Op.OFFLOAD) for action in self._schedule.actions[self._rank])

    def _is_scheduled(self, op: Op, action: Action) -> bool:
        return Action(op, action.stage, action.microbatch, action.slice) in self._schedule.positions

    def _loss(self, total: Tensor, count: Tensor) -> Tensor:
        """This slice's part of the global mean: its sum over the valid tokens of the whole batch (rule 9)."""
        self._flight.loss += total.detach()
        self._flight.count += count
        return total / (self._flight.batch.num_valid / self._flight.batch.loss_scale)

    def _replay(self, action: Action) -> None:
        """R: under the autocast of F, since both belong to one step."""
        g, m, _ = key = key_of(action)
        self._await_reload(key)
        began = self._stopwatch.mark()
        store = self._flight.stores[g, m]
        self._flight.replays[key].replay(lambda hidden: self._compute(action, hidden, store), store)
        self._stopwatch.record(action, began)

    def _offload(self, action: Action) -> None:
        began = self._stopwatch.mark()
        key = key_of(action)
        self._flight.offloaded[key] = self._host.store(self._flight.replays[key].saved.take_out())
        self._stopwatch.record(action, began)

    def _reload(self, action: Action) -> None:
        began = self._stopwatch.mark()
        key = key_of(action)
        self._flight.replays[key].saved.put_back(self._flight.offloaded[key].load())
        self._stopwatch.record(action, began)

    def _await_reload(self, key: Key) -> None:
        if key in self._flight.offloaded:
            offloaded = self._flight.offloaded.pop(key)
            offloaded.wait()
            offloaded.close()

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
        self._flight.weights[key_of(action)] = work

    def _differentiate(self, action: Action) -> list[Action]:
        """The backward of one slice. Returns the messages whose buffers it worked on."""
        g, m, i = key = key_of(action)
        stage, flight = self._stages[g], self._flight
        gradient = None if stage.is_last else self._output_gradient(action)
        self._await_reload(key)
        began = self._stopwatch.mark()
        root = flight.roots.pop(key)
        flight.replays.pop(key, None)
        if root is not None:
            torch.autograd.backward(root, gradient)
        del root  # its graph
        if i == 0:
            flight.stores.pop((g, m)).free()
        self._stopwatch.record(action, began)
        if g > 0:
            sent = flight.input_gradients.pop(key, None)
            if sent is None:
                sent = self._zeros(action)
            if gradient is not None and sent.data_ptr() == gradient.data_ptr():
                sent = sent.clone()  # a stage that changed nothing: the buffer goes back to the pool before it is sent
            self._hand_on(Action(Op.SEND_B, g, m, i), sent, flight.gradients, (g - 1, m, i))
        received = [self._awaited(action)]
        if not self._is_scheduled(Op.OFFLOAD, action):
            received.append(self._awaited(Action(Op.F, g, m, i)))
        return [message for message in received if message is not None]

    def _zeros(self, action: Action) -> Tensor:
        """The gradient of an input that nothing depends on."""
        shape, dtype = self._hidden(action)
        return torch.zeros(shape, dtype=dtype, device=self._device)

    def _backward_weights(self, action: Action) -> None:
        began = self._stopwatch.mark()
        for add_gradient in self._flight.weights.pop(key_of(action)):
            add_gradient()
        self._stopwatch.record(action, began)

    def _output_gradient(self, action: Action) -> Tensor:
        """The gradient B starts from: received, or left by a stage of this rank."""
        awaited = self._awaited(action)
        return self._receive(awaited) if awaited else self._flight.gradients.pop(key_of(action))

    def _hand_on(self, send: Action, tensor: Tensor, local: dict[Key, Tensor], key: Key) -> None:
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
        self._transport.post_receive(channel(action, self._schedule), action.other_end, *self._hidden(action))

    def _hidden(self, action: Action) -> tuple[torch.Size, torch.dtype]:
        """Shape (b, T, hidden) and dtype of what stages hand on to each other."""
        piece, stage = self._flight.batch.slices[action.microbatch][action.slice], self._stages[action.stage]
        return stage.hidden_shape(piece), stage.hidden_dtype

    def _receive(self, message: Action) -> Tensor:
        tensor = self._transport.receive(message)
        self._stopwatch.record(message.other_end, self._posted.pop(message))
        return tensor

    def _reduce(self, action: Action) -> None:
        began = self._stopwatch.mark()
        assert self._reduce_gradients is not None
        self._reduce_gradients(action.stage)
        self._stopwatch.record(action, began)


def run_together(executors: list[Executor], schedule: Schedule, batch: Batch) -> None:
    """Run the ranks of this process in turn, each as far as it gets: one rank, or all of a pipeline in one process."""
    with ExitStack() as stack:
        rows = [stack.enter_context(closing(executor.start(schedule, batch))) for executor in executors]
        _take_turns(rows, schedule)


def _take_turns(rows: list[Generator[Action]], schedule: Schedule) -> None:
    awaiting: dict[Generator[Action], Action | None] = dict.fromkeys(rows)
    while awaiting:
        before = dict(awaiting)
        awaiting = {actions: action for actions in awaiting if (action := next(actions, None)) is not None}
        if awaiting == before:
            waiting = [action for action in awaiting.values() if action is not None]
            reports = [report_wait(schedule, schedule.placement[action.stage], action) for action in waiting]
            raise RuntimeError("\n".join(["no rank can go on:", *reports]))
