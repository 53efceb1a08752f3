"""Runs the computing of actions: eagerly, or as CUDA graphs of a step that repeats with other numbers.

A graph repeats the kernels that one action started, on the same memory, and costs the host a few microseconds instead
of the Python code of every layer. A new step's inputs of a graph are copied to where it reads: the batch, the weight of
the loss, and an action's inputs; and random draws are seeded. All graphs of a rank have one pool of memory and are
replayed in the order in which they were recorded, so the memory that an action frees serves the ones after it, as it
does without graphs.

Lets CUDA graphs draw random numbers: those that an eager step of the same seed draws.

A kernel that is recorded reads the seed of its generator from memory that a replay fills with the generator's seed of
that moment. So each place of an action that seeds, such as a layer or a tile of an attention with dropout, gets a
generator of its own while the action is recorded, and a replay first seeds these for its step. Layers draw from the
device's default generator, which no code of theirs names: at each place it is given the state of the place's generator.

Moves the saved tensors of a recorded step to the host and back, between the same addresses in every replay.

Each copy is recorded like an action, in its place among them: an OFFLOAD's reads what its F left in the memory of the
graphs, a RELOAD's fills memory of theirs that nothing else has until the backward. Replayed copies run alongside the
actions, in their order, each after the actions before it. An action waits for those whose memory it may touch:

    F0  OFFLOAD0  F1        F2           ...  RELOAD0  B2  B1  B0
        copy out .........  waits: its                 copy in  waits: it reads
        of F0's memory      memory is free             ......   what came in

So an OFFLOAD's memory is freed an action later than the schedule says, or the copy would have none to run alongside;
`slipstream.simulator.memory_of` counts it with `frees_late`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from slipstream.host_memory import HostSegments
from slipstream.keyed_draws import EagerDraws, PlaceSeed, drawing
from slipstream.model import Tensors
from slipstream.pipeline.cut_batch import SplitBatch
from slipstream.pipeline.execution.rank_program import SliceKey
from slipstream.pipeline.execution.step_state import StepState
from slipstream.schedule import Action

Computation = Callable[[Tensors], Tensors]
ActionRunner = Callable[[Action, Tensors, Computation], Tensors]
Replay = Callable[[int], None]  # replay(seed of the step)


class Recorder(Protocol):
    """A way to record the kernels that a computation starts."""

    def record(self, compute: Callable[[], None], num_seeds: int) -> Replay:
        """Returns a function that runs the kernels which `compute` starts, on the same memory. They haven't run yet.

        `num_seeds` says how often `compute` seeds random draws.
        """
        ...

    def lane(self) -> CopyLane:
        """Returns the lane that replays copies alongside."""
        ...


class CUDAGraphs:
    """Records CUDA graphs that share a pool of memory, on the current stream, which isn't the default one."""

    def __init__(self, device: torch.device) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._draws = GraphDraws(device)
        self._device = device

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
        """`num_seeds` says how often an action seeds random draws, where it does."""
        self.batch = _copied(batch)
        self.state = StepState.of(self.batch, device)  # the fixed state for recording
        self._recorder = recorder
        self._num_seeds = num_seeds
        self._seed = batch.seed  # the seed of the step being replayed
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
            outputs = compute(tuple(tensor.clone() for tensor in ins))
            outs.extend(self._passages_of(outputs))
            for passage, output in zip(outs, outputs, strict=True):
                passage.copy_(output)

        replay = self._recorder.record(run, self._num_seeds.get(action, 0))
        self._graphs[action] = _RecordedAction(replay, ins, tuple(outs))
        return tuple(outs)

    def begin(self, batch: SplitBatch) -> StepState:
        """Takes over the numbers of a step; returns its state before its first action."""
        for recorded, new in zip(_tensors_of(self.batch), _tensors_of(batch), strict=True):
            recorded.copy_(new)
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
        for passage, tensor in zip(graph.inputs, inputs, strict=True):
            passage.copy_(tensor)
        graph.replay(self._seed)
        return tuple(passage.clone() for passage in graph.outputs)

    def _record_copy(self, copy: Callable[[], None]) -> Callable[[], None]:
        # A copy draws no random numbers, so its replay needs no seed.
        return partial(self._recorder.record(copy, 0), 0)

    def _passages_of(self, tensors: Tensors) -> Tensors:
        keys = [(index, tensor.shape, tensor.dtype) for index, tensor in enumerate(tensors)]
        for key, tensor in zip(keys, tensors, strict=True):
            if key not in self._passages:
                self._passages[key] = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
        return tuple(self._passages[key] for key in keys)


def signature(batch: SplitBatch) -> tuple[object, ...]:
    """Returns the key that batches share if the same graphs can run them: all that isn't read from their tensors."""
    pieces = chain.from_iterable(batch.slices)
    of_slices = ((piece.start, piece.length, piece.max_position, piece.input_ids.shape) for piece in pieces)
    of_values = (
        (name, tensor.shape, tensor.dtype)
        for name, values in batch.values.items()
        for tensor in chain.from_iterable(values.slices)
    )
    return *of_slices, *of_values


def _copied(batch: SplitBatch) -> SplitBatch:
    """Returns a batch with memory of its own."""
    slices = [
        [replace(piece, input_ids=piece.input_ids.clone(), position_ids=piece.position_ids.clone()) for piece in pieces]
        for pieces in batch.slices
    ]
    return replace(
        batch, slices=slices, values={name: each.changed(Tensor.clone) for name, each in batch.values.items()}
    )


def _tensors_of(batch: SplitBatch) -> Sequence[Tensor]:
    numbers = ((m, i) for m, pieces in enumerate(batch.slices) for i in range(len(pieces)))
    return [tensor for m, i in numbers for tensor in batch.tensors_of(m, i)]


class CountedDraws(EagerDraws):
    """Seeds at once, counts how often, and finds whether code draws on the host, which no graph repeats."""

    def __init__(self, device: torch.device) -> None:
        self.num_seeds = 0
        self.are_on_host = False
        self._watches_host = device.type != "cpu"
        self._seeded: Tensor | None = None  # the host's state after the last seed

    @contextmanager
    def forked(self) -> Iterator[None]:
        """See `Draws`."""
        with super().forked():
            try:
                yield
            finally:
                self._look()
                self._seeded = None

    def seed(self, seed: PlaceSeed) -> None:
        """See `Draws`."""
        self.num_seeds += 1
        self._look()
        super().seed(seed)
        self._seeded = torch.get_rng_state() if self._watches_host else None

    def generator(self, device: torch.device, seed: PlaceSeed) -> torch.Generator:
        """See `Draws`."""
        self.num_seeds += 1
        return super().generator(device, seed)

    def _look(self) -> None:
        if self._seeded is not None and not torch.equal(self._seeded, torch.get_rng_state()):
            self.are_on_host = True


class GraphDraws:
    """Draws from a generator for each place of a graph. The generators serve all graphs, which run one after another.

    The generators of a graph are named before it is recorded, so how many it takes must be known.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._generators: list[torch.Generator] = []
        self._seeds: list[PlaceSeed] = []  # seeds of the graph being recorded, one per generator
        self._num_seeds = 0  # seeds of an action's graph once complete

    @contextmanager
    def recording(self, graph: torch.cuda.CUDAGraph, num_seeds: int) -> Iterator[Sequence[PlaceSeed]]:
        """Surrounds the recording of a graph; yields its later seeds, for `prepare`."""
        self._generators += [torch.Generator(self._device) for _ in range(num_seeds - len(self._generators))]
        for generator in self._generators[:num_seeds]:
            graph.register_generator_state(generator)
        self._seeds = []
        self._num_seeds = num_seeds
        # which the recording takes part in: where it fails, no eager step can draw from that state any more
        default = self._default
        outside = self._default.clone_state()
        try:
            with drawing(self):
                yield self._seeds
        except BaseException:
            default.graphsafe_set_state(outside)
            raise

    def prepare(self, seeds: Sequence[PlaceSeed], step_seed: int) -> None:
        """Seeds the places of a graph for its next replay."""
        for generator, seed in zip(self._generators, seeds, strict=False):
            generator.manual_seed(seed.in_step(step_seed).number)

    @contextmanager
    def forked(self) -> Iterator[None]:
        """See `Draws`."""
        default = self._default
        outside = self._default.graphsafe_get_state()
        try:
            yield
        finally:
            default.graphsafe_set_state(outside)

    def seed(self, seed: PlaceSeed) -> None:
        """See `Draws`."""
        self._default.graphsafe_set_state(self._next(seed))

    def generator(self, _: torch.device, seed: PlaceSeed) -> torch.Generator:
        """See `Draws`."""
        return self._next(seed)

    @property
    def _default(self) -> torch.Generator:
        generator: torch.Generator = torch.cuda.default_generators[torch.cuda.current_device()]
        return generator

    def _next(self, seed: PlaceSeed) -> torch.Generator:
        if len(self._seeds) == self._num_seeds:
            raise RuntimeError("an action seeds random numbers more often than in the step before")
        self._seeds.append(seed)
        return self._generators[len(self._seeds) - 1]


_Recorded = Callable[[], None]  # a copy


class CopyLane(Protocol):
    """Runs copies alongside the actions, in order, each after the actions that were started before it."""

    def start(self, copy: Callable[[], None]) -> Any:
        """Starts a copy; returns a handle for `wait`."""

    def wait(self, copy: Any) -> None:
        """Lets the actions from now on begin when a copy is done."""


class StreamLane:
    """A stream for copies."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def start(self, copy: Callable[[], None]) -> torch.cuda.Event:
        """See `CopyLane`."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            copy()
        done: torch.cuda.Event = self._stream.record_event()
        return done

    def wait(self, copy: torch.cuda.Event) -> None:
        """See `CopyLane`."""
        torch.cuda.current_stream(self._device).wait_event(copy)


class RecordedMoves:
    """The copies of one rank's step: recorded when they are first asked for, and replayed from then on."""

    def __init__(self, record: Callable[[Callable[[], None]], _Recorded], lane: CopyLane, device: torch.device) -> None:
        self._record = record
        self._lane = lane
        self._device = device
        self._outward: dict[SliceKey, _Recorded] = {}
        self._inward: dict[SliceKey, _Recorded] = {}
        self._on_host: dict[SliceKey, list[Tensor]] = {}  # host copies of offloaded blocks
        self._segments = HostSegments(device)
        self._free: defaultdict[int, list[Tensor]] = defaultdict(list)  # free host memory, by number of elements
        self._held: list[tuple[SliceKey, list[Tensor]]] = []  # blocks whose copy is still to be started
        self._ending: list[tuple[SliceKey, list[Tensor]]] = []  # blocks whose copy started before the previous action
        self._ends: dict[Action, list[SliceKey]] = {}  # copies awaited by each action
        self._leaving: dict[SliceKey, Any] = {}  # tickets of copies to the host, from `lane.start`
        self._arriving: dict[SliceKey, Any] = {}  # tickets of copies back from the host

    def begin(self) -> None:
        """Begins a step: after copies of one that failed, whose memory its actions may take."""
        for copy in (*self._leaving.values(), *self._arriving.values()):
            self._lane.wait(copy)
        self._leaving, self._arriving = {}, {}

    def before(self, action: Action) -> None:
        """Frees the memory of blocks whose copies had an action's time, so that this action may take it."""
        if action not in self._ends:
            self._ends[action] = [key for key, _ in self._ending]
            self._ending, self._held = self._held, []
        for key in self._ends[action]:
            if key in self._leaving:
                self._lane.wait(self._leaving.pop(key))

    def offload(self, key: SliceKey, take_out: Callable[[], list[Tensor]]) -> None:
        """See `BlockMoves`."""
        if key in self._outward:
            self._leaving[key] = self._lane.start(self._outward[key])
            return
        blocks = take_out()
        self._on_host[key] = hosts = [self._host_memory(block.numel()) for block in blocks]
        self._outward[key] = self._record(partial(_copy, hosts, blocks)) if blocks else _nothing
        self._held.append((key, blocks))

    def reload(self, key: SliceKey, put_back: Callable[[list[Tensor]], None]) -> None:
        """See `BlockMoves`."""
        if key in self._inward:
            self._arriving[key] = self._lane.start(self._inward[key])
            return
        hosts = self._on_host.pop(key)
        blocks = list[Tensor]()
        self._inward[key] = self._record(partial(self._bring, hosts, blocks)) if hosts else _nothing
        for host in hosts:
            # A later copy may overwrite this memory: copies run in order, so this one has then been made.
            self._free[host.numel()].append(host)
        put_back(blocks)

    def await_reload(self, key: SliceKey) -> None:
        """See `BlockMoves`."""
        if key in self._arriving:
            self._lane.wait(self._arriving.pop(key))

    def _bring(self, hosts: Sequence[Tensor], blocks: list[Tensor]) -> None:
        """Copies to memory of the graphs, to which `blocks` will refer."""
        blocks += [torch.empty(host.numel(), dtype=torch.uint8, device=self._device) for host in hosts]
        _copy(blocks, hosts)

    def _host_memory(self, size: int) -> Tensor:
        return self._free[size].pop() if self._free[size] else self._segments.take(size)


def _copy(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source, non_blocking=True)


def _nothing() -> None:
    """Copies nothing."""


class FixedGradients:
    """Keeps gradients at fixed addresses, where graphs add to them."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = parameters
        self._trained: set[int] = set()  # ids of parameters with gradients
        self._buffers: dict[int, Tensor] = {}  # gradient buffers, by id of the parameter
        self._addresses: set[int] = set()  # addresses of the buffers' storages

    def holds(self, tensor: Tensor) -> bool:
        """Returns whether a tensor lies where the next step writes."""
        return tensor.untyped_storage().data_ptr() in self._addresses

    def note(self) -> None:
        """Notes which parameters have gradients now; call it before they are reduced."""
        self._trained |= {id(parameter) for parameter in self._parameters if parameter.grad is not None}

    def begin(self) -> None:
        """Puts the gradients of earlier steps, or zeros, where they are added to."""
        for parameter in self._parameters:
            if id(parameter) in self._trained:
                parameter.grad = self._filled(parameter)

    def _filled(self, parameter: nn.Parameter) -> Tensor:
        """Returns the parameter's buffer, with its gradient."""
        gradient = parameter.grad
        buffer = self._buffers.get(id(parameter))
        if buffer is None:
            wide = parameter.grad_dtype or parameter.dtype
            buffer = torch.zeros_like(parameter, dtype=wide, requires_grad=False) if gradient is None else gradient
            self._buffers[id(parameter)] = buffer
            self._addresses.add(buffer.untyped_storage().data_ptr())
        elif gradient is None:
            buffer.zero_()
        elif gradient is not buffer:
            buffer.copy_(gradient)
        return buffer
