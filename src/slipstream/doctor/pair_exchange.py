"""What two neighbouring ranks exchange in training: activations one way and gradients the other, at the same time.

rank 0  -- activations -->  rank 1       each direction by a communicator of its own, as in DistributedTransport
        <-- gradients ----
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from slipstream.doctor.timed_calls import WrongBytesError, run_within

LARGE = 4 * 2**20  # bytes
_SMALL = 1024  # bytes
_ROUND_TRIPS = 20
_IN_A_ROW = 8  # large messages
_TRIALS = 3
_PERIOD = 251  # of the bytes that are sent: prime, so that no shifted message looks right


class NeighbourPair(NamedTuple):
    """Two ranks next to each other in a pipeline: the first sends activations to the second."""

    first: int
    second: int

    def __str__(self) -> str:
        return f"ranks {self.first} and {self.second}"

    @property
    def ways(self) -> tuple[str, str]:
        """The names of both directions."""
        return f"activations {self.first} to {self.second}", f"gradients {self.second} to {self.first}"


class MeasuredPair(NamedTuple):
    """What one of the two ranks has measured."""

    received: str
    """The direction of which it is the receiver."""
    latency: float
    """Seconds of a small message."""
    bandwidth: float
    """Bytes per second that it received in large messages while it sent as many."""
    order: list[str]
    """The directions as they ended on it, of two large messages that began at the same time."""


def neighbour_pairs(num_ranks: int) -> list[NeighbourPair]:
    """Returns the pairs of a pipeline; with several stages per rank the last sends to the first, too."""
    pairs = [NeighbourPair(rank, rank + 1) for rank in range(num_ranks - 1)]
    return pairs + ([NeighbourPair(num_ranks - 1, 0)] if num_ranks > 2 else [])


class _Posted(NamedTuple):
    work: dist.Work
    buffer: Tensor


class PairEnd:
    """This rank's end of a pair's two communicators."""

    def __init__(
        self, pair: NeighbourPair, rank: int, groups: Sequence[dist.ProcessGroup | None], device: torch.device
    ) -> None:
        self.pair, self._device = pair, device
        self._groups = dict(zip(pair.ways, groups, strict=True))
        self._peer = pair.second if rank == pair.first else pair.first
        self.sent, self.received = pair.ways if rank == pair.first else pair.ways[::-1]

    def measure(self, seconds: float) -> MeasuredPair:
        """Tries each direction alone, then both at once, and measures. Both ends call this at the same time.

        Raises:
            ExchangeError: names the direction that didn't end within these seconds, or had wrong bytes.
        """
        left = countdown(seconds)
        for way in self.pair.ways:  # NCCL makes a communicator at its first message: both ends have one order
            self._one_way(way, left)
        order = list(both_ways([self], 1, left))
        took = min(both_ways([self], _IN_A_ROW, left)[self.received] for _ in range(_TRIALS))
        latency = min(self._latency(left) for _ in range(_TRIALS))
        return MeasuredPair(self.received, latency, _IN_A_ROW * LARGE / took, order)

    def _one_way(self, way: str, left: Callable[[], float]) -> None:
        posted: list[_Posted] = []

        def send() -> None:
            posted.append(self.post(way, self.buffer(way, _SMALL)))
            self.finish(posted)

        run_within(left(), {way: send})
        self.check(way, posted)

    def buffer(self, way: str, size: int) -> Tensor:
        """Returns what this rank sends in this direction, or room for what it receives."""
        if way == self.sent:
            return self._content(way, size)
        return torch.zeros(size, dtype=torch.uint8, device=self._device)

    def post(self, way: str, buffer: Tensor) -> _Posted:
        """Posts a message of this direction, which this rank sends or receives."""
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)  # which each thread has of its own
        call = dist.isend if way == self.sent else dist.irecv
        work = call(buffer, self._peer, group=self._groups[way])
        assert work is not None
        return _Posted(work, buffer)

    def finish(self, posted: Sequence[_Posted]) -> None:
        """Waits until messages are there."""
        with _waited_for(self._device):
            for each in posted:
                each.work.wait()

    def check(self, way: str, posted: Sequence[_Posted]) -> None:
        """Raises WrongBytesError where another message came than the one that was sent."""
        for each in posted if way == self.received else ():
            size = each.buffer.numel()
            if wrong := int((each.buffer != self._content(way, size)).sum()):
                raise WrongBytesError(f"{wrong} of {size} bytes are wrong in a message of the {way}")

    def _content(self, way: str, size: int) -> Tensor:
        numbers = torch.arange(_PERIOD, dtype=torch.uint8, device=self._device)
        numbers = numbers.roll(self.pair.first + self.pair.ways.index(way))
        return numbers.repeat(-(-size // _PERIOD))[:size]

    def _latency(self, left: Callable[[], float]) -> float:
        """Returns the seconds of a small message, from those that go to and fro."""
        buffers = {way: self.buffer(way, _SMALL) for way in self.pair.ways}

        def go_and_return() -> None:
            with _waited_for(self._device):
                for _ in range(_ROUND_TRIPS):
                    for way in self.pair.ways:
                        self.post(way, buffers[way]).work.wait()

        (seconds,) = run_within(left(), {f"small messages between {self.pair}": go_and_return}).values()
        return seconds / _ROUND_TRIPS / 2


def countdown(seconds: float) -> Callable[[], float]:
    """Returns a function of the seconds that are left of these."""
    deadline = time.monotonic() + seconds
    return lambda: max(0.0, deadline - time.monotonic())


def both_ways(ends: Sequence[PairEnd], number: int, left: Callable[[], float]) -> dict[str, float]:
    """Sends and receives large messages with all these pairs at once; returns the seconds of each direction, in the
    order in which they ended on this rank. `left` returns the seconds that are left for it.

    Receives are posted before sends, in one thread, as the pipeline does.
    """
    by_way = {end.received: end for end in ends} | {end.sent: end for end in ends}
    buffers = {way: [end.buffer(way, LARGE) for _ in range(number)] for way, end in by_way.items()}
    posted: dict[str, list[_Posted]] = {way: [] for way in by_way}

    def post() -> None:
        for index in range(number):
            for way, end in by_way.items():
                posted[way].append(end.post(way, buffers[way][index]))

    began = time.perf_counter()
    run_within(left(), {" and ".join(by_way): post})
    before = time.perf_counter() - began
    took = run_within(left(), {way: partial(end.finish, posted[way]) for way, end in by_way.items()})
    for way, end in by_way.items():
        end.check(way, posted[way])
    return {way: before + seconds for way, seconds in took.items()}


@contextmanager
def _waited_for(device: torch.device) -> Iterator[None]:
    """Waits at the end of the body for what it has a GPU wait for: with NCCL `work.wait()` lets only a stream wait, and
    a stream that others use would wait for theirs too."""
    if device.type != "cuda":
        yield
        return
    torch.cuda.set_device(device)
    stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        yield
    stream.synchronize()
