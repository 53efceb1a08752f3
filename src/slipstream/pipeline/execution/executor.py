"""Interprets one rank's lowered actions with real tensors: a handler per op, and a timeline of them."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, closing, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from slipstream.attention import ContextStore, HostContext
from slipstream.comm import Transport, TransportError
from slipstream.model import (
    PipelineStage,
    RecomputePolicy,
    Tensors,
    WeightGradient,
    copied_from_messages,
    defer_weight_gradients,
    factors_of,
)
from slipstream.model.hooks import note_output
from slipstream.options import tokens_on_host
from slipstream.pipeline.cut_batch import SplitBatch
from slipstream.pipeline.execution.action_graphs import ActionRunner, Computation
from slipstream.pipeline.execution.losses import Losses
from slipstream.pipeline.execution.rank_program import ProgramStep, SliceKey, program_of
from slipstream.pipeline.execution.saved_activations import BlockMoves, SavedActivations
from slipstream.pipeline.execution.spread_head import SpreadHeadActions
from slipstream.pipeline.execution.step_state import (
    Observer,
    StageMessages,
    StepState,
    Stopwatch,
    backward,
    keep_apart,
    roots_of,
    stage_inputs,
    with_zeros,
)
from slipstream.schedule import RECEIVES, SENDS, Action, Op, Schedule, report_wait
from slipstream.timeline import Span
from slipstream.watchdog import board, note_order


class Executor:
    """Runs the actions of one pipeline rank: `start` a batch, then iterate; `finish` checks that nothing is left."""

    def __init__(
        self,
        rank: int,
        stages: Mapping[int, PipelineStage],
        transport: Transport,
        losses: Losses,
        device: torch.device,
        recompute: RecomputePolicy | None,
        reduce_gradients: Callable[[int], None],
        context_on_host: HostContext | None = None,
        has_wide_sums: bool = True,
    ) -> None:
        """`recompute` is the policy of the schedule's R actions, None for all. `reduce_gradients` carries out a stage's
        REDUCE_GRAD. `context_on_host` is where keys and values lie, None: on the device; their gradients are summed in
        float32 or wider with `has_wide_sums`, else in their type."""
        self._rank = rank
        self._stages = stages
        self._transport = transport
        self._device = device
        self._losses = losses
        self._context_on_host = context_on_host
        self._has_wide_sums = has_wide_sums
        self._saved = SavedActivations(stages, recompute, device)
        self._schedule: Schedule | None = None
        self._head: SpreadHeadActions | None = None  # None unless the vocabulary is spread
        self.log_probabilities: dict[int, Tensor] = {}  # the last step's, by microbatch
        self._handlers: dict[Op, Callable[[ProgramStep], None]] = {
            Op.F: self._forward,
            Op.B: self._backward,
            Op.I: self._backward_input,
            Op.W: self._backward_weights,
            Op.R: self._replay,
            Op.OFFLOAD: partial(self._timed, self._saved.offload),
            Op.RELOAD: partial(self._timed, self._saved.reload),
            **dict.fromkeys(SENDS, self._send),
            **dict.fromkeys(RECEIVES, self._post_receive),
            Op.REDUCE_GRAD: partial(self._timed, lambda step: reduce_gradients(step.action.stage)),
            **dict.fromkeys((Op.V, Op.L, Op.VW, Op.E, Op.EW), self._run_rows),
        }

    def observe(self, observer: Observer) -> None:
        """Calls the observer around every action from now on."""
        self._handlers = {op: partial(self._observed, observer, handler) for op, handler in self._handlers.items()}

    def start(
        self,
        schedule: Schedule,
        batch: SplitBatch,
        run: ActionRunner | None = None,
        state: StepState | None = None,
        moves: BlockMoves | None = None,
    ) -> Generator[Action]:
        """Runs this rank's actions of a lowered schedule, and yields before each that must wait for a message.

        Only where ranks share a process do the yielded actions matter: then the next rank runs. `run` does an action's
        computing, by default eagerly; `state` is empty, of this batch; `moves` offloads, by default eagerly.
        """
        if schedule is not self._schedule:
            self._schedule, self._program = schedule, program_of(schedule, self._rank)
            self._has_backward = schedule.has_backward
            self._saves = any(step.is_recomputed or step.is_offloaded for step in self._program)
            self._parameters = {g: [*stage.model.parameters()] for g, stage in self._stages.items()}
        self._run, self._state = run, state or StepState.of(batch, self._device)
        self._stopwatch = Stopwatch(self._rank, self._device)
        self._messages = StageMessages(schedule, self._stages, self._transport, self._state, self._stopwatch)
        self._head = None
        if schedule.spreads_vocabulary and (far := self._messages.far) is not None:
            self._head = SpreadHeadActions(schedule, self._stages, far, self._state, self._stopwatch)
        if self._saves:
            self._saved.begin(self._state, moves)
        return self._actions(schedule)

    def finish(self) -> tuple[Tensor, Tensor]:
        """Returns (sum, count) of the losses of this rank's slices. Raises RuntimeError if anything is left over."""
        self._transport.finish()
        self.log_probabilities, self._state.log_probabilities = self._state.log_probabilities, {}
        leftovers = self._state.leftovers()
        if self._messages.far is not None:
            leftovers += self._messages.far.leftovers()
        if self._head is not None:
            leftovers += self._head.leftovers()
        if leftovers:
            raise RuntimeError(f"rank {self._rank} still holds {'; '.join(leftovers)} at the end of a step")
        return self._state.loss, self._state.count

    @property
    def spans(self) -> list[Span]:
        """The spans of the last step's actions."""
        return self._stopwatch.spans()

    def _actions(self, schedule: Schedule) -> Generator[Action]:
        mine = board()
        note_order(self._rank, schedule)
        try:
            for index, step in enumerate(self._program):
                action = step.action
                if mine is not None:
                    mine.set_action(index)
                for awaited in step.messages:
                    while not self._transport.may_receive(awaited):
                        yield action
                self._handlers[action.op](step)
            if mine is not None:
                mine.set_action(-1)
        except TransportError as error:
            raise TransportError(f"{error}\n{report_wait(schedule, self._rank, action)}") from error

    def _observed(self, observer: Observer, handler: Callable[[ProgramStep], None], step: ProgramStep) -> None:
        observer.before(step.action, self._state)
        handler(step)
        observer.after(step.action, self._state)

    def _timed(self, handler: Callable[[ProgramStep], None], step: ProgramStep) -> None:
        began = self._stopwatch.mark()
        handler(step)
        self._stopwatch.record(step.action, began)

    def _send(self, step: ProgramStep) -> None:
        began = self._stopwatch.mark()
        self._messages.send(step)
        self._stopwatch.record(step.action, began)

    def _post_receive(self, step: ProgramStep) -> None:
        self._messages.post_receive(step)

    def _run_rows(self, step: ProgramStep) -> None:
        assert self._head is not None
        self._head.run(step)

    def _timed_run(self, step: ProgramStep, inputs: Tensors, compute: Computation) -> Tensors:
        began = self._stopwatch.mark()
        outputs = compute(inputs) if self._run is None else self._run(step.action, inputs, compute)
        self._stopwatch.record(step.action, began)
        return outputs

    def _forward(self, step: ProgramStep) -> None:
        """Runs F: takes the inputs, computes, and hands on the outputs, or spreads the input of the head."""
        stage = self._stages[step.action.stage]
        inputs = self._inputs(step)
        compute = partial(self._compute_forward, step)
        # Timed here, not by _timed_run, so that a layer's forward has one frame fewer above it.
        began = self._stopwatch.mark()
        outputs = compute(inputs) if self._run is None else self._run(step.action, inputs, compute)
        self._stopwatch.record(step.action, began)
        if not step.trains:
            outputs = copied_from_messages(outputs, inputs)
            self._messages.release(step)
        if not stage.is_last:
            self._messages.hand_on(step, outputs, self._state.handed)
        elif self._head is not None:
            self._head.spread(step, *outputs)

    def _inputs(self, step: ProgramStep) -> Tensors:
        """Returns the inputs of F; the first stage has none, or the embeddings where all ranks' rows embed."""
        if step.action.stage == 0:
            return () if self._head is None or not self._head.embeds else (self._head.embedded(step),)
        inputs = self._messages.take(step, self._state.handed)
        if not step.is_offloaded:
            return inputs
        # Only a tensor of its own can move to the host, and the message's buffer is reused.
        inputs = tuple(tensor.clone() for tensor in inputs)
        self._messages.release(step)
        return inputs

    def _compute_forward(self, step: ProgramStep, inputs: Tensors) -> Tensors:
        """Returns the message of F, empty where it ends in the loss, and keeps the beginning of its backward."""
        g, m, i = key = step.key
        stage = self._stages[g]
        state = self._state
        if (store := state.stores.get((g, m))) is None:
            length = state.batch.slices[m][i].length
            host = self._context_on_host
            slices = state.batch.microbatches[m].slices
            num_on_host = None if host is None else tokens_on_host(slices, host.share)
            store = state.stores[g, m] = ContextStore(length, host, self._has_wide_sums, num_on_host)
        if step.trains:
            specs = self._messages.specs(Op.RECV_F, key)
            on_gradient = state.input_gradients.setdefault(key, {}).__setitem__
            is_saved = step.is_recomputed or step.is_offloaded
            with self._saved.around_forward(step, inputs, store) if is_saved else nullcontext():
                outputs = self._compute(key, stage_inputs(inputs, specs, on_gradient), store)
        else:
            with torch.no_grad():
                outputs = self._compute(key, inputs, store)
            if step.is_last_slice:
                state.stores.pop((g, m)).free()
        if stage.has_loss:
            outputs = (self._losses.add(outputs, state, key, self._has_backward),)
        if step.trains and not (step.is_recomputed and self._saved.repeats_graph):
            state.roots[key] = roots_of(outputs)
        return () if stage.has_loss else tuple(map(Tensor.detach, outputs))

    def _compute(self, key: SliceKey, inputs: Tensors, store: ContextStore) -> Tensors:
        """Runs the code of F and R: returns the stage's outputs, or of the last one the tensors of its loss."""
        g, m, i = key
        outputs: Any = self._stages[g].compute(self._state.batch.slices[m][i], inputs, store)
        if not self._stages[g].has_loss:
            return outputs  # type: ignore[no-any-return]
        computed = self._losses.compute(outputs, self._state, key)
        note_output("loss_fn", computed)
        return computed

    def _replay(self, step: ProgramStep) -> None:
        """Runs R, under the autocast of F, since both belong to one step."""
        if step.is_offloaded:
            self._saved.await_reload(step)
        self._timed_run(step, (), partial(self._recompute, step.key))

    def _recompute(self, key: SliceKey, _inputs: Tensors) -> Tensors:
        g, m, _ = key
        state = self._state
        store = state.stores[g, m]
        specs = self._messages.specs(Op.RECV_F, key)
        on_gradient = state.input_gradients[key].__setitem__

        def run(inputs: Tensors) -> Tensors:
            return self._compute(key, stage_inputs(inputs, specs, on_gradient), store)

        outputs = state.replays[key].replay(run, store)
        if outputs is not None:
            # Of a loss the backward begins with the first of its tensors.
            state.roots[key] = roots_of(outputs[:1] if self._stages[g].has_loss else outputs)
        return ()

    def _backward(self, step: ProgramStep) -> None:
        for message in self._differentiate(step, self._compute_backward):
            self._transport.release(message)

    def _backward_input(self, step: ProgramStep) -> None:
        # All but the weight gradients of linear layers. W needs the received tensors, so it releases them.
        self._state.for_weights[step.key] = self._differentiate(step, self._compute_input_gradients)

    def _differentiate(self, step: ProgramStep, compute: Callable[[SliceKey, Tensors], Tensors]) -> list[Action]:
        """Runs the backward of one slice, and returns the messages whose buffers it worked on."""
        has_loss = self._stages[step.action.stage].has_loss
        gradients = () if has_loss else self._messages.take(step, self._state.gradients)
        if step.is_offloaded:
            self._saved.await_reload(step)
        full = self._timed_run(step, gradients, partial(compute, step.key))
        # a stage that changed nothing: a received buffer goes back to the pool before it is sent on
        full = copied_from_messages(full, gradients)
        if step.neighbour is not None:
            self._messages.hand_on(step, full, self._state.gradients)
        elif full and self._head is not None:
            self._head.spread(step, *full)
        received = self._messages.received(step)
        return received if step.is_offloaded else received + self._messages.received(step, of_forward=True)

    def _compute_backward(
        self, key: SliceKey, gradients: Tensors, deferred: Sequence[WeightGradient] | None = None
    ) -> Tensors:
        """Returns the gradients of a slice's inputs on its stage, given those of its outputs; of an I, `deferred` gets
        the weight gradients that it leaves to W."""
        g, m, i = key
        stage = self._stages[g]
        state = self._state
        roots = state.roots.pop(key)
        state.replays.pop(key, None)
        needing = [index for index, spec in enumerate(self._messages.specs(Op.SEND_F, key)) if spec.needs_gradient]
        begun = [parameter for parameter in self._parameters[g] if parameter.grad is None]
        # the gradient with which the backward of a slice's sum of losses begins, (), or of sequences' sums, (n,)
        of_loss = {0: state.loss_gradients.get(m, state.loss_weight)}
        backward(roots, of_loss if stage.has_loss else dict(zip(needing, gradients, strict=True)))
        del roots  # their graph
        if i == 0:
            state.stores.pop((g, m)).free()
            if stage.has_loss:
                state.loss_gradients.pop(m, None)
        # taken out, as W may hold the graph that left them
        of_inputs = with_zeros(state.input_gradients.pop(key, {}), self._messages.specs(Op.RECV_F, key), self._device)
        if begun:
            keep_apart(begun, (*gradients, *of_inputs, *factors_of(deferred or ())))
        return of_inputs

    def _compute_input_gradients(self, key: SliceKey, gradients: Tensors) -> Tensors:
        with defer_weight_gradients() as work:
            input_gradients = self._compute_backward(key, gradients, work)
        self._state.weights[key] = work
        return input_gradients

    def _backward_weights(self, step: ProgramStep) -> None:
        """Runs W: adds the weight gradients that I has left."""
        self._timed_run(step, (), partial(self._add_weight_gradients, step.key))
        for message in self._state.for_weights.pop(step.key):
            self._transport.release(message)

    def _add_weight_gradients(self, key: SliceKey, _inputs: Tensors) -> Tensors:
        for add_gradient in self._state.weights.pop(key):
            add_gradient()
        return ()


class RankStep(NamedTuple):
    """How a rank runs a step: by default eagerly, from an empty state."""

    run: ActionRunner | None = None
    state: StepState | None = None
    moves: BlockMoves | None = None


def run_together(
    executors: Sequence[Executor], schedule: Schedule, batch: SplitBatch, steps: Sequence[RankStep] | None = None
) -> None:
    """Runs the ranks of this process alternately, each as far as it gets: one, or all of a pipeline."""
    pairs = zip(executors, steps or [RankStep()] * len(executors), strict=True)
    with ExitStack() as stack:
        awaiting: dict[Generator[Action], Action | None] = {}
        for executor, step in pairs:
            awaiting[stack.enter_context(closing(executor.start(schedule, batch, *step)))] = None
        while awaiting:
            before = dict(awaiting)
            for actions in before:
                action = next(actions, None)
                if action is None:
                    del awaiting[actions]
                else:
                    awaiting[actions] = action
            if awaiting == before:
                waiting = [action for action in awaiting.values() if action is not None]
                reports = [report_wait(schedule, schedule.placement[action.stage], action) for action in waiting]
                raise RuntimeError("\n".join(["no rank can continue:", *reports]))
