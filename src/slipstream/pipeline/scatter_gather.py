"""Messages between stages where several ranks share each layer: from each its part (PTD-P 4.1, scatter/gather)."""

from __future__ import annotations

from math import ceil

import torch
from torch import Tensor
from torch.nn import functional

from slipstream.parallel.group import Group
from slipstream.pipeline.transport import Transport
from slipstream.schedule.action import Action, Schedule
from slipstream.schedule.lowering import Channel


class ScatterGather:
    """A transport over another one. A stage's tensor-parallel ranks have the same output, so each sends 1/t of it, and
    the receivers gather:

        stage g    rank 0 [a b]  -- a -->  rank 0 [a b]    stage g + 1
                   rank 1 [a b]  -- b -->  rank 1 [a b]

    What is received is in memory of its own, so the buffer under it goes back at once. All ranks of the tensor axis
    receive the same messages in the same order. Not for sequence parallelism: there each rank has other tokens already.
    """

    def __init__(self, parts: Transport, tensor: Group) -> None:
        self._parts, self._tensor = parts, tensor
        self._shapes: dict[Action, torch.Size] = {}  # of messages that are posted

    @property
    def bytes_sent(self) -> int:
        return self._parts.bytes_sent

    def begin(self) -> None:
        self._shapes.clear()
        self._parts.begin()

    def expect(self, schedule: Schedule) -> None:
        self._parts.expect(schedule)

    def send(self, channel: Channel, message: Action, tensor: Tensor) -> None:
        size = part_size(tensor.numel(), self._tensor.size)
        flat = functional.pad(tensor.detach().reshape(-1), (0, size * self._tensor.size - tensor.numel()))
        self._parts.send(channel, message, flat.narrow(0, size * self._tensor.rank, size))

    def post_receive(self, channel: Channel, message: Action, shape: torch.Size, dtype: torch.dtype) -> None:
        self._shapes[message] = shape
        self._parts.post_receive(channel, message, torch.Size([part_size(shape.numel(), self._tensor.size)]), dtype)

    def may_receive(self, message: Action) -> bool:
        return self._parts.may_receive(message)

    def receive(self, message: Action) -> Tensor:
        """Collective over the tensor axis."""
        shape = self._shapes.pop(message)
        whole = self._tensor.all_gather(self._parts.receive(message)).view(-1)
        self._parts.release(message)
        return whole[: shape.numel()].view(shape)

    def release(self, message: Action) -> None:
        pass

    def finish(self) -> None:
        self._parts.finish()


def part_size(size: int, num_parts: int) -> int:
    """Elements of each part of a message of `size`, the last one padded."""
    return ceil(size / num_parts)
