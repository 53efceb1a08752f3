"""The way between a device and the optimizer on its host: gradients out, with their norms, and weights back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from itertools import cycle
from weakref import ReferenceType, ref

import torch
from torch import Tensor

from slipstream.host_memory import HostSegments

_BLOCK = 2**24  # elements that are widened, or copied back, at a time


def sum_of_squares(tensor: Tensor) -> Tensor:
    """Returns the sum of a tensor's squares in float64, on its device; a large one is widened block by block."""
    if tensor.is_sparse or tensor.numel() <= _BLOCK or not tensor.is_contiguous():
        return tensor.double().square().sum()
    total = torch.zeros((), dtype=torch.float64, device=tensor.device)
    for block in torch.split(tensor.view(-1), _BLOCK):
        total += block.double().square().sum()
    return total


class HostLink:
    """Copies between a device and its host, beside the device's computing: out on a stream of its own, into pinned
    memory, and back by way of two pinned buffers. On a CPU gradients are there already."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._segments = HostSegments(device)
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._buffers: dict[torch.dtype, Iterator[tuple[Tensor, torch.cuda.Event]]] = {}
        # By name, the gradient that was taken last, its version then, and the sum of its squares
        self._squares: dict[str, tuple[ReferenceType[Tensor], int, Tensor]] = {}

    def beside(self) -> AbstractContextManager[object]:
        """Returns a context in which the copies' stream is the current one."""
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def take(self, name: str, gradient: Tensor) -> Tensor:
        """Starts to copy a gradient to the host, once the current stream has computed it, and returns the copy, which
        may be read after `wait`; on a CPU it is the gradient itself."""
        square = None if gradient.is_sparse else sum_of_squares(gradient)
        taken = gradient if self._stream is None else self._copied(gradient, self._stream)
        if square is not None:
            self._squares[name] = ref(taken), taken._version, square
        return taken

    def wait(self) -> None:
        """Returns when all gradients that were taken are on the host."""
        if self._stream is not None:
            self._stream.synchronize()

    def square_of(self, name: str, gradient: Tensor) -> Tensor:
        """Returns the sum of a gradient's squares in float64: what the device found before it was taken, or, where it
        was changed or added to since, of what is here now."""
        if name in self._squares:
            taken, version, square = self._squares[name]
            if taken() is gradient and gradient._version == version:
                return square
        return sum_of_squares(gradient)

    def put(self, target: Tensor, source: Tensor) -> None:
        """Copies a tensor of the host to one of the device, in the dtype of that; `source` may change afterwards."""
        if self._stream is None or not (target.is_contiguous() and source.is_contiguous()):
            target.copy_(source)
            return
        pieces = (torch.split(tensor.view(-1), _BLOCK) for tensor in (target, source))
        for there, here in zip(*pieces, strict=True):
            buffer, is_free = next(self._buffers_of(target.dtype))
            is_free.synchronize()
            staged = buffer[: len(here)].copy_(here)
            there.copy_(staged, non_blocking=True)
            is_free.record(torch.cuda.current_stream(self._device))

    def _copied(self, gradient: Tensor, stream: torch.cuda.Stream) -> Tensor:
        if gradient.is_sparse:
            return gradient.cpu()
        stream.wait_stream(torch.cuda.current_stream(self._device))
        taken = self._segments.like(gradient)
        with torch.cuda.stream(stream):
            taken.copy_(gradient, non_blocking=True)
        gradient.record_stream(stream)
        return taken

    def _buffers_of(self, dtype: torch.dtype) -> Iterator[tuple[Tensor, torch.cuda.Event]]:
        """Returns two pinned buffers in turn, each with the event after which it may be written."""
        if dtype not in self._buffers:
            events: list[torch.cuda.Event] = [torch.cuda.Event(), torch.cuda.Event()]  # type: ignore[no-untyped-call]
            self._buffers[dtype] = cycle([(torch.empty(_BLOCK, dtype=dtype, pin_memory=True), e) for e in events])
        return self._buffers[dtype]
