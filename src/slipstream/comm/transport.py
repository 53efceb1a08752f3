"""Messages between pipeline ranks, in order per channel, each checked on arrival."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import inf

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from slipstream.comm.message import (
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
from slipstream.model import Tensors, TensorSpec
from slipstream.parallel import PendingWork, RankGroup, Ranks, release_groups_at_exit
from slipstream.parallel.parameter_share import part_length
from slipstream.schedule import Channel, Schedule, send_windows
from slipstream.watchdog import explain_loss, waiting


def _nothing() -> None:
    """Does nothing."""


class Transport:
    """One rank's end of all its channels; this class has no other ends.

    An action names a message: on both ends it is the SEND.
    """

    bytes_sent = 0
    """The bytes sent since `begin`, without headers."""

    def begin(self, agree: Callable[[], object]) -> None:
        """Begins a step. Within a process it forgets the messages of a step that failed; between processes it can't, so
        there it calls `agree`, which may raise an error, before anything is sent or received."""

    def expect(self, schedule: Schedule) -> None:
        """Prepares for the messages of this lowered schedule, or of its evaluation; the placement stays the same."""

    def send(self, channel: Channel, message: Message, tensors: Tensors) -> None:
        """Posts the message and returns without waiting."""

    def settle(self, channel: Channel, message: Message) -> None:
        """Frees the memory of this message and of those before it, as the other end has received it."""

    def post_receive(self, channel: Channel, message: Message, specs: Sequence[TensorSpec]) -> None:
        """Makes room for the message and returns without waiting."""

    def may_receive(self, message: Message) -> bool:
        """Returns whether `receive` may be called now: always where other ranks run by themselves, as it then waits."""
        return True

    def receive(self, message: Message) -> Tensors:
        """Waits for a posted message and returns its tensors. They are the caller's until `release`."""
        raise NotImplementedError

    def release(self, message: Message) -> None:
        """Gives the buffer of a received message back to the pool."""

    def finish(self) -> None:
        """Waits until all sends are done."""


class LocalTransport(Transport):
    """All ranks in one process: a message is handed over as it is, checked like any other, and nothing is sent."""

    def __init__(self) -> None:
        self._sent: defaultdict[Channel, deque[tuple[Message, Tensors]]] = defaultdict(deque)
        self._posted: defaultdict[Channel, deque[tuple[Message, Sequence[TensorSpec]]]] = defaultdict(deque)
        self._arrived: dict[Message, Tensors] = {}

    def begin(self, agree: Callable[[], object]) -> None:
        agree()
        for left in (self._sent, self._posted, self._arrived):
            left.clear()

    def send(self, channel: Channel, message: Message, tensors: Tensors) -> None:
        """Hands the message over as soon as its receive is posted."""
        self._sent[channel].append((message, tuple(map(Tensor.detach, tensors))))
        self._deliver(channel)

    def post_receive(self, channel: Channel, message: Message, specs: Sequence[TensorSpec]) -> None:
        self._posted[channel].append((message, specs))
        self._deliver(channel)

    def may_receive(self, message: Message) -> bool:
        return message in self._arrived

    def receive(self, message: Message) -> Tensors:
        return self._arrived.pop(message)

    def finish(self) -> None:
        if self._arrived or any(self._posted.values()) or any(self._sent.values()):
            left = [*self._arrived, *(message for queue in self._posted.values() for message, *_ in queue)]
            raise TransportError(f"messages are left over: {[str(message) for message in left]}")

    def _deliver(self, channel: Channel) -> None:
        """Hands the oldest send to the oldest receive, whichever is waited for first."""
        sent, posted = self._sent[channel], self._posted[channel]
        while sent and posted:
            (sent_message, tensors), (message, specs) = sent.popleft(), posted.popleft()
            fits = sent_message == message and len(tensors) == len(specs)
            for tensor, spec in zip(tensors, specs, strict=False):
                fits = fits and (tensor.shape, tensor.dtype) == (spec.shape, spec.dtype)
            if not fits:
                # Raises an error that says how they differ.
                check_header(header_of(sent_message, tensors), message, specs)
            self._arrived[message] = tensors


class DistributedTransport(Transport):
    """Point-to-point messages of torch.distributed: gloo and NCCL, a separate communicator for every channel.

    Buffers come from a pool by size, so there are as many as messages were ever in flight at the same time. A send
    waits for the send `window` messages before it on its channel: that is less than a rendezvous demands, for which the
    schedule is proven to end, and gloo reports that a send is done only to a caller that waits. On a channel without a
    window none waits.
    """

    def __init__(
        self,
        windows: dict[Channel, int],
        device: torch.device,
        ranks: Ranks,
        skips: Sequence[Channel] = (),
    ) -> None:
        """Collective: every rank passes the same channels, each but the skips, which are in one order, with its window
        of sends."""
        self._device = device
        self._windows = windows
        self._global_ranks = ranks.pipeline.global_ranks
        # All ranks connect the channels in the same order.
        channels = (*sorted(windows), *skips)
        self._groups = {channel: ranks.connect([channel.source, channel.destination]) for channel in channels}
        self._pool: defaultdict[int, list[Tensor]] = defaultdict(list)
        # Receives in progress: work, buffer, specs.
        self._posted: dict[Message, tuple[dist.Work, Tensor, Sequence[TensorSpec]]] = {}
        self._held: dict[Message, Tensor] = {}
        self._sends: defaultdict[Channel, deque[tuple[Message, PendingWork, Tensor]]] = defaultdict(deque)
        self._agree: Callable[[], object] = _nothing
        self._unchecked: list[tuple[Tensor, Message, Sequence[TensorSpec]]] = []
        if device.type == "cuda" and ranks.world.gpu_backend == "nccl":
            self._open(channels)
        release_groups_at_exit(self)

    def _open(self, channels: Sequence[Channel]) -> None:
        """Sends a number through each channel of this rank, in the order that all ranks have.

        NCCL connects two ranks at their first message, for which the host of each end waits: in a step, a receive that
        is posted ahead would wait for a rank that waits for this one's computing.
        """
        zero = torch.zeros(1, device=self._device)
        for channel in channels:
            ends = [self._global_ranks[rank] for rank in (channel.source, channel.destination)]
            me = dist.get_rank()
            if me in ends:
                exchange = dist.send if me == ends[0] else dist.recv
                exchange(zero, ends[me == ends[0]], group=self._groups[channel])

    def release_groups(self) -> None:
        self._groups.clear()

    def begin(self, agree: Callable[[], object]) -> None:
        self._agree = agree
        # Messages to other processes can't be called back: after a failed step all ranks must restart.
        self.bytes_sent = 0

    def expect(self, schedule: Schedule) -> None:
        self._windows = send_windows(schedule)

    def _agree_first(self) -> None:
        agree, self._agree = self._agree, _nothing
        agree()

    def send(self, channel: Channel, message: Message, tensors: Tensors) -> None:
        self._agree_first()
        if len(self._sends[channel]) >= self._windows.get(channel, inf):
            self._complete(channel)
        self.bytes_sent += sum(tensor.nbytes for tensor in tensors)
        buffer = self._take([TensorSpec(tensor.shape, tensor.dtype) for tensor in tensors])
        with _explained(f"{message} could not be sent"):
            work = self._post_send(channel, message, tensors, buffer)
        self._sends[channel].append((message, work, buffer))

    def _post_send(self, channel: Channel, message: Message, tensors: Tensors, buffer: Tensor) -> PendingWork:
        """Fills the buffer and sends it."""
        pack(message, tensors, buffer)
        return self._send_buffer(channel, buffer)

    def _send_buffer(self, channel: Channel, buffer: Tensor) -> PendingWork:
        work = dist.isend(buffer, self._global_ranks[channel.destination], group=self._groups[channel])
        assert work is not None
        return work

    def settle(self, channel: Channel, message: Message) -> None:
        while any(sent == message for sent, _, _ in self._sends[channel]):
            self._complete(channel)

    def post_receive(self, channel: Channel, message: Message, specs: Sequence[TensorSpec]) -> None:
        self._agree_first()
        buffer = self._take(specs)
        source = self._global_ranks[channel.source]
        group = self._groups[channel]
        with _explained(f"{message} did not arrive"):
            work = dist.irecv(buffer, source, group=group)
        assert work is not None
        self._posted[message] = work, buffer, specs

    def receive(self, message: Message) -> Tensors:
        buffer, specs = self._arrived(message)
        header = header_in(buffer)
        if self._device.type == "cpu":
            check_header(header, message, specs)
        # Reading the header here would stall the stream, so it is kept until the end of the step.
        else:
            self._unchecked.append((header[: header_bytes(specs) // 8].clone(), message, specs))
        self._held[message] = buffer
        return unpack(specs, buffer)

    def _arrived(self, message: Message) -> tuple[Tensor, Sequence[TensorSpec]]:
        """Waits for a posted message; returns its buffer and the specs of its tensors."""
        work, buffer, specs = self._posted.pop(message)
        with _explained(f"{message} did not arrive", "a message"):
            work.wait()
        return buffer, specs

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
        with _explained("the {} from rank {} to rank {} were not taken".format(*channel), "the end of a send"):
            work.wait()
        self._give_back(buffer)

    def _take(self, specs: Sequence[TensorSpec]) -> Tensor:
        size = message_bytes(specs)
        free = self._pool[size]
        return free.pop() if free else torch.empty(size, dtype=torch.uint8, device=self._device)

    def _give_back(self, buffer: Tensor) -> None:
        self._pool[buffer.numel()].append(buffer)


@contextmanager
def _explained(problem: str, awaited: str = "") -> Iterator[None]:
    """Turns an error of gloo or NCCL, which another rank's end causes, into one that names the message."""
    try:
        with waiting(awaited.encode()):
            yield
    except RuntimeError as error:
        raise TransportError(explain_loss(f"{problem}: {error}")) from error


class ScatterGather(Transport):
    """A transport over another one. A stage's tensor-parallel ranks have the same output, so each sends 1/t of it, and
    the receivers gather:

        stage g    rank 0 [a b]  -- a -->  rank 0 [a b]    stage g + 1
                   rank 1 [a b]  -- b -->  rank 1 [a b]

    Received parts are copied into new memory, so the buffer under it is free immediately. All ranks of the tensor axis
    receive the same messages in the same order. Not for sequence parallelism: there each rank has other tokens already.
    """

    def __init__(self, parts: Transport, tensor: RankGroup) -> None:
        self._parts = parts
        self._tensor = tensor
        self._specs: dict[Message, Sequence[TensorSpec]] = {}  # specs of posted messages

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
        size = part_length(tensor.numel(), self._tensor.size)
        flat = functional.pad(tensor.detach().reshape(-1), (0, size * self._tensor.size - tensor.numel()))
        return flat.narrow(0, size * self._tensor.rank, size)

    def settle(self, channel: Channel, message: Message) -> None:
        self._parts.settle(channel, message)

    def post_receive(self, channel: Channel, message: Message, specs: Sequence[TensorSpec]) -> None:
        self._specs[message] = specs
        sizes = [torch.Size([part_length(spec.shape.numel(), self._tensor.size)]) for spec in specs]
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


class FakeTransport(Transport):
    """Drops messages; every receive of a shape and a dtype returns the same numbers."""

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
