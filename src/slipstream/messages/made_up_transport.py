"""Messages that nobody sends: for running one rank's actions without the others."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from slipstream.messages.message import Message
from slipstream.messages.transport import Transport
from slipstream.model import Tensors, TensorSpec
from slipstream.schedule import Channel


class MadeUpTransport(Transport):
    """Drops what is sent; every receive of a shape and a dtype returns the same numbers."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._posted: dict[Message, Tensors] = {}
        self._made: dict[tuple[torch.Size, torch.dtype], Tensor] = {}

    def post_receive(self, channel: Channel, message: Message, specs: Sequence[TensorSpec]) -> None:
        self._posted[message] = tuple(self._numbers(spec.shape, spec.dtype) for spec in specs)

    def receive(self, message: Message) -> Tensors:
        return self._posted.pop(message)

    def _numbers(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        if (shape, dtype) not in self._made:
            numbers = torch.linspace(-1, 1, shape.numel(), dtype=dtype, device=self._device)
            self._made[shape, dtype] = numbers.view(shape)
        return self._made[shape, dtype]
