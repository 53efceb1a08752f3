"""Interprets one rank's lowered actions with real tensors: a handler per op, and a timeline of what ran when."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, closing
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from slipstream.attention import ContextStore
from slipstream.comm import Message, Transport, TransportError
from slipstream.model import Tensors, copied_from_messages
from slipstream.model.autograd_memory import RecomputePolicy
from slipstream.model.hooks import note_output
from slipstream.model.weight_gradients import defer_weight_gradients
from slipstream.pipeline.batch import SplitBatch, Stage
from slipstream.pipeline.execution.action_graphs import ActionRunner, Computation, run_eagerly
from slipstream.pipeline.execution.losses import Losses
from slipstream.pipeline.execution.saved_activations import BlockMoves, SavedActivations
from slipstream.pipeline.execution.spread_head import SpreadHeadActions
from slipstream.pipeline.execution.stage_messages import StageMessages, Stopwatch
from slipstream.pipeline.execution.step_state import (
    Observer,
    StepState,
    backward,
    entrances,
    keep_apart,
    key_of,
    roots_of,
    with_zeros,
)
from slipstream.schedule import Action, Op, Schedule, awaited_send, report_wait
from slipstream.timeline import Span
from slipstream.watchdog import board, note_order


class Executor:
    """Runs the actions of one pipeline rank: `start` a batch, then iterate; `finish` checks that nothing is left."""

    def __init__(
        self,
        rank: int,
        stages: Mapping[int, Stage],
        transport: Transport,
        losses: Losses,
        device: torch.device,
        recompute: RecomputePolicy | None,
        reduce_gradients: Callable[[int], None],
    ) -> None:
        """`recompute` says what the schedule's R actions recompute, None all. `reduce_gradients` is what REDUCE_GRAD
        does to a stage."""
        self._rank, self._stages, self._transport, self._device = rank, stages, transport, device
        self._losses, self._reduce_gradients = losses, reduce_gradients
        self._saved = SavedActivations(stages, recompute, device)
        self.log_probabilities: dict[int, Tensor] = {}  # of the last step's whole sequences, by microbatch
        self._handlers: dict[Op, Callable[[Action], None]] = {
            Op.F: self._forward,
            Op.B: self._backward,
            Op.I: self._backward_input,
            Op.W: self._backward_weights,
            Op.R: self._replay,
            Op.OFFLOAD: partial(self._timed, self._saved.offload),
            Op.RELOAD: partial(self._timed, self._saved.reload),
            Op.SEND_F: partial(self._timed, lambda action: self._messages.send(action)),
            Op.SEND_B: partial(self._timed, lambda action: self._messages.send(action)),
            Op.RECV_F: lambda action: self._messages.post_receive(action),
            Op.RECV_B: lambda action: self._messages.post_receive(action),
            Op.REDUCE_GRAD: partial(self._timed, self._reduce),
            Op.V: lambda action: self._head.logits(action, self._stopwatch),
            Op.L: lambda action: self._head.loss(action, self._stopwatch),
            Op.VW: lambda action: self._head.weights(action, self._stopwatch),
            Op.E: lambda action: self._head.look_up(action, self._stopwatch),
            Op.EW: lambda action: self._head.add_lookups(action, self._stopwatch),
        }

    def observe(self, observer: Observer) -> None:
        """Calls the observer around every action from now on."""
        self._handlers = {op: partial(self._observed, observer, handler) for op, handler in self._handlers.items()}

    def start(
        self,
        schedule: Schedule,
        batch: SplitBatch,
        run: ActionRunner = run_eagerly,
        state: StepState | None = None,
        moves: BlockMoves | None = None,
    ) -> Generator[Action]:
        """Runs this rank's actions of a lowered schedule, and yields before each that must wait for a message.

        Only where ranks share a process does what is yielded matter: then the next rank runs. `run` computes what an
        action computes; `state` is empty, of this batch; `moves` offloads, by default eagerly.
        """
        self._schedule, self._run = schedule, run
        self._state = state or StepState.of(batch, self._device)
        self._stopwatch = Stopwatch(self._rank, self._device)
        self._parameters = {g: [*stage.model.parameters()] for g, stage in self._stages.items()}
        place = self._rank, schedule, self._stages
        self._messages = StageMessages(*place, self._transport, self._state, self._stopwatch)
        self._head = SpreadHeadActions(self._rank, schedule, self._stages, self._transport, self._state)
        self._saved.begin(schedule, self._rank, self._state, moves)
        return self._actions(schedule.actions[self._rank])

    def finish(self) -> tuple[Tensor, Tensor]:
        """Returns (sum, count) of the losses of this rank's slices. Raises RuntimeError if anything is left over."""
        self._transport.finish()
        self.log_probabilities, self._state.log_probabilities = self._state.log_probabilities, {}
        leftovers = self._state.leftovers() + self._messages.leftovers() + self._head.leftovers()
        if leftovers:
            raise RuntimeError(f"rank {self._rank} still holds {'; '.join(leftovers)} at the end of a step")
        return self._state.loss, self._state.count

    @property
    def spans(self) -> list[Span]:
        """The spans of the last step's actions."""
        return self._stopwatch.spans()

    def _actions(self, actions: tuple[Action, ...]) -> Generator[Action]:
        state, mine = self._state, board()
        note_order(self._rank, self._schedule)
        try:
            for index, action in enumerate(actions):
                if mine is not None:
                    mine.set_action(index)
                awaited = awaited_send(action, self._schedule)
                while awaited is not None and not self._transport.may_receive(awaited):
                    yield action
                while not self._head.messages.may_run(action):
                    yield action
                self._handlers[action.op](action)
            if mine is not None:
                mine.set_action(-1)
        except TransportError as error:
            raise TransportError(f"{error}\n{report_wait(self._schedule, self._rank, action)}") from error
        finally:
            for offloaded in state.offloaded.values():  # of a step that failed
                offloaded.close()

    def _timed(self, handler: Callable[[Action], None], action: Action) -> None:
        began = self._stopwatch.mark()
        handler(action)
        self._stopwatch.record(action, began)

    def _observed(self, observer: Observer, handler: Callable[[Action], None], action: Action) -> None:
        observer.before(action, self._state)
        handler(action)
        observer.after(action, self._state)

    def _forward(self, action: Action) -> None:
        g, m, i = key_of(action)
        inputs, stage = self._inputs(action), self._stages[g]
        outputs = self._timed_run(action, inputs, partial(self._compute_forward, action))
        if not self._schedule.trains(g):
            outputs = copied_from_messages(outputs, inputs)
            self._messages.release(self._messages.received(action))
        if stage.is_last and not stage.has_loss:
            self._head.spread(action, *outputs)
        elif not stage.is_last:
            self._messages.hand_on(Action(Op.SEND_F, g, m, i), outputs, self._state.handed, (g + 1, m, i))

    def _compute_forward(self, action: Action, inputs: Tensors) -> Tensors:
        """Returns what F hands on, nothing where it ends in the loss, and keeps the beginning of its backward."""
        g, m, i = key = key_of(action)
        stage, state = self._stages[g], self._state
        store = state.stores.setdefault((g, m), ContextStore(state.batch.slices[m][i].length))
        if trains := self._schedule.trains(g):
            specs = self._messages.specs(Op.RECV_F, key)
            with self._saved.around_forward(action, inputs, [spec.needs_gradient for spec in specs], store):
                leave = state.input_gradients.setdefault(key, {}).__setitem__
                outputs = self._compute(action, entrances(inputs, specs, leave), store)
        else:
            with torch.no_grad():
                outputs = self._compute(action, inputs, store)
            self._end_forward_only(action)
        if stage.has_loss:
            outputs = (self._losses.add(outputs, state, key, self._schedule.has_backward),)
        if trains:
            state.roots[key] = roots_of(outputs)
        return () if stage.has_loss else tuple(output.detach() for output in outputs)

    def _compute(self, action: Action, inputs: Tensors, store: ContextStore) -> Tensors:
        """Runs what F runs and R repeats: returns the stage's outputs, or what the last one's loss needs of them."""
        g, m, i = key = key_of(action)
        outputs: Any = self._stages[g].compute(self._state.batch.slices[m][i], inputs, store)
        if not self._stages[g].has_loss:
            return outputs  # type: ignore[no-any-return]
        computed = self._losses.compute(outputs, self._state, key)
        note_output("loss_fn", computed)
        return computed

    def _inputs(self, action: Action) -> Tensors:
        """Returns the inputs of F; the first stage has none, or what the rows of a spread embedding give."""
        if action.stage == 0:
            return (self._head.embedded(action),) if self._schedule.spreads_embedding else ()
        inputs = self._messages.take_inputs(action)
        if not self._saved.is_offloaded(action):
            return inputs
        inputs = tuple(tensor.clone() for tensor in inputs)  # to be moved to the host, which no buffer can be
        self._messages.release(self._messages.received(action))
        return inputs

    def _replay(self, action: Action) -> None:
        """Runs R, under the autocast of F, since both belong to one step."""
        self._saved.await_reload(key_of(action))
        self._timed_run(action, (), partial(self._recompute, action))

    def _recompute(self, action: Action, _inputs: Tensors) -> Tensors:
        g, m, _ = key = key_of(action)
        store = self._state.stores[g, m]
        self._state.replays[key].replay(lambda inputs: self._compute(action, inputs, store), store)
        return ()

    def _end_forward_only(self, action: Action) -> None:
        if action.slice == self._schedule.slice_counts[action.microbatch] - 1:
            self._state.stores.pop((action.stage, action.microbatch)).free()

    def _backward(self, action: Action) -> None:
        self._messages.release(self._differentiate(action, self._compute_backward))

    def _backward_input(self, action: Action) -> None:
        """Runs I: everything but the weight gradients of linear layers. W needs what came in, so it releases that."""
        self._state.for_weights[key_of(action)] = self._differentiate(action, self._compute_input_gradients)

    def _differentiate(self, action: Action, compute: Callable[[Action, Tensors], Tensors]) -> list[Message]:
        """Runs the backward of one slice, and returns the messages whose buffers it worked on."""
        g, m, i = key = key_of(action)
        gradients = () if self._stages[g].has_loss else self._messages.take_gradients(action)
        self._saved.await_reload(key)
        full = self._timed_run(action, gradients, partial(compute, action))
        # a stage that changed nothing: a received buffer goes back to the pool before it is sent on
        full = copied_from_messages(full, gradients)
        if g > self._schedule.num_frozen_stages:
            self._messages.hand_on(Action(Op.SEND_B, g, m, i), full, self._state.gradients, (g - 1, m, i))
        elif full:
            self._head.spread(action, *full)
        received = self._messages.received(action)
        if not self._saved.is_offloaded(action):
            received += self._messages.received(Action(Op.F, g, m, i))
        return received

    def _compute_backward(self, action: Action, gradients: Tensors) -> Tensors:
        """Returns the gradients of a slice's inputs on its stage, given those of its outputs."""
        g, m, i = key = key_of(action)
        stage, state = self._stages[g], self._state
        roots = state.roots.pop(key)
        state.replays.pop(key, None)
        of_outputs = zip(self._messages.needing(Op.SEND_F, key), gradients, strict=True)
        begun = [each for each in self._parameters[g] if each.grad is None] if gradients else []
        backward(roots, {0: state.loss_gradient(m)} if stage.has_loss else dict(of_outputs))
        keep_apart(begun, gradients)
        del roots  # their graph
        if i == 0:
            state.stores.pop((g, m)).free()
            if stage.has_loss:
                state.loss_gradients.pop(m, None)
        found = state.input_gradients.pop(key, {})
        # taken out, as W may hold the graph that left them
        sent = [found.pop(index, None) for index in self._messages.needing(Op.RECV_F, key)]
        return with_zeros(sent, self._messages.specs(Op.RECV_F, key), self._device)

    def _compute_input_gradients(self, action: Action, gradients: Tensors) -> Tensors:
        with defer_weight_gradients() as work:
            found = self._compute_backward(action, gradients)
        self._state.weights[key_of(action)] = work
        return found

    def _backward_weights(self, action: Action) -> None:
        self._timed_run(action, (), partial(self._add_weight_gradients, action))
        self._messages.release(self._state.for_weights.pop(key_of(action)))

    def _add_weight_gradients(self, action: Action, _inputs: Tensors) -> Tensors:
        for add_gradient in self._state.weights.pop(key_of(action)):
            add_gradient()
        return ()

    def _timed_run(self, action: Action, inputs: Tensors, compute: Computation) -> Tensors:
        began = self._stopwatch.mark()
        outputs = self._run(action, inputs, compute)
        self._stopwatch.record(action, began)
        return outputs

    def _reduce(self, action: Action) -> None:
        self._reduce_gradients(action.stage)


class RankStep(NamedTuple):
    """How a rank runs a step: by default eagerly, from an empty state."""

    run: ActionRunner = run_eagerly
    state: StepState | None = None
    moves: BlockMoves | None = None


def run_together(
    executors: Sequence[Executor], schedule: Schedule, batch: SplitBatch, steps: Sequence[RankStep] | None = None
) -> None:
    """Runs the ranks of this process alternately, each as far as it gets: one, or all of a pipeline."""
    pairs = zip(executors, steps or [RankStep()] * len(executors), strict=True)
    with ExitStack() as stack:
        rows = [stack.enter_context(closing(executor.start(schedule, batch, *step))) for executor, step in pairs]
        awaiting: dict[Generator[Action], Action | None] = dict.fromkeys(rows)
        while awaiting:
            before = dict(awaiting)
            awaiting = {actions: action for actions in awaiting if (action := next(actions, None)) is not None}
            if awaiting == before:
                waiting = [action for action in awaiting.values() if action is not None]
                reports = [report_wait(schedule, schedule.placement[action.stage], action) for action in waiting]
                raise RuntimeError("\n".join(["no rank can continue:", *reports]))
