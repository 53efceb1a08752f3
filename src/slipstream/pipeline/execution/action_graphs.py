"""Runs what actions compute: eagerly, or as CUDA graphs of a step that repeats with other numbers.

A graph repeats the kernels that one action started, on the same memory, and costs the host a few microseconds instead
of the Python code of every layer. What a graph reads of a new step is copied to where it reads: the batch, the weight
of the loss, and an action's inputs; what draws random numbers is seeded. All graphs of a rank have one pool of memory
and are replayed in the order in which they were recorded, so the memory that an action frees serves the ones after it,
as it does without graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from slipstream.keyed_draws import PlaceSeed
from slipstream.model import Tensors
from slipstream.pipeline.batch import SplitBatch
from slipstream.pipeline.execution.graph_draws import GraphDraws
from slipstream.pipeline.execution.recorded_moves import CopyLane, RecordedMoves, StreamLane
from slipstream.pipeline.execution.step_state import StepState
from slipstream.schedule import Action

Computation = Callable[[Tensors], Tensors]
ActionRunner = Callable[[Action, Tensors, Computation], Tensors]
Replay = Callable[[int], None]  # takes the step's seed


def run_eagerly(_: Action, inputs: Tensors, compute: Computation) -> Tensors:
    """Returns what `compute` returns."""
    return compute(inputs)


class Recorder(Protocol):
    """A way to record the kernels that a computation starts."""

    def record(self, compute: Callable[[], None], num_seeds: int) -> Replay:
        """Returns a function that runs the kernels which `compute` starts, on the same memory. They haven't run yet.

        `num_seeds` says how often `compute` seeds what draws random numbers.
        """
        ...

    def lane(self) -> CopyLane:
        """Returns what replays copies alongside."""
        ...


class CUDAGraphs:
    """Records CUDA graphs that share a pool of memory, on the current stream, which isn't the default one."""

    def __init__(self, device: torch.device) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._draws, self._device = GraphDraws(device), device

    def record(self, compute: Callable[[], None], num_seeds: int) -> Replay:
        """See `Recorder`."""
        graph = torch.cuda.CUDAGraph()
        with self._draws.recording(graph, num_seeds) as seeds:
            # other threads, such as NCCL's watchdog, may ask for events meanwhile
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                compute()
            except BaseException:
                with suppress(RuntimeError):
                    graph.capture_end()
                raise
            graph.capture_end()
        return partial(self._replay, graph, seeds)

    def lane(self) -> CopyLane:
        """See `Recorder`."""
        return StreamLane(self._device)

    def _replay(self, graph: torch.cuda.CUDAGraph, seeds: Sequence[PlaceSeed], step_seed: int) -> None:
        self._draws.prepare(seeds, step_seed)
        graph.replay()


class _RecordedAction(NamedTuple):
    """An action's graph, where it reads its inputs, and where it leaves its outputs."""

    replay: Replay
    inputs: Tensors
    outputs: Tensors


class RecordedStep:
    """The graphs of one rank's actions in a step: first `record` runs every action, then `begin` and `replay` do.

    Inputs and outputs of all actions go through the same few tensors, one for each shape: an action begins with a copy
    of its inputs, and its outputs are copied before the next action runs.
    """

    def __init__(
        self, recorder: Recorder, batch: SplitBatch, device: torch.device, num_seeds: Mapping[Action, int]
    ) -> None:
        """`num_seeds` says how often an action seeds what draws random numbers, where it does."""
        self.batch = _copied(batch)
        self.state = StepState.of(self.batch, device)  # with which actions are recorded
        self._recorder, self._num_seeds = recorder, num_seeds
        self._seed = batch.seed  # of the step that is replayed
        self.moves = RecordedMoves(self._record_copy, recorder.lane(), device)
        self._graphs: dict[Action, _RecordedAction] = {}
        self._passages: dict[tuple[int, torch.Size, torch.dtype], Tensor] = {}

    def __len__(self) -> int:
        """Returns the number of recorded actions."""
        return len(self._graphs)

    def record(self, action: Action, inputs: Tensors, compute: Computation) -> Tensors:
        """Records an action; the numbers that it returns mean nothing."""
        self.moves.before(action)
        ins = self._passages_of(inputs)
        outs: list[Tensor] = []

        def run() -> None:
            outputs = compute(tuple(each.clone() for each in ins))
            outs.extend(self._passages_of(outputs))
            for passage, output in zip(outs, outputs, strict=True):
                passage.copy_(output)

        replay = self._recorder.record(run, self._num_seeds.get(action, 0))
        self._graphs[action] = _RecordedAction(replay, ins, tuple(outs))
        return tuple(outs)

    def begin(self, batch: SplitBatch) -> StepState:
        """Takes over the numbers of a step; returns what it holds before its first action."""
        for own, new in zip(_tensors_of(self.batch), _tensors_of(batch), strict=True):
            own.copy_(new)
        self._seed = batch.seed
        self.moves.begin()
        self.state.loss.zero_()
        self.state.count.zero_()
        self.state.loss_weight.fill_(batch.loss_weight)
        return StepState(batch, self.state.loss, self.state.count, self.state.loss_weight)

    def replay(self, action: Action, inputs: Tensors, _: Computation) -> Tensors:
        """Replays an action with these inputs, and returns its outputs."""
        graph = self._graphs[action]
        self.moves.before(action)
        for passage, given in zip(graph.inputs, inputs, strict=True):
            passage.copy_(given)
        graph.replay(self._seed)
        return tuple(passage.clone() for passage in graph.outputs)

    def _record_copy(self, copy: Callable[[], None]) -> Callable[[], None]:
        return partial(self._recorder.record(copy, 0), 0)  # which draws nothing

    def _passages_of(self, tensors: Tensors) -> Tensors:
        keys = [(index, tensor.shape, tensor.dtype) for index, tensor in enumerate(tensors)]
        for key, tensor in zip(keys, tensors, strict=True):
            if key not in self._passages:
                self._passages[key] = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
        return tuple(self._passages[key] for key in keys)


def signature(batch: SplitBatch) -> tuple[object, ...]:
    """Returns what is equal for batches that the same graphs can run: all that isn't read from their tensors."""
    pieces = chain.from_iterable(batch.slices)
    of_slices = ((each.start, each.length, each.max_position, each.input_ids.shape) for each in pieces)
    return *of_slices, *((target.shape, target.dtype) for target in chain.from_iterable(batch.targets))


def _copied(batch: SplitBatch) -> SplitBatch:
    """Returns a batch with memory of its own."""
    slices = [
        [replace(each, input_ids=each.input_ids.clone(), position_ids=each.position_ids.clone()) for each in pieces]
        for pieces in batch.slices
    ]
    return replace(batch, slices=slices, targets=[[each.clone() for each in targets] for targets in batch.targets])


def _tensors_of(batch: SplitBatch) -> Sequence[Tensor]:
    of_slices = (each.tensors for each in chain.from_iterable(batch.slices))
    return *chain.from_iterable(of_slices), *chain.from_iterable(batch.targets)
