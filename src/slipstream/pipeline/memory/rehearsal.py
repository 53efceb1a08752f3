"""Measures the memory of each action, by running every stage of this process alone on two equal microbatches."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from operator import sub
from typing import NamedTuple

import torch
from torch import Tensor

from slipstream.attention import context_on_host
from slipstream.comm import HEADER_BYTES, FakeTransport, Transport, message_bytes
from slipstream.model import PipelineStage, Tensors, factors_of, storage_bytes, storage_id, storage_ids
from slipstream.model.hooks import kept_frequencies, running_alone
from slipstream.parallel.parameter_share import part_length
from slipstream.pipeline.cut_batch import SplitBatch
from slipstream.pipeline.execution import Executor, Losses, RankStep, StepState, key_of, run_together
from slipstream.pipeline.families import StageLayout
from slipstream.pipeline.parameters import Parameters
from slipstream.profile import MemoryMeter, memory_meter
from slipstream.schedule import (
    BACKWARDS,
    RECEIVES,
    SENDS,
    Action,
    Op,
    Schedule,
    SlicedMicrobatch,
    sent_result,
    with_far_messages,
)
from slipstream.simulator import Footprint, MemoryTable, StageSlice

ADAMW_STATES = 2  # AdamW's two running means per parameter, of gradients and of their squares
_HOST_COPIES = 2 + ADAMW_STATES  # a weight that the optimizer updates, its gradient, and AdamW's means


@dataclass(frozen=True)
class RehearsedStep:
    """The parts of a pipeline, and of the step that it would run next, of which a rehearsal measures the memory."""

    layout: StageLayout
    stages: Mapping[int, PipelineStage]  # stages of this process
    parameters: Parameters
    losses: Losses
    device: torch.device
    scatter: Callable[[Transport], Transport]  # a transport that sends only this tensor rank's part
    num_parts: int  # parts of a message, one per tensor rank
    batch: SplitBatch
    microbatches: Sequence[SlicedMicrobatch]  # rows and slices per microbatch; a single entry for equal ones

    @property
    def schedule(self) -> Schedule:
        """The actions of the step, with its messages."""
        return self.layout.training


def rehearse(step: RehearsedStep, number: int = 0) -> MemoryTable:
    """Measures the bytes of this process's stages in a step, with all of its schedule's actions on microbatch `number`.

    Every stage runs the microbatch's slices forward and backward, from a made-up input, without weight gradients to
    begin with, and then again with those. Parameters and `.grad` end as they were. On the CPU tensors are counted, on
    CUDA the allocator's bytes. Not for rows of several documents.
    """
    batch = step.batch
    transport = step.scatter(FakeTransport(step.device))
    step = replace(step, batch=batch.twice(number))
    with running_alone():
        runs = [run for g in step.stages for run in _rehearse_stage(step, g, transport)]
    owned = _owned_tensors(step.stages)
    updated = {g: step.parameters.bytes_of(tensors) for g, tensors in owned.items()}
    table = MemoryTable(
        footprints={key: footprint for run in runs for key, footprint in run.footprints().items()},
        first={key: peak for run in runs for key, peak in run.first_peaks().items()},
        context={run.like.stage: run.context for run in runs},
        context_gradients={run.like.stage: run.context_gradients for run in runs},
        message_bytes=_message_bytes(step),
        header_bytes=HEADER_BYTES,
        vocabulary_bytes=_vocabulary_bytes(step),
        w_shares={index: shares for run in runs for index, shares in run.w_shares().items() if run.like.stage == 0},
        parameters={g: storage_bytes(tensors) + updated[g][0] for g, tensors in owned.items()},
        gradients={key: size for run in runs for key, size in run.gradients().items()},
        optimizer={g: ADAMW_STATES * size for g, (_, size) in updated.items()},
        host_context={key: footprint for run in runs for key, footprint in run.host_context().items()},
        host_optimizer={g: _HOST_COPIES * step.parameters.host_bytes_of(tensors) for g, tensors in owned.items()},
        kept_gradients=_kept_gradients(step.stages) if step.parameters.are_on_host else None,
    )
    return _with_divided_head(table, step)


def _kept_gradients(stages: Mapping[int, PipelineStage]) -> dict[int, float]:
    """Returns the bytes of gradients that don't go to the host with their stage's: those of tied weights, which are
    added first."""
    tied = {g: [each for weight in stage.tied for each in weight.accumulators] for g, stage in stages.items()}
    return {
        g: float(sum(each.numel() * (each.grad_dtype or each.dtype).itemsize for each in accumulators))
        for g, accumulators in tied.items()
    }


def _with_divided_head(table: MemoryTable, step: RehearsedStep) -> MemoryTable:
    """Returns the table in which each rank has its own rows of a spread head, where ranks of one process share them."""
    rows = {stage_index: rows for stage_index, stage in step.stages.items() if (rows := stage.vocabulary) is not None}
    parameters, optimizer = dict(table.parameters), dict(table.optimizer)
    gradients, first = dict(table.gradients), dict(table.first)
    for stage_index, head in rows.items():
        weights = [*head.parameters()]
        copies, updated = step.parameters.bytes_of(weights)
        # So far the whole head is counted with the first of these stages.
        counted = head.share - (stage_index == min(rows))
        parameters[stage_index] += counted * (storage_bytes(weights) + copies)
        optimizer[stage_index] += counted * ADAMW_STATES * updated
        made = gradients[stage_index, Op.VW] * (1 - head.share)
        gradients[stage_index, Op.VW] -= made
        first |= {key: peak - made for key, peak in first.items() if (key[0].stage, key[1]) == (stage_index, Op.VW)}
    return replace(table, parameters=parameters, optimizer=optimizer, gradients=gradients, first=first)


class _Change(NamedTuple):
    """The change by one action, in bytes."""

    total: int
    context: int
    gradients: int
    peak: int  # above the bytes there before
    on_host: Footprint  # the bytes of keys, values and their gradients there
    is_shared: bool  # a message from I that W works on too


@dataclass(frozen=True)
class _Run:
    """The changes by one stage's actions, all slices being recomputed and offloaded alike."""

    like: StageSlice  # slice 0, measured for all slices
    num_slices: int
    changes: Mapping[Action, _Change]

    @property
    def context(self) -> int:
        """The bytes of keys and values after the first forward."""
        return self.changes[Action(Op.F, self.like.stage, 1, 0)].context

    @property
    def context_gradients(self) -> int:
        """The bytes of their gradients after the first backward; a slice that is alone leaves none."""
        return sum(change.context for action, change in self.changes.items() if self._is_first_backward(action, 1))

    def footprints(self) -> dict[tuple[StageSlice, Op], Footprint]:
        """Returns the footprints in the second microbatch, which adds to weight gradients that exist."""
        footprints = {}
        for action, change in self.changes.items():
            if action.microbatch == 1 and action.op not in SENDS:
                leaves = change.total - change.context - change.gradients + self._freed_by_send(action)
                leaves += self._looked_up(action)
                footprints[self._unit(action), action.op] = Footprint(leaves, change.peak)
        return footprints

    def host_context(self) -> dict[tuple[int, int, Op], Footprint]:
        """Returns the bytes on the host that the second microbatch's actions leave and need, where there are any."""
        return {
            (action.stage, action.slice, action.op): change.on_host
            for action, change in self.changes.items()
            if action.microbatch == 1 and (change.on_host.leaves or change.on_host.peak)
        }

    def first_peaks(self) -> dict[tuple[StageSlice, Op], float]:
        """Returns the peaks of the first microbatch's first backward, which makes the weight gradients."""
        return {
            (self._unit(action), action.op): change.peak
            for action, change in self.changes.items()
            if self._is_first_backward(action, 0) or self._makes_weights_first(action)
        }

    def _looked_up(self, action: Action) -> int:
        """Returns the bytes of embeddings by rows for the stage next to them, which are counted with the messages:
        below 0 for the action that leaves them, or their gradient, above 0 for the one that takes them."""
        lookup = self.changes.get(action.with_op(Op.E))
        leaves = Op.W if self.w_shares().get(action.slice, False) else Op.I  # W frees its own part of the bytes of both
        sign = {Op.E: -1, Op.F: 1, Op.B: -1, leaves: -1, Op.EW: 1}.get(action.op, 0)
        return 0 if lookup is None else sign * lookup.total

    def w_shares(self) -> dict[int, bool]:
        """Returns whether W works on I's message, by slice; nothing where backwards are whole."""
        return {action.slice: change.is_shared for action, change in self.changes.items() if action.op is Op.I}

    def gradients(self) -> dict[tuple[int, Op], float]:
        """Returns the bytes of weight gradients that the first microbatch makes."""
        made: defaultdict[tuple[int, Op], float] = defaultdict(float)
        for action, change in self.changes.items():
            if action.microbatch == 0 and action.op in BACKWARDS | {Op.VW}:
                made[self.like.stage, action.op] += change.gradients
        return made

    def _unit(self, action: Action) -> StageSlice:
        return self.like._replace(slice=action.slice)

    def _is_first_backward(self, action: Action, microbatch: int) -> bool:
        # Backwards run from the last slice to the first.
        return action.op in (Op.B, Op.I) and (action.microbatch, action.slice) == (microbatch, self.num_slices - 1)

    def _makes_weights_first(self, action: Action) -> bool:
        return action.op in (Op.W, Op.VW) and (action.microbatch, action.slice) == (0, self.num_slices - 1)

    def _freed_by_send(self, action: Action) -> int:
        """Returns the size of an action's result, below 0: it is counted with the messages."""
        op = {Op.F: Op.SEND_F, Op.B: Op.SEND_B, Op.I: Op.SEND_B}.get(action.op)
        sent = None if op is None else self.changes.get(action.with_op(op))
        return 0 if sent is None else sent.total


def _message_bytes(step: RehearsedStep) -> list[float]:
    """Returns the bytes of each slice's message."""
    stage = next(iter(step.stages.values()))
    stage.check_measurable()
    specs = [spec for piece in step.batch.slices[0] for spec in stage.rows_messages(Op.F, piece, True)]
    return [part_length(spec.shape.numel(), step.num_parts) * spec.dtype.itemsize for spec in specs]


def _vocabulary_bytes(step: RehearsedStep) -> dict[tuple[Op, int], float]:
    """Returns the bytes of the messages of V and L, and of E, of each slice, where the head is spread."""
    if not step.schedule.spreads_vocabulary:
        return {}
    stage = next(iter(step.stages.values()))
    pieces = step.batch.slices[0]
    ops = (Op.V, Op.L, Op.E) if step.schedule.spreads_embedding else (Op.V, Op.L)
    messages = {(op, index): stage.rows_messages(op, piece, True) for op in ops for index, piece in enumerate(pieces)}
    return {place: message_bytes(specs) for place, specs in messages.items()}


def _rehearse_stage(step: RehearsedStep, number: int, transport: Transport) -> Iterator[_Run]:
    """Runs a stage alone: all actions on some slice of it in the schedule, each on all its slices. Other ranks'
    messages are made up, those to them dropped.
    """
    actions = [action for action in step.schedule.positions if action.stage == number]
    ops = {action.op for action in actions}
    with kept_frequencies(step.stages[number].model):
        for like in {StageSlice.of(action, step.schedule)._replace(slice=0) for action in actions}:
            for split in (False, True):
                if (Op.I if split else Op.B) in ops or (not split and not step.schedule.trains(number)):
                    # The first run fills caches that last from step to step, so only the second is measured.
                    _run(step, like, split, transport)
                    yield _Run(like, len(step.batch.slices[0]), _run(step, like, split, transport))


def _run(step: RehearsedStep, like: StageSlice, split: bool, transport: Transport) -> dict[Action, _Change]:
    """Returns each action's change of memory."""
    stage = step.stages[like.stage]
    schedule = alone(like, split, step.schedule, len(step.batch.slices[0]))
    host = context_on_host(step.device, step.layout.context_on_host)
    layout = step.layout
    options = step.losses, step.device, layout.recompute, step.parameters.reduce, host, layout.has_wide_sums
    executor = Executor(schedule.placement[like.stage], {like.stage: stage}, transport, *options)
    with _without_gradients(stage), memory_meter(step.device) as memory:
        watch = _MemoryWatch(stage, memory, schedule)
        executor.observe(watch)
        run_together([executor], schedule, step.batch, [RankStep(watch.run)])
        executor.finish()
    return watch.changes


class _MemoryWatch:
    """An executor's observer that notes each action's change of memory; receives cost nothing here.

    What is sent past neighbours is sent right after the action that makes it, to which that change belongs.
    """

    def __init__(self, stage: PipelineStage, memory: MemoryMeter, schedule: Schedule) -> None:
        self.changes: dict[Action, _Change] = {}
        self._schedule = schedule
        self._parameters = list(stage.model.parameters())
        self._memory = memory
        self._made: set[int] = set()  # the storages of the last results

    def run(self, _: Action, inputs: Tensors, compute: Callable[[Tensors], Tensors]) -> Tensors:
        """Runs an action's computing."""
        outputs = compute(inputs)
        self._made = storage_ids(outputs) - storage_ids(inputs)
        return outputs

    def before(self, action: Action, state: StepState) -> None:
        self._before = self._level(state)
        self._memory.restart_peak()
        self._host_before = self._memory.host_peak

    def after(self, action: Action, state: StepState) -> None:
        if action.op not in RECEIVES:
            peak = self._memory.peak - self._before[0]
            total, context, gradients, host = map(sub, self._level(state), self._before)
            if action.peer >= 0:
                made = self.changes[producer := sent_result(action, self._schedule)]
                self.changes[producer] = made._replace(total=made.total + total)
                return
            factors = factors_of(state.weights.get(key_of(action), ()))
            is_shared = action.op is Op.I and not self._made.isdisjoint(storage_ids(factors))
            # What is moved to the host is counted by what leaves the device.
            most = 0 if action.op in (Op.OFFLOAD, Op.RELOAD) else self._memory.host_peak - self._host_before
            on_host = Footprint(host, max(most, host))
            self.changes[action] = _Change(total, context, gradients, peak, on_host, is_shared)

    def _level(self, state: StepState) -> tuple[int, int, int, int]:
        """Returns the bytes that are alive, how many of them are context and weight gradients, and those of keys,
        values and their gradients on the host."""
        context = sum(store.num_bytes for store in state.stores.values())
        on_host = sum(store.host_bytes for store in state.stores.values())
        gradients = storage_bytes(parameter.grad for parameter in self._parameters if parameter.grad is not None)
        return self._memory.num_bytes, context, gradients, on_host


@contextmanager
def _without_gradients(stage: PipelineStage) -> Iterator[None]:
    earlier = [(parameter, parameter.grad) for parameter in stage.model.parameters()]
    for parameter, _ in earlier:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in earlier:
            parameter.grad = gradient


def _owned_tensors(stages: Mapping[int, PipelineStage]) -> dict[int, list[Tensor]]:
    """Returns the parameters and buffers of each stage; a shared one counts for the first of them."""
    owners: dict[int, tuple[int, Tensor]] = {}
    for g, stage in stages.items():
        for tensor in (*stage.model.parameters(), *stage.model.buffers()):
            owners.setdefault(storage_id(tensor), (g, tensor))
    return {g: [tensor for owner, tensor in owners.values() if owner == g] for g in stages}


def alone(like: StageSlice, split: bool, schedule: Schedule, num_slices: int) -> Schedule:
    """Returns the schedule of two microbatches on one stage of `schedule`, alone on its rank.

    All slices are treated as `like` is, with backwards whole or split. The first stage's embeddings come from other
    ranks, and from its own rows where these are next to it. A stage whose parameters are all frozen runs forwards
    alone.
    """
    placement = _apart(like.stage, schedule) if schedule.spreads_vocabulary else tuple(range(schedule.num_stages))
    last = len(placement) - 1
    has_rows = schedule.spreads_vocabulary and like.stage in schedule.vocabulary_stages
    embeds = schedule.spreads_embedding
    rank_here = placement[like.stage]
    trains = schedule.trains
    rows: list[list[Action]] = [[] for _ in range(max(placement) + 1)]
    for microbatch in range(2):
        parts = last, num_slices, has_rows, has_rows and embeds, trains
        rows[rank_here] += _microbatch(like, split, microbatch, *parts)
        if has_rows or (embeds and like.stage == 0):
            for rank, stage in {placement[g]: g for g in range(last + 1)}.items():  # the last of each rank
                if rank != rank_here:
                    rows[rank] += _sending(stage, microbatch, last, num_slices, embeds)
        if has_rows and embeds and like.stage > 0:
            rows[placement[0]] += (Action(Op.B, 0, microbatch, index) for index in reversed(range(num_slices)))
    first_trained = schedule.num_frozen_stages
    # A backward tells to which stages its gradients go, so the first trained stage runs one too.
    if like.stage != first_trained and not (has_rows and embeds):
        rows[placement[first_trained]].append(Action(Op.B, first_trained, 0, 0))
    order = tuple(map(tuple, rows))
    alone = Schedule("rehearsal", order, placement, num_microbatches=2, num_slices=num_slices)
    return with_far_messages(alone, is_alone=True)


def _sending(stage: int, microbatch: int, last: int, num_slices: int, embeds: bool) -> Iterator[Action]:
    """Yields another rank's actions of a spread head: they don't run, but determine the messages and their order."""
    order = range(num_slices)
    if embeds:
        yield from (Action(Op.E, stage, microbatch, index) for index in order)
    yield from (Action(Op.V, stage, microbatch, index) for index in order)
    if stage == last:
        yield from (Action(Op.F, stage, microbatch, index) for index in order)
        yield from (Action(Op.L, stage, microbatch, index) for index in reversed(order))


def _apart(stage: int, schedule: Schedule) -> tuple[int, ...]:
    """Returns the placement with the rank's other stages on the next rank, or where it is the only one, on others."""
    placement, num_ranks = schedule.placement, schedule.num_ranks
    here = placement[stage]
    if num_ranks == 1:
        return tuple(range(schedule.num_stages))
    return tuple((here + 1) % num_ranks if there == here and g != stage else there for g, there in enumerate(placement))


def _microbatch(
    like: StageSlice,
    split: bool,
    microbatch: int,
    last: int,
    num_slices: int,
    has_rows: bool,
    looks_up: bool,
    trains: Callable[[int], bool],
) -> Iterator[Action]:
    """Yields the forwards, then the backwards in reverse, each with the actions that go with it."""
    not_first = like.stage > 0
    not_last = like.stage < last
    forward = [
        (Op.E, looks_up),
        (Op.RECV_F, not_first),
        (Op.F, True),
        (Op.SEND_F, not_last),
        (Op.OFFLOAD, like.offloaded),
    ]
    backward = [
        (Op.L, has_rows and not not_last),
        (Op.RELOAD, like.offloaded),
        (Op.R, like.recomputed),
        (Op.RECV_B, not_last and trains(like.stage)),
        (Op.I if split else Op.B, trains(like.stage)),
        (Op.SEND_B, not_first and trains(like.stage - 1)),
        (Op.W, split),
        (Op.VW, has_rows),
        (Op.EW, looks_up),
    ]
    order = range(num_slices)
    for ops, slices in ((forward, order), ([(Op.V, has_rows)], order), (backward, reversed(order))):
        for index in slices:
            yield from (Action(op, like.stage, microbatch, index) for op, runs in ops if runs)
