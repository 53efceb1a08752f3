"""Messages between ranks that share a GPU, which NCCL refuses: by gloo, from and into pinned host memory.

    sender     computing    ... F0 [pack]                  [F1] ...
               copies                    [to the host]
               a thread                               waits [isend]
    receiver   main thread  irecv, waits [checks the header]
               copies                                  [to the GPU]
               computing                                           waits [F0] ...

A rank waits on its main thread only for others' messages, as with gloo between processors. The thread sends the copies
in order; a copy waits for work of its own GPU alone, so every message is sent whatever its rank waits for.

Copies between a GPU and pinned host memory beside its computing, and the buffers they are between.

On a CPU there is no such stream: a copy is done at once, in ordinary memory, and what would be an event is None.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

import torch
from torch import Tensor

from slipstream.comm.message import (
    Message,
    TransportError,
    call_off,
    check_header,
    header_bytes,
    header_in,
    message_bytes,
    unpack,
    write_header,
    write_tensors,
)
from slipstream.comm.transport import DistributedTransport
from slipstream.model import Tensors, TensorSpec
from slipstream.parallel import PendingWork, Ranks
from slipstream.schedule import Channel


def connect_transport(
    windows: dict[Channel, int], device: torch.device, ranks: Ranks, skips: Sequence[Channel] = ()
) -> DistributedTransport:
    """Returns the transport between processes: by way of host memory where gloo connects their GPUs. Collective."""
    staged = device.type == "cuda" and ranks.world.gpu_backend == "gloo"
    return (StagedTransport if staged else DistributedTransport)(windows, device, ranks, skips)


class StagedTransport(DistributedTransport):
    """A DistributedTransport by way of host memory; between processors it does the same with ordinary memory."""

    def __init__(
        self, windows: dict[Channel, int], device: torch.device, ranks: Ranks, skips: Sequence[Channel] = ()
    ) -> None:
        """Collective, as that of DistributedTransport."""
        # The thread needs the device with its number.
        device = torch.empty(0, device=device).device
        super().__init__(windows, device, ranks, skips)
        self._outward = CopyStream(device)
        self._inward = CopyStream(device)
        self._hosts = buffers_beside(device)
        self._here = buffers_on(device)
        self._failure = ""  # a failure on the GPU, noted by the thread
        self._sender = ThreadPoolExecutor(1, "sender", partial(_enter_thread, device))

    def release_groups(self) -> None:
        """Ends the thread, which nothing waits for any more, and releases the groups."""
        self._sender.shutdown(wait=False, cancel_futures=True)
        super().release_groups()

    def receive(self, message: Message) -> Tensors:
        host, specs = self._arrived(message)
        check_header(header_in(host), message, specs)
        here, free = self._here.take(host.numel())
        copied = self._inward.copy(here, host, free)
        hold_until(copied, self._device)
        self._hosts.give(host, copied)
        self._held[message] = here
        return unpack(specs, here)

    def release(self, message: Message) -> None:
        self._here.give(self._held.pop(message), now_on(self._device))

    def _post_send(self, channel: Channel, message: Message, tensors: Tensors, buffer: Tensor) -> PendingWork:
        """Packs the message on the GPU, so that its tensors may change, and leaves it to the thread."""
        begin = header_bytes([TensorSpec(tensor.shape, tensor.dtype) for tensor in tensors])
        # The buffer's last use comes earlier on the same stream.
        here, _ = self._here.take(buffer.numel())
        write_header(message, tensors, buffer)
        write_tensors(tensors, here)
        copied = self._outward.copy(buffer[begin:], here[begin:], now_on(self._device))
        posted = self._sender.submit(self._send_copied, copied, channel, buffer)
        return StagedSend(posted, partial(self._here.give, here))

    def _send_copied(self, copied: Moment, channel: Channel, buffer: Tensor) -> PendingWork:
        """Sends a copied message; where the GPU failed, says so to the receiver, for which this rank may wait."""
        try:
            wait_for(copied)
        except RuntimeError as error:
            self._failure = self._failure or str(error)
            call_off(buffer)
            self._send_buffer(channel, buffer).wait()
            raise
        return self._send_buffer(channel, buffer)

    def _arrived(self, message: Message) -> tuple[Tensor, Sequence[TensorSpec]]:
        try:
            return super()._arrived(message)
        except TransportError as error:
            # That failure has ended the rank for which this one waited.
            if self._failure:
                raise TransportError(f"a message could not be copied from this rank's GPU: {self._failure}") from error
            raise

    def _take(self, specs: Sequence[TensorSpec]) -> Tensor:
        return self._hosts.take(message_bytes(specs))[0]

    def _give_back(self, buffer: Tensor) -> None:
        self._hosts.give(buffer)


class StagedSend:
    """A send of a thread."""

    def __init__(self, posted: Future[PendingWork], done: Callable[[], None]) -> None:
        self._posted = posted
        self._done = done

    def wait(self) -> None:
        """Waits until the message is sent; raises the thread's error."""
        self._posted.result().wait()
        self._done()


def _enter_thread(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.set_device(device)


Moment = torch.cuda.Event | None  # an event of a stream to wait for; None: already passed


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
        """`make` returns a new buffer of the given number of bytes. Where buffers can't be waited for, `take` gives
        those that may
        be written to at once."""
        self._make = make
        self._is_waited_for = is_waited_for
        self._free: defaultdict[int, deque[tuple[Tensor, Moment]]] = defaultdict(deque)

    def take(self, size: int) -> tuple[Tensor, Moment]:
        free = self._free[size]
        if free and (self._is_waited_for or has_passed(free[0][1])):
            return free.popleft()
        return self._make(size)

    def give(self, buffer: Tensor, moment: Moment = None) -> None:
        self._free[buffer.numel()].append((buffer, moment))


def buffers_on(device: torch.device) -> BufferPool:
    """Returns a pool of buffers on a GPU. Pending work of its current stream may use the memory of a new one."""
    return BufferPool(lambda size: (torch.empty(size, dtype=torch.uint8, device=device), now_on(device)), True)


def buffers_beside(device: torch.device) -> BufferPool:
    """Returns a pool of buffers in host memory, pinned for a GPU; others than the GPU write to them."""
    pinned = device.type == "cuda"
    return BufferPool(lambda size: (torch.empty(size, dtype=torch.uint8, pin_memory=pinned), None), False)


def now_on(device: torch.device) -> Moment:
    """Returns the moment when all that the device's current stream was given until now is done."""
    return _moment_of(torch.cuda.current_stream(device)) if device.type == "cuda" else None


def hold_until(moment: Moment, device: torch.device) -> None:
    """Lets the later work of the device's current stream wait for the moment."""
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
