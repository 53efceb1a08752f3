"""Messages between stages where several ranks share each layer: from each its part (PTD-P 4.1, scatter/gather)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import ceil

import torch
from torch import Tensor
from torch.nn import functional

from slipstream.messages.message import Message
from slipstream.messages.transport import Transport
from slipstream.model import Tensors, TensorSpec
from slipstream.parallel import RankGroup
from slipstream.schedule import Channel, Schedule


class ScatterGather(Transport):
    """A transport over another one. A stage's tensor-parallel ranks have the same output, so each sends 1/t of it, and
    the receivers gather:

        stage g    rank 0 [a b]  -- a -->  rank 0 [a b]    stage g + 1
                   rank 1 [a b]  -- b -->  rank 1 [a b]

    What is received is copied into new memory, so the buffer under it is free immediately. All ranks of the tensor axis
    receive the same messages in the same order. Not for sequence parallelism: there each rank has other tokens already.
    """

    def __init__(self, parts: Transport, tensor: RankGroup) -> None:
        self._parts, self._tensor = parts, tensor
        self._specs: dict[Message, Sequence[TensorSpec]] = {}  # of messages that are posted

    def begin(self, agree: Callable[[], object]) -> None:
        self.bytes_sent = 0
        self._specs.clear()
        self._parts.begin(agree)

    def expect(self, schedule: Schedule) -> None:
        self._parts.expect(schedule)

    def send(self, channel: Channel, message: Message, tensors: Tensors) -> None:
        self._parts.send(channel, message, tuple(self._part(tensor) for tensor in tensors))
        self.bytes_sent = self._parts.bytes_sent

    def _part(self, tensor: Tensor) -> Tensor:
        size = part_size(tensor.numel(), self._tensor.size)
        flat = functional.pad(tensor.detach().reshape(-1), (0, size * self._tensor.size - tensor.numel()))
        return flat.narrow(0, size * self._tensor.rank, size)

    def settle(self, channel: Channel, message: Message) -> None:
        self._parts.settle(channel, message)

    def post_receive(self, channel: Channel, message: Message, specs: Sequence[TensorSpec]) -> None:
        self._specs[message] = specs
        sizes = [torch.Size([part_size(spec.shape.numel(), self._tensor.size)]) for spec in specs]
        parts = [spec._replace(shape=size) for spec, size in zip(specs, sizes, strict=True)]
        self._parts.post_receive(channel, message, parts)

    def may_receive(self, message: Message) -> bool:
        return self._parts.may_receive(message)

    def receive(self, message: Message) -> Tensors:
        """Returns a message's tensors, gathered from the ranks' parts. Collective over the tensor axis."""
        shapes = [spec.shape for spec in self._specs.pop(message)]
        whole = [self._tensor.all_gather(part).view(-1) for part in self._parts.receive(message)]
        self._parts.release(message)
        return tuple(flat[: shape.numel()].view(shape) for flat, shape in zip(whole, shapes, strict=True))

    def finish(self) -> None:
        self._parts.finish()


def part_size(size: int, num_parts: int) -> int:
    """Returns the elements of each part of a message of `size`, the last one padded."""
    return ceil(size / num_parts)
