"""The state of a rank between the actions of a step, such as autograd graphs, and its stages' messages."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from slipstream.attention import ContextStore
from slipstream.autograd_calls import begin_graph
from slipstream.comm import Transport
from slipstream.host_memory import HostTensors
from slipstream.model import PipelineStage, SliceReplay, Tensors, TensorSpec, WeightGradient, storage_id, storage_ids
from slipstream.pipeline.cut_batch import SplitBatch
from slipstream.pipeline.execution.far_tensors import FarTensors
from slipstream.pipeline.execution.rank_program import ProgramStep, SliceKey
from slipstream.schedule import Action, Op, Schedule, sent_result
from slipstream.timeline import Span

Roots = dict[int, Tensor | GradientEdge]  # output index -> root of its backward


@dataclass
class StepState:
    """The tensors and graphs kept between the actions of a step; all are empty when the step ends."""

    batch: SplitBatch
    loss: Tensor  # sum over this rank's slices so far, float64
    count: Tensor
    loss_weight: Tensor  # weight of each valid token's loss in the differentiated sum, float64
    # By the index of the stage's input, for the stages before
    input_gradients: dict[SliceKey, dict[int, Tensor]] = field(default_factory=dict)
    roots: dict[SliceKey, Roots] = field(default_factory=dict)  # roots of the backward; empty if all is frozen
    replays: dict[SliceKey, SliceReplay] = field(default_factory=dict)  # recomputed or offloaded slices
    offloaded: dict[SliceKey, HostTensors] = field(default_factory=dict)
    handed: dict[SliceKey, Tensors] = field(default_factory=dict)  # outputs, for a stage on the same rank
    gradients: dict[SliceKey, Tensors] = field(default_factory=dict)  # gradients of outputs, from the same rank
    outgoing: dict[Action, Tensors] = field(default_factory=dict)  # computed, not yet sent
    weights: dict[SliceKey, list[WeightGradient]] = field(default_factory=dict)  # left by I for W
    for_weights: dict[SliceKey, list[Action]] = field(default_factory=dict)  # messages in buffers that W still reads
    sequence_sums: dict[int, Tensor] = field(default_factory=dict)  # sums of each microbatch's slices so far
    log_probabilities: dict[int, Tensor] = field(default_factory=dict)  # whole sequences' sums, by microbatch
    loss_gradients: dict[int, Tensor] = field(default_factory=dict)  # gradients of these sums, by microbatch
    stores: dict[tuple[int, int], ContextStore] = field(default_factory=dict)  # (stage, microbatch) -> keys and values

    @classmethod
    def of(cls, batch: SplitBatch, device: torch.device) -> StepState:
        """Returns the state of a step before its first action."""
        weight = torch.full((), batch.loss_weight, dtype=torch.float64, device=device)
        return cls(batch, torch.zeros_like(weight), torch.zeros_like(weight), weight)

    def leftovers(self) -> list[str]:
        left = []
        for name, held in vars(self).items():
            if isinstance(held, dict) and held:
                left.append(f"{name}: {list(held)}")
        return left


class Observer(Protocol):
    """The interface that an executor calls around every action, with the state of the step."""

    def before(self, action: Action, state: StepState) -> None: ...

    def after(self, action: Action, state: StepState) -> None: ...


def stage_inputs(inputs: Tensors, specs: Sequence[TensorSpec], on_gradient: Callable[[int, Tensor], None]) -> Tensors:
    """Returns a stage's inputs as the beginnings of its graph, which keeps none of their memory.

    `on_gradient` gets each gradient with the number of its input.
    """
    begun = [*inputs]
    token = torch.empty(0, requires_grad=True)
    for index, (tensor, spec) in enumerate(zip(inputs, specs, strict=True)):
        if spec.needs_gradient:
            begun[index] = begin_graph(token, tensor, partial(on_gradient, index))
    return tuple(begun)


def roots_of(outputs: Tensors) -> Roots:
    """Returns where the backward of a forward's outputs begins: not the tensors, whose memory the next stage needs."""
    roots: Roots = {}
    for index, output in enumerate(outputs):
        if output.requires_grad:
            roots[index] = output if output.dim() == 0 else get_gradient_edge(output)
    return roots


def keep_apart(parameters: Iterable[Tensor], others: Tensors) -> None:
    """Copies gradients that autograd has left in the memory of a message, received or to be sent, of W's factors, or of
    one another, as later gradients are added to them in place: the first of a sparse embedding, or of a parameter that
    was viewed, may be what a layer's output or input gets too."""
    used = set(storage_ids(others))
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is not None:
            values = gradient._values() if gradient.is_sparse else gradient
            if storage_id(values) in used:
                parameter.grad = gradient.clone()
            else:
                used.add(storage_id(values))


def backward(roots: Roots, gradients: Mapping[int, Tensor | None]) -> None:
    """Runs the backward from `roots`, given the gradients of outputs that something depends on; a loss has None.

    The last output comes first: where several are one tensor, their gradients are added up in the order in which
    autograd adds those of its users, the last first.
    """
    chosen: list[Any] = []
    begun: list[Tensor | None] = []
    for index in sorted(roots, reverse=True):
        if index in gradients:
            chosen.append(roots[index])
            begun.append(gradients[index])
    if chosen:
        torch.autograd.backward(chosen, begun)


def with_zeros(gradients: dict[int, Tensor], specs: Sequence[TensorSpec], device: torch.device) -> Tensors:
    """Takes out and returns the gradients of the inputs that need one, zeros for those on which nothing depends."""
    complete = []
    for index, spec in enumerate(specs):
        if spec.needs_gradient:
            gradient = gradients.pop(index, None)
            if gradient is None:
                gradient = torch.zeros(spec.shape, dtype=spec.dtype, device=device)
            complete.append(gradient)
    return tuple(complete)


class StageMessages:
    """The inputs, outputs and gradients of one rank's stages in one step, with the skips past others.

    Args:
        schedule: lowered.
        stages: of the rank.
        transport: sends and receives.
        state: holds messages to be sent, and those that stages of this rank left for each other.
        stopwatch: records how long messages were under way.
    """

    def __init__(
        self,
        schedule: Schedule,
        stages: Mapping[int, PipelineStage],
        transport: Transport,
        state: StepState,
        stopwatch: Stopwatch,
    ) -> None:
        self._transport = transport
        self._state = state
        self._stopwatch = stopwatch
        self._posted: dict[Action, Any] = {}  # time at which each message's receive was posted
        # Nothing here refers to itself: such a cycle would keep the step's tensors until the garbage collector runs.
        self.specs = partial(_specs, schedule, stages, state)
        """Returns the specs of what a stage receives or sends in messages of an op, given that and the slice's key."""
        self._far_specs = partial(_far_specs, schedule, stages, state)
        self._has_skips = False
        for stage in stages.values():
            self._has_skips |= stage.has_skips
        self.far: FarTensors | None = None
        if self._has_skips or schedule.spreads_vocabulary:
            received = partial(_note_received, self._posted, stopwatch)
            self.far = FarTensors(schedule, transport, state.outgoing, received)

    def take(self, step: ProgramStep, local: dict[SliceKey, Tensors]) -> Tensors:
        """Returns the input of F or a backward: received, or left in `local` by stages of this rank."""
        if step.awaited is None:
            regular = local.pop(step.key)
        else:
            regular = self._transport.receive(step.awaited)
            self._stopwatch.record(*self._posted.pop(step.awaited))
        if self.far is None or not self._has_skips:
            return regular
        specs = self.specs(Op.RECV_F if step.action.op is Op.F else Op.RECV_B, step.key)
        return (*regular, *self.far.take_all(step, specs))

    def hand_on(self, step: ProgramStep, tensors: Tensors, local: dict[SliceKey, Tensors]) -> None:
        """Passes the result of F or a backward to the neighbouring stage: as a message, or in `local` where that stage
        is here too. Skips are sent to their stages immediately."""
        assert step.neighbour is not None
        if self.far is not None and self._has_skips:
            tensors = self.far.hand_on_all(step, tensors, self.specs(step.result.op, step.key))
        if step.is_local:
            local[step.neighbour] = tuple(map(Tensor.detach, tensors))
        else:
            self._state.outgoing[step.result] = tensors

    def send(self, step: ProgramStep) -> None:
        """Runs a SEND."""
        assert step.channel is not None
        # A skip that needs no gradient has none to send back.
        self._transport.send(step.channel, step.action, self._state.outgoing.pop(step.action, ()))

    def post_receive(self, step: ProgramStep) -> None:
        """Runs a RECV: from now on the message may arrive."""
        assert step.channel is not None
        self._posted[step.message] = step.action, self._stopwatch.mark()
        if step.action.peer >= 0:
            specs = self._far_specs(step)
        else:
            specs = self.specs(step.action.op, step.key)
            if self._has_skips:
                specs = [spec for spec in specs if spec.peer is None]
        self._transport.post_receive(step.channel, step.message, specs)

    def release(self, step: ProgramStep) -> None:
        """Gives back the buffers of the messages that an action worked on."""
        for message in self.received(step):
            self._transport.release(message)

    def received(self, step: ProgramStep, of_forward: bool = False) -> list[Action]:
        """Returns the messages that an action works on, or with `of_forward` its slice's F."""
        awaited = step.forward_awaited if of_forward else step.awaited
        regular: list[Action] = [] if awaited is None else [awaited]
        return [*regular, *(step.forward_far if of_forward else step.far)] if self._has_skips else regular


def _note_received(posted: dict[Action, Any], stopwatch: Stopwatch, send: Action) -> None:
    stopwatch.record(*posted.pop(send))


def _far_specs(
    schedule: Schedule, stages: Mapping[int, PipelineStage], state: StepState, step: ProgramStep
) -> Sequence[TensorSpec]:
    """Returns the specs of the tensors in a message past neighbours that comes to a stage."""
    g, m, i = step.key
    if not schedule.spreads_vocabulary:
        specs = _specs(schedule, stages, state, step.action.op, step.key)
        return [spec for spec in specs if spec.peer == step.action.peer]
    made = sent_result(step.message, schedule).op
    return stages[g].rows_messages(made, state.batch.slices[m][i], schedule.has_backward)


def _specs(
    schedule: Schedule, stages: Mapping[int, PipelineStage], state: StepState, op: Op, key: SliceKey
) -> Sequence[TensorSpec]:
    """Returns the specs of a stage's tensors in such a message, with skips for SEND_F and SEND_B."""
    g, m, i = key
    stage = stages[g]
    piece = state.batch.slices[m][i]
    inwards = op in (Op.RECV_F, Op.SEND_B)  # messages about the stage's input, forward or backward
    specs = stage.receives(piece) if inwards else stage.sends(piece)
    # Frozen stages need no gradient of their outputs.
    if inwards and 0 < g <= schedule.num_frozen_stages:
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
        """Records the end, now, of the action that began at a mark."""
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
