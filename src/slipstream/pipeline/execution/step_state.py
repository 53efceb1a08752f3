"""What a rank holds between the actions of a step, and the two ends of a slice's autograd graph on a stage."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.autograd.graph import GradientEdge, get_gradient_edge

from slipstream.attention import ContextStore
from slipstream.comm import Message
from slipstream.model import Tensors, TensorSpec, storage_id
from slipstream.model.autograd_memory import SliceReplay
from slipstream.model.weight_gradients import WeightGradient
from slipstream.pipeline.batch import SplitBatch
from slipstream.schedule import Action


class OffloadedBlocks(Protocol):
    """Blocks of bytes on the host. The device's memory is free as soon as the caller drops what was offloaded."""

    def load(self) -> list[Tensor]:
        """Begins to copy the blocks into new memory of the device. Use them after `wait`."""

    def wait(self) -> None:
        """Makes whatever the device does from now on wait until the loaded blocks are there."""

    def close(self) -> None:
        """Frees the host's memory, whether the blocks were loaded or not."""


def host_memory_of(device: torch.device) -> Callable[[list[Tensor]], OffloadedBlocks]:
    """Returns a function that begins to move blocks of a device's memory to the host."""
    if device.type != "cuda":
        return BlocksInFile
    stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return partial(PinnedBlocks, stream=stream)


class BlocksInFile:
    """Blocks of the CPU's memory in a temporary file without a name, in TMPDIR.

    The operating system deletes it when it is closed, however the process ends.
    """

    def __init__(self, blocks: list[Tensor]) -> None:
        self._sizes = [block.numel() for block in blocks]
        self._file = tempfile.TemporaryFile(prefix="slipstream-")  # noqa: SIM115
        for block in blocks:
            self._file.write(block.numpy().data)

    def load(self) -> list[Tensor]:
        blocks = [torch.empty(size, dtype=torch.uint8) for size in self._sizes]
        self._file.seek(0)
        for block in blocks:
            self._file.readinto(block.numpy().data)
        return blocks

    def wait(self) -> None:
        pass

    def close(self) -> None:
        self._file.close()


class PinnedBlocks:
    """Blocks in pinned memory, copied alongside the computing on one stream, in the order of the schedule."""

    def __init__(self, blocks: list[Tensor], stream: torch.cuda.Stream) -> None:
        self._stream = stream
        self._device = stream.device
        stream.wait_stream(torch.cuda.current_stream(self._device))  # what is copied must have been computed
        with torch.cuda.stream(stream):
            self._pinned = [torch.empty(block.shape, dtype=block.dtype, pin_memory=True) for block in blocks]
            for block, pinned in zip(blocks, self._pinned, strict=True):
                pinned.copy_(block, non_blocking=True)
                block.record_stream(stream)  # not given to others before the copy is done

    def load(self) -> list[Tensor]:
        with torch.cuda.stream(self._stream):
            blocks = [pinned.to(self._device, non_blocking=True) for pinned in self._pinned]
        for block in blocks:
            block.record_stream(torch.cuda.current_stream(self._device))
        self._loaded = self._stream.record_event()
        return blocks

    def wait(self) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._loaded)

    def close(self) -> None:
        self._pinned.clear()


SliceKey = tuple[int, int, int]  # stage, microbatch, slice
Roots = dict[int, Tensor | GradientEdge]  # by the output


def key_of(action: Action) -> SliceKey:
    return action.stage, action.microbatch, action.slice


@dataclass
class StepState:
    """The tensors and graphs that a step holds between its actions; all is empty when the step ends."""

    batch: SplitBatch
    loss: Tensor  # sum over this rank's slices so far, float64
    count: Tensor
    loss_weight: Tensor  # of each valid token's loss in what gradients are of, float64
    # By the input, for the stages before
    input_gradients: dict[SliceKey, dict[int, Tensor]] = field(default_factory=dict)
    roots: dict[SliceKey, Roots] = field(default_factory=dict)  # of the backward; none: all frozen
    replays: dict[SliceKey, SliceReplay] = field(default_factory=dict)  # of slices that are recomputed or offloaded
    offloaded: dict[SliceKey, OffloadedBlocks] = field(default_factory=dict)
    handed: dict[SliceKey, Tensors] = field(default_factory=dict)  # from a stage of the same rank: its outputs
    gradients: dict[SliceKey, Tensors] = field(default_factory=dict)  # of a stage's outputs, from the same rank
    outgoing: dict[Action, Tensors] = field(default_factory=dict)  # computed, not yet sent
    weights: dict[SliceKey, list[WeightGradient]] = field(default_factory=dict)  # left by I for W
    for_weights: dict[SliceKey, list[Message]] = field(default_factory=dict)  # whose buffers W reads
    sequence_sums: dict[int, Tensor] = field(default_factory=dict)  # by microbatch, of its slices so far
    log_probabilities: dict[int, Tensor] = field(default_factory=dict)  # of whole sequences, by microbatch
    loss_gradients: dict[int, Tensor] = field(default_factory=dict)  # of whole sequences' sums, by microbatch
    stores: dict[tuple[int, int], ContextStore] = field(default_factory=dict)  # by stage and microbatch

    @classmethod
    def of(cls, batch: SplitBatch, device: torch.device) -> StepState:
        """Returns what a step holds before its first action."""
        weight = torch.full((), batch.loss_weight, dtype=torch.float64, device=device)
        return cls(batch, torch.zeros_like(weight), torch.zeros_like(weight), weight)

    def loss_gradient(self, microbatch: int) -> Tensor:
        """Returns the gradient with which the backward of each slice's sum of losses begins, (), or that of the sums of
        whole sequences, (n,)."""
        return self.loss_gradients.get(microbatch, self.loss_weight)

    def leftovers(self) -> list[str]:
        held = {name: value for name, value in vars(self).items() if isinstance(value, dict) and value}
        return [f"{name}: {list(value)}" for name, value in held.items()]


class Observer(Protocol):
    """The interface of what an executor calls around every action, with what the step holds."""

    def before(self, action: Action, state: StepState) -> None: ...

    def after(self, action: Action, state: StepState) -> None: ...


def entrances(inputs: Tensors, specs: Sequence[TensorSpec], leave: Callable[[int, Tensor], None]) -> Tensors:
    """Returns a stage's inputs as the beginnings of its graph, which keeps none of their memory.

    `leave` gets each gradient with the number of its input.
    """
    enter: Any = _Entrance.apply
    numbered = enumerate(zip(inputs, specs, strict=True))
    token = torch.empty(0, requires_grad=True)
    return tuple(enter(token, t, partial(leave, n)) if spec.needs_gradient else t for n, (t, spec) in numbered)


class _Entrance(torch.autograd.Function):
    """The identity; a leaf would hold its data as long as the graph lives."""

    @staticmethod
    def forward(ctx: Any, token: Tensor, hidden: Tensor, leave: Callable[[Tensor], None]) -> Tensor:
        ctx.leave = leave
        return hidden.view_as(hidden)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None]:
        ctx.leave(gradient)
        return None, None, None


def roots_of(outputs: Tensors) -> Roots:
    """Returns where the backward of a forward's outputs begins: not the tensors, whose memory the next stage needs."""
    return {
        number: output if output.dim() == 0 else get_gradient_edge(output)
        for number, output in enumerate(outputs)
        if output.requires_grad
    }


def keep_apart(parameters: Iterable[Tensor], messages: Tensors) -> None:
    """Copies gradients that autograd has left in the memory of messages, which goes back to the pool: the first of a
    sparse embedding, or of a parameter that was viewed, may be what came in."""
    received = {storage_id(message) for message in messages}
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is not None:
            values = gradient._values() if gradient.is_sparse else gradient
            if storage_id(values) in received:
                parameter.grad = gradient.clone()


def backward(roots: Roots, gradients: Mapping[int, Tensor | None]) -> None:
    """Runs the backward from `roots`, given the gradients of outputs that something depends on; a loss has None.

    The last output comes first: where several are one tensor, their gradients are added up in the order in which
    autograd adds those of its users, the last first.
    """
    numbers = [number for number in sorted(roots, reverse=True) if number in gradients]
    if numbers:
        chosen: Any = [roots[number] for number in numbers]
        torch.autograd.backward(chosen, [gradients[number] for number in numbers])


def with_zeros(gradients: Sequence[Tensor | None], specs: Sequence[TensorSpec], device: torch.device) -> Tensors:
    """Returns the gradients of the tensors that need one, zeros for those on which nothing depends."""
    needing = [spec for spec in specs if spec.needs_gradient]
    return tuple(
        torch.zeros(spec.shape, dtype=spec.dtype, device=device) if gradient is None else gradient
        for gradient, spec in zip(gradients, needing, strict=True)
    )
