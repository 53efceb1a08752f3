"""Connects the ranks that a launcher started, and lets all neighbours exchange as in training, for a limited time.

Two neighbouring ranks exchange as in training: activations one way and gradients the other, at the same time. Then all
exchange parts of different sizes with all, as ranks do that share slices.

rank 0  -- activations -->  rank 1       each direction by a communicator of its own, as in DistributedTransport
        <-- gradients ----
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from slipstream.errors import SlipstreamError
from slipstream.extras.doctor.devices import exchange_device
from slipstream.extras.doctor.finding import ExchangeError, Finding, WrongBytesError, error_text, run_within
from slipstream.launch import ConnectedRanks, connect_ranks, describe_process, name_ranks
from slipstream.parallel import NO_LIMIT, RankGroup, Ranks
from slipstream.units import bytes_text, seconds_text

_RENDEZVOUS = "SLIPSTREAM_RENDEZVOUS_SECONDS"
_GRACE = 2.0  # seconds for ranks that noticed the same to say so
_BEGINNING, _ALL_AT_ONCE = "the beginning", "all pairs at once"
_UNEQUAL_PARTS = "all-to-all of unequal parts"
_HOW = {
    "gloo": "see whether these ranks still run, let firewalls pass TCP between their machines, and name the interface "
    "between them in GLOO_SOCKET_IFNAME",
    "nccl": "see whether these ranks still run; NCCL_DEBUG=INFO shows what NCCL chose; try NCCL_P2P_DISABLE=1 on one "
    "machine, NCCL_SOCKET_IFNAME or NCCL_IB_DISABLE=1 between machines",
}

_WRONG = "a run would silently go wrong: see dmesg for errors of a device or link, and try NCCL_P2P_DISABLE=1"


class RankExchange:
    """The exchanges of this rank, and rank 0's findings on them."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._device = exchange_device()
        self._meeting: Meeting | None = None
        self._told: dict[str, list[Any]] = {}  # per step: the findings of each rank
        # The store may live in this process, and is kept as long as any rank needs it.
        self._store: object = None

    def run(self, local: Sequence[Finding]) -> list[Finding]:
        """Connects the ranks and exchanges between all neighbours; returns rank 0's findings, or the problems of this
        rank by itself. Collective.

        Args:
            local: this rank's findings on its machine.
        """
        os.environ.setdefault(_RENDEZVOUS, f"{self._seconds:g}")
        try:
            ranks = connect_ranks(describe_process({}, self._device.type, {}))
            meeting = Meeting(ranks, self._seconds)
            self._store = ranks.store
            self._meeting = meeting
        except (SlipstreamError, RuntimeError, OSError) as error:
            return [Finding("ranks", "not connected", str(error))]
        problem = self._exchange(ranks, meeting, [f"{item.topic}: {item.problem}" for item in local if item.problem])
        if meeting.rank != 0:
            return [] if problem is None else [Finding("exchange", "failed", problem)]
        return [*self._describe(ranks), *self._failures(meeting, problem)]

    def _exchange(self, ranks: ConnectedRanks, meeting: Meeting, local: Sequence[str]) -> str | None:
        """Exchanges with the neighbours; returns the problem that this rank has found and told, if there is one."""
        try:
            self._told[_BEGINNING] = meeting.share(_BEGINNING, local, self._seconds)
            for step, found in self._steps(ranks):
                self._told[step] = meeting.share(step, found, self._seconds + _GRACE)
        except OtherFailedError:
            return None
        except Exception as error:
            problem = str(error) if isinstance(error, ExchangeError) else error_text(error)
            problem = f"{problem}; {_WRONG if isinstance(error, WrongBytesError) else _HOW[self._backend]}"
            meeting.fail(problem)
            return problem
        return None

    @property
    def _backend(self) -> str:
        return "nccl" if self._device.type == "cuda" else "gloo"

    def _steps(self, ranks: ConnectedRanks) -> Iterator[tuple[str, object]]:
        """Makes the process group and two communicators for each pair, in one order on all ranks, and exchanges pair by
        pair, so that it is known which one hangs, and then with all neighbours at once. Yields what this rank has found
        in each step, for which it waits for the others. Collective."""
        rank = ranks.place.rank
        pairs = neighbour_pairs(ranks.place.world_size)
        mine = dict[NeighbourPair, PairEnd]()
        run_within(self._seconds, {"joining the process group": partial(self._join, ranks)})
        for pair in pairs:
            run_within(self._seconds, {f"making groups of {pair}": partial(self._connect, pair, rank, mine)})
        yield "the process groups", None
        for pair in pairs:
            yield str(pair), _named(pair, partial(mine[pair].measure, self._seconds)) if pair in mine else None
        yield _ALL_AT_ONCE, max(both_ways([*mine.values()], 1, countdown(self._seconds)).values())
        exchange = partial(_exchange_unequal_parts, self._device)
        yield _UNEQUAL_PARTS, run_within(self._seconds, {_UNEQUAL_PARTS: exchange})[_UNEQUAL_PARTS]

    def _join(self, ranks: ConnectedRanks) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        rank, size = ranks.place.rank, ranks.place.world_size
        backend = "cpu:gloo,cuda:nccl" if self._device.type == "cuda" else "gloo"
        dist.init_process_group(backend, timeout=NO_LIMIT, rank=rank, world_size=size, store=ranks.store)

    def _connect(self, pair: NeighbourPair, rank: int, mine: dict[NeighbourPair, PairEnd]) -> None:
        pipeline = Ranks.of()
        groups = [pipeline.connect(way) for way in (pair, pair[::-1])]
        if rank in pair:
            mine[pair] = PairEnd(pair, rank, groups, self._device)

    def _describe(self, ranks: ConnectedRanks) -> Iterator[Finding]:
        yield Finding("ranks", f"connected: {ranks}; they exchange over {self._backend}")
        for pair in neighbour_pairs(ranks.place.world_size):
            if found := self._told.get(str(pair)):
                yield from _rows(pair, [MeasuredPair(*found[rank]) for rank in pair])
        for step in (_ALL_AT_ONCE, _UNEQUAL_PARTS):
            if (seconds := self._told.get(step)) and (ranks.place.world_size > 2 or step != _ALL_AT_ONCE):
                yield Finding(step, f"ended after {seconds_text(max(seconds))}")

    def _failures(self, meeting: Meeting, own: str | None) -> Iterator[Finding]:
        """Yields the problems that all ranks have told, and those of other ranks' machines."""
        problems = meeting.problems(_GRACE) if own is not None or meeting.has_failed() else {}
        for problem in dict.fromkeys(problems.values()):
            tellers = [rank for rank, text in problems.items() if text == problem]
            yield Finding("exchange", f"failed, as rank {', '.join(map(str, tellers))} found", problem)
        for rank in range(1, meeting.size):
            for problem in self._told[_BEGINNING][rank] if _BEGINNING in self._told else ():
                yield Finding(f"rank {rank}", "would fail", problem)

    def leave(self, code: int) -> None:
        """Ends this rank's process, with 1 where rank 0 does; call it when all is said. Collective.

        Without the usual end: a thread may be stuck in gloo or NCCL, which would be waited for.
        """
        if (meeting := self._meeting) is not None:
            code = _agree(meeting, code, self._seconds)
        elif os.environ["RANK"] != "0":
            # Launchers end all ranks when one has failed, and rank 0 should print its findings first.
            time.sleep(_GRACE)
        os._exit(code)


def _named(pair: NeighbourPair, measure: partial[MeasuredPair]) -> MeasuredPair:
    try:
        return measure()
    except ExchangeError as error:
        raise type(error)(f"{pair}: {error}") from error


def _exchange_unequal_parts(device: torch.device) -> None:
    """Sends every rank another number of numbers, some nothing, as ranks that share slices or experts do. Collective.

    Raises WrongBytesError where others came than were sent.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)
    group = RankGroup(dist.group.WORLD)
    me = group.rank
    ranks = range(group.size)

    def part(source: int, to: int) -> Tensor:
        size = 0 if (source + to) % 3 == 2 else 1000 * (source + 1) + to
        return torch.arange(size, dtype=torch.float32, device=device) + source

    sent, expected = ([part(me, rank) for rank in ranks], [part(rank, me) for rank in ranks])
    received = group.all_to_all(torch.cat(sent), [*map(len, sent)], [*map(len, expected)])
    if wrong := int((received != torch.cat(expected)).sum()):
        raise WrongBytesError(f"{wrong} of {len(received)} numbers are wrong in {_UNEQUAL_PARTS}")


def _rows(pair: NeighbourPair, measured: Sequence[MeasuredPair]) -> Iterator[Finding]:
    for way in pair.ways:
        here = next(end for end in measured if end.received == way)
        places = [end.order.index(way) for end in measured]
        ended = " and ".join(
            f"{('first', 'second')[place]} on rank {rank}" for place, rank in zip(places, pair, strict=True)
        )
        # A rank that began earlier also waited for the other, so the smaller latency counts.
        latency = min(end.latency for end in measured)
        rate = f"latency {seconds_text(latency)}, {bytes_text(here.bandwidth)}/s both ways at once"
        yield Finding(way, f"{rate}; ended {ended}")


def _agree(meeting: Meeting, code: int, seconds: float) -> int:
    """Returns the code that rank 0 ends with, or 1 where it doesn't say, or this rank has failed."""
    try:
        if meeting.rank == 0:
            meeting.tell("code", code)
            # The store may end with this process.
            meeting.wait_for("gone", range(1, meeting.size), _GRACE)
            return code
        told = meeting.heard("code", 0) if meeting.wait_for("code", range(1), seconds + 2 * _GRACE) else 1
        meeting.tell("gone", None)
        return max(code, int(told))
    # The store has ended.
    except RuntimeError:
        return 1


LARGE = 4 * 2**20  # bytes
_SMALL = 1024  # bytes
_ROUND_TRIPS = 20
_IN_A_ROW = 8  # large messages
_TRIALS = 3
_PERIOD = 251  # period of the sent bytes; a prime, so that no shifted message looks right


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
    """The measurements of one of the two ranks."""

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
        self.pair = pair
        self._device = device
        self._groups = dict(zip(pair.ways, groups, strict=True))
        self._peer = pair.second if rank == pair.first else pair.first
        self.sent, self.received = pair.ways if rank == pair.first else pair.ways[::-1]

    def measure(self, seconds: float) -> MeasuredPair:
        """Tries each direction alone, then both at once, and measures. Both ends call this at the same time.

        Raises:
            ExchangeError: names the direction that didn't end within these seconds, or had wrong bytes.
        """
        left = countdown(seconds)
        # NCCL makes a communicator at its first message, so both ends need one order.
        for way in self.pair.ways:
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
        """Returns the numbers that this rank sends in this direction, or room for those it receives."""
        if way == self.sent:
            return self._content(way, size)
        return torch.zeros(size, dtype=torch.uint8, device=self._device)

    def post(self, way: str, buffer: Tensor) -> _Posted:
        """Posts a message of this direction, which this rank sends or receives."""
        if self._device.type == "cuda":
            # The current device is each thread's own.
            torch.cuda.set_device(self._device)
        call = dist.isend if way == self.sent else dist.irecv
        work = call(buffer, self._peer, group=self._groups[way])
        assert work is not None
        return _Posted(work, buffer)

    def finish(self, posted: Sequence[_Posted]) -> None:
        """Waits until messages are there."""
        with _waited_for(self._device):
            for message in posted:
                message.work.wait()

    def check(self, way: str, posted: Sequence[_Posted]) -> None:
        """Raises WrongBytesError where another message came than the one that was sent."""
        for message in posted if way == self.received else ():
            size = message.buffer.numel()
            if wrong := int((message.buffer != self._content(way, size)).sum()):
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
    """Waits at the end of the body until the GPU has received everything: with NCCL `work.wait()` lets only a stream
    wait, and a stream that others use would wait for theirs too."""
    if device.type != "cuda":
        yield
        return
    torch.cuda.set_device(device)
    stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        yield
    stream.synchronize()


_POLL_SECONDS = 0.005
_FAILED = "failed"


class OtherFailedError(ExchangeError):
    """Raised where another rank has found a problem, which it has told."""


class Meeting:
    """One rank's connection to the store of all.

    The process group has a connection of its own: NCCL may wait in it for ever, and lets nobody else use it meanwhile.
    """

    def __init__(self, ranks: ConnectedRanks, seconds: float) -> None:
        place = ranks.place
        self.rank = place.rank
        self.size = place.world_size
        self._hosts = ranks.hosts
        self._store = ranks.connect_again("doctor", seconds)

    def tell(self, name: str, value: Any) -> None:
        """Writes something that JSON has, under a name and this rank."""
        self._store.set(f"{name}/{self.rank}", json.dumps(value))

    def heard(self, name: str, rank: int) -> Any:
        """Returns a rank's message, or None before it has sent one."""
        key = f"{name}/{rank}"
        return json.loads(self._store.get(key)) if self._store.check([key]) else None

    def fail(self, problem: str) -> None:
        """Tells the others of this rank's problem, for which all end."""
        self.tell("problem", problem)
        self._store.set(_FAILED, "")

    def has_failed(self) -> bool:
        """Returns whether a rank has told of a problem."""
        return bool(self._store.check([_FAILED]))

    def problems(self, seconds: float) -> dict[int, str]:
        """Returns the problems of all ranks; a rank may need these seconds to tell its own."""
        time.sleep(seconds)
        told = {rank: self.heard("problem", rank) for rank in range(self.size)}
        return {rank: problem for rank, problem in told.items() if problem is not None}

    def share(self, name: str, value: object, seconds: float) -> list[Any]:
        """Returns the values of all ranks, anything that JSON has, once all have come here.

        Raises:
            OtherFailedError: as soon as another rank has failed.
            ExchangeError: names those that didn't come in time.
        """
        self.tell(name, value)
        if not self.wait_for(name, range(self.size), seconds, self.has_failed):
            if self.has_failed():
                raise OtherFailedError
            absent = [rank for rank in range(self.size) if not self._are_here(name, [rank])]
            raise ExchangeError(f"{name_ranks(absent, self._hosts)} did not come within {seconds:g} s to: {name}")
        return [self.heard(name, rank) for rank in range(self.size)]

    def wait_for(self, name: str, ranks: range, seconds: float, gives_up: Callable[[], bool] = lambda: False) -> bool:
        """Waits until these ranks have told something; returns whether they did in time."""
        deadline = time.monotonic() + seconds
        while not self._are_here(name, ranks):
            if gives_up() or time.monotonic() > deadline:
                return False
            time.sleep(_POLL_SECONDS)
        return True

    def _are_here(self, name: str, ranks: range | list[int]) -> bool:
        return bool(self._store.check([f"{name}/{rank}" for rank in ranks]))
