"""Copies between a GPU and pinned host memory beside its computing, and the buffers they are between.

On a CPU there is no such stream: a copy is done at once, in ordinary memory, and what would be an event is None.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable

import torch
from torch import Tensor

Moment = torch.cuda.Event | None  # of a stream, which others can wait for; None where it has passed


class CopyStream:
    """A stream of a GPU for copies, in the order in which they were begun."""

    def __init__(self, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        self._stream: torch.cuda.Stream | None = torch.cuda.Stream(device) if on_gpu else None  # type: ignore[no-untyped-call]

    def copy(self, target: Tensor, source: Tensor, after: Moment) -> Moment:
        """Begins a copy, of which one side is on the GPU, once `after` has passed; returns the moment it is done."""
        if self._stream is None:
            target.copy_(source)
            return None
        with torch.cuda.stream(self._stream):
            if after is not None:
                self._stream.wait_event(after)
            target.copy_(source, non_blocking=True)
            return _moment_of(self._stream)


class BufferPool:
    """Buffers by size, each with the moment after which it may be written to."""

    def __init__(self, make: Callable[[int], tuple[Tensor, Moment]], is_waited_for: bool) -> None:
        """`make` returns a new buffer of so many bytes. Where buffers can't be waited for, `take` gives those that may
        be written to at once."""
        self._make, self._is_waited_for = make, is_waited_for
        self._free: defaultdict[int, deque[tuple[Tensor, Moment]]] = defaultdict(deque)

    def take(self, size: int) -> tuple[Tensor, Moment]:
        free = self._free[size]
        if free and (self._is_waited_for or has_passed(free[0][1])):
            return free.popleft()
        return self._make(size)

    def give(self, buffer: Tensor, moment: Moment = None) -> None:
        self._free[buffer.numel()].append((buffer, moment))


def buffers_on(device: torch.device) -> BufferPool:
    """Returns a pool of buffers on a GPU. What its current stream still computes may use the memory of a new one."""
    return BufferPool(lambda size: (torch.empty(size, dtype=torch.uint8, device=device), now_on(device)), True)


def buffers_beside(device: torch.device) -> BufferPool:
    """Returns a pool of buffers in host memory, pinned for a GPU; others than the GPU write to them."""
    pinned = device.type == "cuda"
    return BufferPool(lambda size: (torch.empty(size, dtype=torch.uint8, pin_memory=pinned), None), False)


def now_on(device: torch.device) -> Moment:
    """Returns the moment when all that the device's current stream was given until now is done."""
    return _moment_of(torch.cuda.current_stream(device)) if device.type == "cuda" else None


def hold_until(moment: Moment, device: torch.device) -> None:
    """Lets what the device's current stream is given from now on wait for the moment."""
    if moment is not None:
        torch.cuda.current_stream(device).wait_event(moment)


def wait_for(moment: Moment) -> None:
    """Waits for the moment, without keeping other threads or a core busy."""
    if moment is not None:
        moment.synchronize()


def has_passed(moment: Moment) -> bool:
    return moment is None or bool(moment.query())  # type: ignore[no-untyped-call]


def _moment_of(stream: torch.cuda.Stream) -> torch.cuda.Event:
    event: torch.cuda.Event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    event.record(stream)
    return event
