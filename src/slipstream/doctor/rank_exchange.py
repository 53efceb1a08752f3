"""Connects the ranks that a launcher started, and lets all neighbours exchange as in training, for a limited time."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from functools import partial

import torch
import torch.distributed as dist

from slipstream.doctor.devices import exchange_device
from slipstream.doctor.finding import Finding, error_text
from slipstream.doctor.meeting import Meeting, OtherFailedError
from slipstream.doctor.pair_exchange import MeasuredPair, NeighbourPair, PairEnd, both_ways, countdown, neighbour_pairs
from slipstream.doctor.timed_calls import ExchangeError, WrongBytesError, run_within
from slipstream.errors import SlipstreamError
from slipstream.launch import ConnectedRanks, connect_ranks, describe_process
from slipstream.parallel import NO_LIMIT, Ranks
from slipstream.units import bytes_text, seconds_text

_RENDEZVOUS = "SLIPSTREAM_RENDEZVOUS_SECONDS"
_GRACE = 2.0  # seconds in which ranks that noticed the same say so
_ALL_AT_ONCE = "the exchange of all pairs at once"
_HOW = {
    "gloo": "see whether these ranks still run, let firewalls pass TCP between their machines, and name the interface "
    "between them in GLOO_SOCKET_IFNAME",
    "nccl": "see whether these ranks still run; NCCL_DEBUG=INFO shows what NCCL chose; try NCCL_P2P_DISABLE=1 on one "
    "machine, NCCL_SOCKET_IFNAME or NCCL_IB_DISABLE=1 between machines",
}

_WRONG = "a training would go wrong in silence: see dmesg for errors of a device or link, and try NCCL_P2P_DISABLE=1"


class RankExchange:
    """What this rank takes part in, and what rank 0 then says."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._device = exchange_device()
        self._meeting: Meeting | None = None
        self._store: object = None  # which may live in this process, and then as long as any rank needs it

    def run(self, local: Sequence[Finding]) -> list[Finding]:
        """Connects the ranks and exchanges between all neighbours; returns what rank 0 is to say, or what this rank has
        found wrong by itself. Collective.

        Args:
            local: what this rank has found on its machine.
        """
        os.environ.setdefault(_RENDEZVOUS, f"{self._seconds:g}")
        try:
            ranks = connect_ranks(describe_process({}, self._device.type, {}))
            meeting, self._store = Meeting(ranks, self._seconds), ranks.store
            self._meeting = meeting
        except (SlipstreamError, RuntimeError, OSError) as error:
            return [Finding("ranks", "not connected", str(error))]
        meeting.tell("local", [f"{each.topic}: {each.problem}" for each in local if each.problem is not None])
        problem = self._exchange(ranks, meeting)
        if meeting.rank != 0:
            return [] if problem is None else [Finding("exchange", "failed", problem)]
        return [*self._describe(ranks, meeting), *self._failures(meeting, problem)]

    def _exchange(self, ranks: ConnectedRanks, meeting: Meeting) -> str | None:
        """Exchanges with the neighbours; returns the problem that this rank has found and told, if there is one."""
        try:
            self._meet_in_pairs(self._ends(ranks, meeting), meeting)
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

    def _ends(self, ranks: ConnectedRanks, meeting: Meeting) -> list[PairEnd]:
        """Makes the process group, and two communicators for each pair, in one order on all ranks. Collective."""
        meeting.come("the beginning", self._seconds)
        rank, size = ranks.place.rank, ranks.place.world_size
        run_within(self._seconds, {"joining the process group": partial(self._join, ranks)})
        ends: list[PairEnd] = []
        for pair in neighbour_pairs(size):
            run_within(self._seconds, {f"making groups of {pair}": partial(self._connect, pair, rank, ends)})
        return ends

    def _join(self, ranks: ConnectedRanks) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        rank, size = ranks.place.rank, ranks.place.world_size
        backend = "cpu:gloo,cuda:nccl" if self._device.type == "cuda" else "gloo"
        dist.init_process_group(backend, timeout=NO_LIMIT, rank=rank, world_size=size, store=ranks.store)

    def _connect(self, pair: NeighbourPair, rank: int, ends: list[PairEnd]) -> None:
        pipeline = Ranks.of()
        groups = [pipeline.connect(way) for way in (pair, pair[::-1])]
        if rank in pair:
            ends.append(PairEnd(pair, rank, groups, self._device))

    def _meet_in_pairs(self, ends: Sequence[PairEnd], meeting: Meeting) -> None:
        """Exchanges pair by pair, so that it is known which one hangs, and then with all neighbours at once."""
        mine = {end.pair: end for end in ends}
        for pair in neighbour_pairs(meeting.size):
            meeting.come(f"the exchange of {pair}", self._seconds + _GRACE)
            if pair in mine:
                meeting.tell(str(pair), _named(pair, partial(mine[pair].measure, self._seconds)))
        meeting.come(_ALL_AT_ONCE, self._seconds + _GRACE)
        meeting.tell("seconds", max(both_ways(ends, 1, countdown(self._seconds)).values()))
        meeting.come("the end", self._seconds + _GRACE)

    def _describe(self, ranks: ConnectedRanks, meeting: Meeting) -> Iterator[Finding]:
        yield Finding("ranks", f"connected: {ranks}; they exchange over {self._backend}")
        for pair in neighbour_pairs(meeting.size):
            told = [meeting.heard(str(pair), rank) for rank in pair]
            if None not in told:
                yield from _rows(pair, [MeasuredPair(*each) for each in told])
        seconds = [meeting.heard("seconds", rank) for rank in range(meeting.size)]
        if meeting.size > 2 and None not in seconds:
            yield Finding("all pairs at once", f"ended after {seconds_text(max(seconds))}")

    def _failures(self, meeting: Meeting, own: str | None) -> Iterator[Finding]:
        """Yields the problems that all ranks have told, and those of other ranks' machines."""
        problems = meeting.problems(_GRACE) if own is not None or meeting.has_failed() else {}
        for problem in dict.fromkeys(problems.values()):
            tellers = [rank for rank, each in problems.items() if each == problem]
            yield Finding("exchange", f"failed, as rank {', '.join(map(str, tellers))} found", problem)
        for rank in range(1, meeting.size):
            for problem in meeting.heard("local", rank) or []:
                yield Finding(f"rank {rank}", "would fail", problem)

    def leave(self, code: int) -> None:
        """Ends this rank's process, with 1 where rank 0 does; call it when all is said. Collective.

        Without the usual end: a thread may be stuck in gloo or NCCL, which would be waited for.
        """
        if (meeting := self._meeting) is not None:
            code = _agree(meeting, code, self._seconds)
        elif os.environ["RANK"] != "0":
            time.sleep(_GRACE)  # launchers end all ranks when one has failed, and rank 0 is to print what it found
        os._exit(code)


def _named(pair: NeighbourPair, measure: partial[MeasuredPair]) -> MeasuredPair:
    try:
        return measure()
    except ExchangeError as error:
        raise type(error)(f"{pair}: {error}") from error


def _rows(pair: NeighbourPair, measured: Sequence[MeasuredPair]) -> Iterator[Finding]:
    for way in pair.ways:
        here = next(each for each in measured if each.received == way)
        places = [each.order.index(way) for each in measured]
        ended = " and ".join(
            f"{('first', 'second')[place]} on rank {rank}" for place, rank in zip(places, pair, strict=True)
        )
        latency = min(each.latency for each in measured)  # a rank that began earlier waited for the other
        rate = f"latency {seconds_text(latency)}, {bytes_text(here.bandwidth)}/s both ways at once"
        yield Finding(way, f"{rate}; ended {ended}")


def _agree(meeting: Meeting, code: int, seconds: float) -> int:
    """Returns the code that rank 0 ends with, or 1 where it doesn't say, or this rank has failed."""
    try:
        if meeting.rank == 0:
            meeting.tell("code", code)
            meeting.wait_for("gone", range(1, meeting.size), _GRACE)  # the store may end with this process
            return code
        told = meeting.heard("code", 0) if meeting.wait_for("code", range(1), seconds + 2 * _GRACE) else 1
        meeting.tell("gone", None)
        return max(code, int(told))
    except RuntimeError:  # of a store that has ended
        return 1
