"""Measures what each action holds, by running every stage of this process alone on two equal microbatches."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from slipstream.model import CausalLMStage as CausalStage
from slipstream.model import storage_bytes, storage_id
from slipstream.model.saving import RecomputePolicy
from slipstream.pipeline.batch import SplitBatch
from slipstream.pipeline.execution import Executor, StepState, run_together
from slipstream.pipeline.memory.live_memory import MemoryMeter, memory_meter, tensors_alive
from slipstream.pipeline.memory.made_up_messages import MadeUpMessages
from slipstream.pipeline.messages import HEADER_BYTES, Transport, part_size
from slipstream.pipeline.parameters import Parameters
from slipstream.pipeline.pipeline_options import LossFunction
from slipstream.pipeline.stage import Stage
from slipstream.schedule import BACKWARDS, RECEIVES, SENDS, Action, Op, Schedule
from slipstream.simulator import Footprint, MemoryTable, StageSlice

ADAMW_STATES = 2  # tensors per parameter, in its dtype: the running means of gradients and of their squares


@dataclass(frozen=True)
class RehearsedStep:
    """The parts of a pipeline, and of the step that it would run next, of which a rehearsal measures the memory."""

    schedule: Schedule  # lowered
    recompute: RecomputePolicy | None
    stages: Mapping[int, Stage]  # this process's
    parameters: Parameters
    loss_function: LossFunction
    device: torch.device
    scatter: Callable[[Transport], Transport]  # so that each of the tensor ranks sends a part
    num_parts: int  # into which tensor ranks divide a message
    batch: SplitBatch
    slices: tuple[int, ...]  # tokens of each
    token_ids: Tensor  # (batch, sequence)


def rehearse(step: RehearsedStep, optimizer_states: int = ADAMW_STATES) -> MemoryTable:
    """Measures the bytes of this process's stages in a step, with all that its schedule does.

    Every stage runs the first microbatch's slices forward and backward, from a made-up input, without weight gradients
    to begin with, and then again with those. Parameters and `.grad` end as they were. On the CPU tensors are counted,
    on CUDA what its allocator has allocated. Not for rows of several documents. `optimizer_states` is the number of
    tensors that the optimizer keeps for every parameter.
    """
    rehearsal = _StageRehearsal(step)
    runs = [run for number in step.stages for run in rehearsal.rehearse(number)]
    owned = _owned_tensors(step.stages)
    updated = {
        number: step.parameters.bytes_of(t for t in tensors if isinstance(t, torch.nn.Parameter))
        for number, tensors in owned.items()
    }
    return MemoryTable(
        footprints={key: found for run in runs for key, found in run.footprints().items()},
        first={key: peak for run in runs for key, peak in run.first_peaks().items()},
        context={run.stage: run.context for run in runs},
        context_gradients={run.stage: run.context_gradients for run in runs},
        message_bytes=rehearsal.message_bytes,
        header_bytes=HEADER_BYTES,
        parameters={number: storage_bytes(tensors) + updated[number][0] for number, tensors in owned.items()},
        gradients={key: size for run in runs for key, size in run.gradients().items()},
        optimizer={number: optimizer_states * size for number, (_, size) in updated.items()},
    )


@dataclass(frozen=True)
class _Level:
    """The bytes that are alive, and how many of them are context and weight gradients."""

    total: int
    context: int
    gradients: int


@dataclass(frozen=True)
class _Change:
    """The change by one action."""

    total: int
    peak: int  # above what was there
    context: int
    gradients: int


@dataclass(frozen=True)
class _Run:
    """The changes by the actions of one stage, whose slices are all treated alike."""

    like: StageSlice  # of slice 0, for all
    num_slices: int
    changes: Mapping[Action, _Change]

    @property
    def stage(self) -> int:
        return self.like.stage

    @property
    def context(self) -> int:
        """The bytes of keys and values after the first forward."""
        return self.changes[Action(Op.F, self.stage, 1, 0)].context

    @property
    def context_gradients(self) -> int:
        """The bytes of their gradients after the first backward; a slice that is alone leaves none."""
        return sum(change.context for action, change in self.changes.items() if self._is_first_backward(action, 1))

    def footprints(self) -> dict[tuple[StageSlice, Op], Footprint]:
        """The footprints in the second microbatch, which adds to weight gradients that exist."""
        found = {}
        for action, change in self.changes.items():
            if action.microbatch == 1 and action.op not in SENDS:
                leaves = change.total - change.context - change.gradients + self._freed_by_send(action)
                found[self._unit(action), action.op] = Footprint(leaves, change.peak)
        return found

    def first_peaks(self) -> dict[tuple[StageSlice, Op], float]:
        """The peaks of the first microbatch's first backward, which makes the weight gradients."""
        return {
            (self._unit(action), action.op): change.peak
            for action, change in self.changes.items()
            if self._is_first_backward(action, 0) or action == Action(Op.W, self.stage, 0, self.num_slices - 1)
        }

    def gradients(self) -> dict[tuple[int, Op], float]:
        """The bytes of weight gradients that the first microbatch makes."""
        made: defaultdict[tuple[int, Op], float] = defaultdict(float)
        for action, change in self.changes.items():
            if action.microbatch == 0 and action.op in BACKWARDS:
                made[self.stage, action.op] += change.gradients
        return made

    def _unit(self, action: Action) -> StageSlice:
        return self.like._replace(slice=action.slice)

    def _is_first_backward(self, action: Action, microbatch: int) -> bool:
        """Backwards run from the last slice to the first."""
        return action.op in (Op.B, Op.I) and (action.microbatch, action.slice) == (microbatch, self.num_slices - 1)

    def _freed_by_send(self, action: Action) -> int:
        """Returns the size of an action's result, below 0: it is counted with the messages."""
        op = {Op.F: Op.SEND_F, Op.B: Op.SEND_B, Op.I: Op.SEND_B}.get(action.op)
        sent = None if op is None else self.changes.get(action.with_op(op))
        return 0 if sent is None else sent.total


class _StageRehearsal:
    """Runs stages alone: what other ranks send is made up, what they receive is dropped."""

    def __init__(self, step: RehearsedStep) -> None:
        batch = step.batch
        self._step = step
        self._batch = SplitBatch([batch.slices[0]] * 2, [batch.targets[0]] * 2, batch.num_valid)
        self._schedule = step.schedule
        self._transport = step.scatter(MadeUpMessages(step.device))

    @property
    def message_bytes(self) -> list[float]:
        """The bytes of each slice's message."""
        stage = next(iter(self._step.stages.values()))
        assert isinstance(stage, CausalStage)
        pieces: Any = self._batch.slices[0]
        sizes = [stage.hidden(piece).shape.numel() for piece in pieces]
        return [part_size(size, self._step.num_parts) * stage.hidden_dtype.itemsize for size in sizes]

    def rehearse(self, number: int) -> Iterator[_Run]:
        """All that is done to some slice of a stage in the schedule, each of it to all its slices."""
        actions = [action for action in self._schedule.positions if action.stage == number]
        ops = {action.op for action in actions}
        for like in {StageSlice.of(action, self._schedule)._replace(slice=0) for action in actions}:
            for split in (False, True):
                if (Op.I if split else Op.B) in ops:
                    self._run(like, split, [])  # fills what is cached from one step to the next
                    yield _Run(like, self._schedule.num_slices, self._run(like, split, tensors_alive()))

    def _run(self, like: StageSlice, split: bool, present: list[Tensor]) -> dict[Action, _Change]:
        """Returns what each action changed: of the `present` tensors, and of those that the run makes."""
        step, stage = self._step, self._step.stages[like.stage]
        options = step.loss_function, step.device, step.recompute, step.parameters.reduce
        executor = Executor(like.stage, {like.stage: stage}, self._transport, *options)
        with _without_gradients(stage), memory_meter(step.device, present) as memory:
            watch = _MemoryWatch(stage, memory)
            executor.observe(watch)
            run_together([executor], _alone(like, split, self._schedule), self._batch)
            executor.finish()
        return watch.changes


def _alone(like: StageSlice, split: bool, schedule: Schedule) -> Schedule:
    """Two microbatches on one stage, all others being on ranks that do nothing."""
    row = [action for m in range(2) for action in _microbatch(like, split, m, schedule)]
    placement = tuple(range(schedule.num_stages))
    rows = tuple(tuple(row) if number == like.stage else () for number in placement)
    return replace(schedule, name="rehearsal", actions=rows, placement=placement, num_microbatches=2, reach=None)


def _microbatch(like: StageSlice, split: bool, microbatch: int, schedule: Schedule) -> Iterator[Action]:
    """Forwards, and backwards in reverse, each with what belongs to it."""
    not_first, not_last = like.stage > 0, like.stage + 1 < schedule.num_stages
    forward = [(Op.RECV_F, not_first), (Op.F, True), (Op.SEND_F, not_last), (Op.OFFLOAD, like.offloaded)]
    backward = [
        (Op.RELOAD, like.offloaded),
        (Op.R, like.recomputed),
        (Op.RECV_B, not_last),
        (Op.I if split else Op.B, True),
        (Op.SEND_B, not_first),
        (Op.W, split),
    ]
    order = range(schedule.num_slices)
    for ops, slices in ((forward, order), (backward, reversed(order))):
        for index in slices:
            yield from (Action(op, like.stage, microbatch, index) for op, runs in ops if runs)


class _MemoryWatch:
    """An executor's observer that notes what each action changes; receives cost nothing here."""

    def __init__(self, stage: Stage, memory: MemoryMeter) -> None:
        self.changes: dict[Action, _Change] = {}
        self._parameters, self._memory = list(stage.model.parameters()), memory

    def before(self, action: Action, state: StepState) -> None:
        self._before = self._level(state)
        self._memory.restart_peak()

    def after(self, action: Action, state: StepState) -> None:
        if action.op in RECEIVES:
            return
        peak, before, after = self._memory.peak, self._before, self._level(state)
        context, gradients = after.context - before.context, after.gradients - before.gradients
        self.changes[action] = _Change(after.total - before.total, peak - before.total, context, gradients)

    def _level(self, state: StepState) -> _Level:
        context = sum(store.num_bytes for store in state.stores.values())
        gradients = storage_bytes(parameter.grad for parameter in self._parameters if parameter.grad is not None)
        return _Level(self._memory.num_bytes, context, gradients)


@contextmanager
def _without_gradients(stage: Stage) -> Iterator[None]:
    earlier = [(parameter, parameter.grad) for parameter in stage.model.parameters()]
    for parameter, _ in earlier:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in earlier:
            parameter.grad = gradient


def _owned_tensors(stages: Mapping[int, Stage]) -> dict[int, list[Tensor]]:
    """Parameters and buffers per stage; what several stages share, with the first of them."""
    seen: set[int] = set()
    owned: dict[int, list[Tensor]] = {number: [] for number in stages}
    for number, stage in stages.items():
        for tensor in (*stage.model.parameters(), *stage.model.buffers()):
            if storage_id(tensor) not in seen:
                seen.add(storage_id(tensor))
                owned[number].append(tensor)
    return owned
