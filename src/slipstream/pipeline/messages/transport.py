"""Messages between pipeline ranks, in order per channel, each checked on arrival."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from math import inf
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from slipstream.model import Tensors, TensorSpec
from slipstream.parallel import release_groups_at_exit
from slipstream.pipeline.messages.message import (
    Message,
    TransportError,
    check_header,
    header_bytes,
    header_in,
    header_of,
    message_bytes,
    pack,
    unpack,
)
from slipstream.pipeline.ranks import Ranks
from slipstream.schedule import Channel, Schedule, send_windows


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

    def send(self, channel: Channel, message: Message, tensors: Tensors) -> None:
        """Posts the message and returns without waiting."""
        ...

    def settle(self, channel: Channel, message: Message) -> None:
        """The other end has received this message: what is kept of it, and of those before it, may go."""
        ...

    def post_receive(self, channel: Channel, message: Message, specs: Sequence[TensorSpec]) -> None:
        """Makes room for the message and returns without waiting."""
        ...

    def may_receive(self, message: Message) -> bool:
        """Whether `receive` may be called now; where other ranks run by themselves it may always wait."""
        ...

    def receive(self, message: Message) -> Tensors:
        """Wait for a posted message. The tensors are the caller's until `release`."""
        ...

    def release(self, message: Message) -> None:
        """Give the buffer of a received message back to the pool."""
        ...

    def finish(self) -> None:
        """Wait until all sends are done."""
        ...


class LocalTransport:
    """All ranks in one process: a message is handed over as it is, checked like any other."""

    def __init__(self) -> None:
        self.bytes_sent = 0  # nothing leaves the process
        self._sent: defaultdict[Channel, deque[tuple[Message, Tensors]]] = defaultdict(deque)
        self._posted: defaultdict[Channel, deque[tuple[Message, Sequence[TensorSpec]]]] = defaultdict(deque)
        self._arrived: dict[Message, Tensors] = {}

    def begin(self) -> None:
        for left in (self._sent, self._posted, self._arrived):
            left.clear()

    def expect(self, schedule: Schedule) -> None:
        pass

    def send(self, channel: Channel, message: Message, tensors: Tensors) -> None:
        self._sent[channel].append((message, tuple(tensor.detach() for tensor in tensors)))
        self._deliver(channel)

    def settle(self, channel: Channel, message: Message) -> None:
        pass

    def post_receive(self, channel: Channel, message: Message, specs: Sequence[TensorSpec]) -> None:
        self._posted[channel].append((message, specs))
        self._deliver(channel)

    def may_receive(self, message: Message) -> bool:
        return message in self._arrived

    def receive(self, message: Message) -> Tensors:
        return self._arrived.pop(message)

    def release(self, message: Message) -> None:
        pass

    def finish(self) -> None:
        left = [*self._arrived, *(message for queue in self._posted.values() for message, *_ in queue)]
        if left or any(self._sent.values()):
            raise TransportError(f"messages are left over: {[str(message) for message in left]}")

    def _deliver(self, channel: Channel) -> None:
        """First in, first out: the oldest send goes to the oldest receive, whoever is waited for first."""
        sent, posted = self._sent[channel], self._posted[channel]
        while sent and posted:
            (found, tensors), (message, specs) = sent.popleft(), posted.popleft()
            check_header(header_of(found, tensors), message, specs)
            self._arrived[message] = tensors


@dataclass
class _Posted:
    work: dist.Work
    buffer: Tensor  # bytes: header and payload
    specs: Sequence[TensorSpec]


class DistributedTransport:
    """Point-to-point messages of torch.distributed: gloo and NCCL, a separate communicator for every channel.

    Buffers come from a pool by size, so there are as many as messages were ever in flight at once. A send waits for the
    send `window` messages before it on its channel: that is less than a rendezvous demands, for which the schedule is
    proven to end, and gloo tells that a send is done only to those who wait. On a channel without a window none waits.
    """

    def __init__(
        self,
        windows: dict[Channel, int],
        device: torch.device,
        ranks: Ranks,
        timeout: timedelta,
        skips: Sequence[Channel] = (),
    ) -> None:
        """Collective: every rank passes the same channels in the same order, each but the skips with its window of
        sends."""
        self.bytes_sent = 0
        self._device = device
        self._timeout = timeout
        self._global_ranks = ranks.global_ranks
        self._windows = windows
        channels = (*windows, *skips)
        self._groups = {channel: ranks.connect([channel.source, channel.destination], timeout) for channel in channels}
        self._pool: defaultdict[int, list[Tensor]] = defaultdict(list)
        self._posted: dict[Message, _Posted] = {}
        self._held: dict[Message, Tensor] = {}
        self._sends: defaultdict[Channel, deque[tuple[Message, dist.Work, Tensor]]] = defaultdict(deque)
        self._unchecked: list[tuple[Tensor, Message, Sequence[TensorSpec]]] = []
        release_groups_at_exit(self)

    def release_groups(self) -> None:
        self._groups.clear()

    def begin(self) -> None:
        self.bytes_sent = 0  # what another process has sent can't be called back: after a failed step all must restart

    def expect(self, schedule: Schedule) -> None:
        self._windows = _windows(schedule)

    def send(self, channel: Channel, message: Message, tensors: Tensors) -> None:
        if len(self._sends[channel]) >= self._windows.get(channel, inf):
            self._complete(channel)
        self.bytes_sent += sum(tensor.nbytes for tensor in tensors)
        buffer = self._take([TensorSpec(tensor.shape, tensor.dtype) for tensor in tensors])
        pack(message, tensors, buffer)
        to, group = self._global_ranks[channel.destination], self._groups[channel]
        work = _started(lambda: dist.isend(buffer, to, group=group), f"{message} could not be sent")
        self._sends[channel].append((message, work, buffer))

    def settle(self, channel: Channel, message: Message) -> None:
        while any(sent == message for sent, _, _ in self._sends[channel]):
            self._complete(channel)

    def post_receive(self, channel: Channel, message: Message, specs: Sequence[TensorSpec]) -> None:
        buffer = self._take(specs)
        source, group = self._global_ranks[channel.source], self._groups[channel]
        work = _started(lambda: dist.irecv(buffer, source, group=group), f"{message} did not arrive")
        self._posted[message] = _Posted(work, buffer, specs)

    def may_receive(self, message: Message) -> bool:
        return True

    def receive(self, message: Message) -> Tensors:
        posted = self._posted.pop(message)
        try:
            posted.work.wait(self._timeout)
        except RuntimeError as error:
            raise TransportError(f"{message} did not arrive: {error}") from error
        header = header_in(posted.buffer)
        if self._device.type == "cpu":
            check_header(header, message, posted.specs)
        else:  # reading it here would stall the stream: kept until the end of the step
            length = header_bytes([spec.shape for spec in posted.specs]) // 8
            self._unchecked.append((header[:length].clone(), message, posted.specs))
        self._held[message] = posted.buffer
        return unpack(posted.specs, posted.buffer)

    def release(self, message: Message) -> None:
        self._give_back(self._held.pop(message))

    def finish(self) -> None:
        for channel in list(self._sends):
            while self._sends[channel]:
                self._complete(channel)
        for header, message, specs in self._unchecked:
            check_header(header, message, specs)
        self._unchecked.clear()
        if self._posted or self._held:
            raise TransportError(f"messages are left over: {[*self._posted, *self._held]}")

    def _complete(self, channel: Channel) -> None:
        _, work, buffer = self._sends[channel].popleft()
        try:
            work.wait(self._timeout)
        except RuntimeError as error:
            messages = "the {} from rank {} to rank {}".format(*channel)
            raise TransportError(f"{messages} were not taken: {error}") from error
        self._give_back(buffer)

    def _take(self, specs: Sequence[TensorSpec]) -> Tensor:
        size = message_bytes(specs)
        free = self._pool[size]
        return free.pop() if free else torch.empty(size, dtype=torch.uint8, device=self._device)

    def _give_back(self, buffer: Tensor) -> None:
        self._pool[buffer.numel()].append(buffer)


def _started(start: Callable[[], dist.Work | None], problem: str) -> dist.Work:
    """Tells every rank, not only those that wait, that another rank has ended."""
    try:
        work = start()
    except RuntimeError as error:
        raise TransportError(f"{problem}: {error}") from error
    assert work is not None
    return work


def connect(
    schedule: Schedule, device: torch.device, ranks: Ranks, timeout: timedelta, skips: Sequence[Channel] = ()
) -> DistributedTransport:
    """Collective: communicators for every channel of a lowered schedule and its evaluation, and for skips."""
    return DistributedTransport(_windows(schedule), device, ranks, timeout, skips)


def _windows(schedule: Schedule) -> dict[Channel, int]:
    return dict(sorted(send_windows(schedule).items()))  # in the same order on every rank
