"""Messages between pipeline ranks, in order per channel, each checked on arrival."""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from slipstream.memory import send_windows
from slipstream.parallel.group import ends_in_order
from slipstream.pipeline.ranks import Ranks
from slipstream.schedule.action import Action, Op, Schedule
from slipstream.schedule.lowering import Channel

# gloo accepts a shorter message into a larger buffer without a word, so every message tells what it is.
_HEADER_WORDS = 16  # int64: op, stage, microbatch, slice, dtype, number of dimensions, shape, padding
HEADER_BYTES = 8 * _HEADER_WORDS
_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_OPS = tuple(Op)


class TransportError(RuntimeError):
    """A message that is not the expected one, or that did not come: names what was expected and what came."""


class Transport(Protocol):
    """One rank's end of all its channels. An action names a message: the SEND's on both ends."""

    @property
    def bytes_sent(self) -> int:
        """Since `begin`, headers aside."""
        ...

    def begin(self) -> None:
        """A step comes next. Messages of one that failed are forgotten, where that can be done: within a process."""
        ...

    def expect(self, schedule: Schedule) -> None:
        """The messages of this lowered schedule, or its evaluation, come next; its placement stays the same."""
        ...

    def send(self, channel: Channel, message: Action, tensor: Tensor) -> None:
        """Post the message; returns at once."""
        ...

    def post_receive(self, channel: Channel, message: Action, shape: torch.Size, dtype: torch.dtype) -> None:
        """Make room for the message; returns at once."""
        ...

    def may_receive(self, message: Action) -> bool:
        """Whether `receive` may be called now; where other ranks run by themselves it may always wait."""
        ...

    def receive(self, message: Action) -> Tensor:
        """Wait for a posted message. The tensor is the caller's until `release`."""
        ...

    def release(self, message: Action) -> None:
        """Give the buffer of a received message back to the pool."""
        ...

    def finish(self) -> None:
        """Wait until all sends are done."""
        ...


class LocalTransport:
    """All ranks in one process: a message is handed over as it is, checked like any other."""

    def __init__(self) -> None:
        self.bytes_sent = 0  # nothing leaves the process
        self._sent: defaultdict[Channel, deque[tuple[Action, Tensor]]] = defaultdict(deque)
        self._posted: defaultdict[Channel, deque[tuple[Action, torch.Size, torch.dtype]]] = defaultdict(deque)
        self._arrived: dict[Action, Tensor] = {}

    def begin(self) -> None:
        for left in (self._sent, self._posted, self._arrived):
            left.clear()

    def expect(self, schedule: Schedule) -> None:
        pass

    def send(self, channel: Channel, message: Action, tensor: Tensor) -> None:
        self._sent[channel].append((message, tensor.detach()))
        self._deliver(channel)

    def post_receive(self, channel: Channel, message: Action, shape: torch.Size, dtype: torch.dtype) -> None:
        self._posted[channel].append((message, shape, dtype))
        self._deliver(channel)

    def may_receive(self, message: Action) -> bool:
        return message in self._arrived

    def receive(self, message: Action) -> Tensor:
        return self._arrived.pop(message)

    def release(self, message: Action) -> None:
        pass

    def finish(self) -> None:
        left = [*self._arrived, *(message for queue in self._posted.values() for message, *_ in queue)]
        if left or any(self._sent.values()):
            raise TransportError(f"messages are left over: {[str(message) for message in left]}")

    def _deliver(self, channel: Channel) -> None:
        """First in, first out: the oldest send goes to the oldest receive, whoever is waited for first."""
        sent, posted = self._sent[channel], self._posted[channel]
        while sent and posted:
            (found, tensor), (message, shape, dtype) = sent.popleft(), posted.popleft()
            _check_header(_header(found, tensor), message, shape, dtype)
            self._arrived[message] = tensor


@dataclass
class _Posted:
    work: dist.Work
    buffer: Tensor  # bytes: header and payload
    shape: torch.Size
    dtype: torch.dtype


class DistributedTransport:
    """Point-to-point messages of torch.distributed: gloo and NCCL, a communicator of its own for every channel.

    Buffers come from a pool by size, so there are as many as messages were ever in flight at once. A send waits for the
    send `window` messages before it on its channel: that is less than rendezvous asks, for which the schedule is proven
    to end, and gloo tells that a send is done only to those who wait.
    """

    def __init__(self, windows: dict[Channel, int], device: torch.device, ranks: Ranks, timeout: timedelta) -> None:
        """Collective: every rank passes the same channels in the same order, each with its window of sends."""
        self.bytes_sent = 0
        self._device = device
        self._timeout = timeout
        self._global_ranks = ranks.global_ranks
        self._windows = windows
        self._groups = {channel: ranks.connect([channel.source, channel.destination], timeout) for channel in windows}
        self._pool: defaultdict[int, list[Tensor]] = defaultdict(list)
        self._posted: dict[Action, _Posted] = {}
        self._held: dict[Action, Tensor] = {}
        self._sends: defaultdict[Channel, deque[tuple[dist.Work, Tensor]]] = defaultdict(deque)
        self._unchecked: list[tuple[Tensor, Action, torch.Size, torch.dtype]] = []
        ends_in_order(self)

    def let_go(self) -> None:
        self._groups.clear()

    def begin(self) -> None:
        self.bytes_sent = 0  # what another process has sent can't be called back: after a failed step all must restart

    def expect(self, schedule: Schedule) -> None:
        self._windows = _windows(schedule)

    def send(self, channel: Channel, message: Action, tensor: Tensor) -> None:
        if len(self._sends[channel]) >= self._windows[channel]:
            self._complete(channel)
        self.bytes_sent += tensor.nbytes
        buffer = self._take(tensor.nbytes)
        buffer[:HEADER_BYTES].view(torch.int64).copy_(_header(message, tensor))
        buffer[HEADER_BYTES:].view(tensor.dtype).view(tensor.shape).copy_(tensor.detach())
        work = dist.isend(buffer, self._global_ranks[channel.destination], group=self._groups[channel])
        assert work is not None
        self._sends[channel].append((work, buffer))

    def post_receive(self, channel: Channel, message: Action, shape: torch.Size, dtype: torch.dtype) -> None:
        buffer = self._take(shape.numel() * dtype.itemsize)
        work = dist.irecv(buffer, self._global_ranks[channel.source], group=self._groups[channel])
        assert work is not None
        self._posted[message] = _Posted(work, buffer, shape, dtype)

    def may_receive(self, message: Action) -> bool:
        return True

    def receive(self, message: Action) -> Tensor:
        posted = self._posted.pop(message)
        try:
            posted.work.wait(self._timeout)
        except RuntimeError as error:
            raise TransportError(f"{message} did not arrive: {error}") from error
        header = posted.buffer[:HEADER_BYTES].view(torch.int64)
        if self._device.type == "cpu":
            _check_header(header, message, posted.shape, posted.dtype)
        else:  # reading it here would stall the stream: kept until the end of the step
            self._unchecked.append((header.clone(), message, posted.shape, posted.dtype))
        self._held[message] = posted.buffer
        return posted.buffer[HEADER_BYTES:].view(posted.dtype).view(posted.shape)

    def release(self, message: Action) -> None:
        self._give_back(self._held.pop(message))

    def finish(self) -> None:
        for channel in list(self._sends):
            while self._sends[channel]:
                self._complete(channel)
        for header, message, shape, dtype in self._unchecked:
            _check_header(header, message, shape, dtype)
        self._unchecked.clear()
        if self._posted or self._held:
            raise TransportError(f"messages are left over: {[*self._posted, *self._held]}")

    def _complete(self, channel: Channel) -> None:
        work, buffer = self._sends[channel].popleft()
        try:
            work.wait(self._timeout)
        except RuntimeError as error:
            message = "the {} from rank {} to rank {}".format(*channel)
            raise TransportError(f"{message} were not taken: {error}") from error
        self._give_back(buffer)

    def _take(self, payload_bytes: int) -> Tensor:
        size = HEADER_BYTES + payload_bytes
        free = self._pool[size]
        return free.pop() if free else torch.empty(size, dtype=torch.uint8, device=self._device)

    def _give_back(self, buffer: Tensor) -> None:
        self._pool[buffer.numel()].append(buffer)


def connect(schedule: Schedule, device: torch.device, ranks: Ranks, timeout: timedelta) -> DistributedTransport:
    """Collective: communicators for every channel of a lowered schedule and its evaluation."""
    return DistributedTransport(_windows(schedule), device, ranks, timeout)


def _windows(schedule: Schedule) -> dict[Channel, int]:
    return dict(sorted(send_windows(schedule).items()))  # in the same order on every rank


def _header(message: Action, tensor: Tensor) -> Tensor:
    words = [_OPS.index(message.op), message.stage, message.microbatch, message.slice]
    words += [_DTYPES.index(tensor.dtype), tensor.dim(), *tensor.shape]
    return torch.tensor(words + [0] * (_HEADER_WORDS - len(words)), dtype=torch.int64)


def _check_header(header: Tensor, message: Action, shape: torch.Size, dtype: torch.dtype) -> None:
    op, stage, microbatch, index, dtype_index, num_dims, *rest = header.tolist()
    came = (Action(_OPS[op], stage, microbatch, index), torch.Size(rest[:num_dims]), _DTYPES[dtype_index])
    if came != (message, shape, dtype):
        raise TransportError(
            f"expected {message} of {tuple(shape)} {dtype}, but {came[0]} of {tuple(came[1])} {came[2]} came. Every "
            "rank must call step with inputs of the same shape, under the same autocast."
        )
