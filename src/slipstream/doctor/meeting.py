"""Where ranks tell each other how far they are, by a connection that no exchange of theirs can block."""

from __future__ import annotations

import json
import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from slipstream.doctor.timed_calls import ExchangeError
from slipstream.launch import ConnectedRanks, name_ranks

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
        self.rank, self.size, self._hosts = place.rank, place.world_size, ranks.hosts
        limit = timedelta(seconds=seconds)
        store = dist.TCPStore(place.address, place.port, timeout=limit, wait_for_workers=False)  # type: ignore[attr-defined]
        self._store = dist.PrefixStore(f"doctor/{place.attempt}", store)  # type: ignore[attr-defined]

    def tell(self, name: str, value: Any) -> None:
        """Writes something that JSON has, under a name and this rank."""
        self._store.set(f"{name}/{self.rank}", json.dumps(value))

    def heard(self, name: str, rank: int) -> Any:
        """Returns what a rank has told, or None where it has told nothing yet."""
        key = f"{name}/{rank}"
        return json.loads(self._store.get(key)) if self._store.check([key]) else None

    def fail(self, problem: str) -> None:
        """Tells the others what this rank has found, for which all end."""
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

    def come(self, name: str, seconds: float) -> None:
        """Waits until all ranks have come here.

        Raises:
            OtherFailedError: as soon as another rank has failed.
            ExchangeError: names those that didn't come in time.
        """
        self.tell(name, None)
        deadline = time.monotonic() + seconds
        while not self._are_here(name, range(self.size)):
            if self.has_failed():
                raise OtherFailedError
            if time.monotonic() > deadline:
                absent = [rank for rank in range(self.size) if not self._are_here(name, [rank])]
                raise ExchangeError(f"{name_ranks(absent, self._hosts)} did not come within {seconds:g} s to: {name}")
            time.sleep(_POLL_SECONDS)

    def wait_for(self, name: str, ranks: range, seconds: float) -> bool:
        """Waits until these ranks have told something; returns whether they did in time."""
        deadline = time.monotonic() + seconds
        while not self._are_here(name, ranks):
            if time.monotonic() > deadline:
                return False
            time.sleep(_POLL_SECONDS)
        return True

    def _are_here(self, name: str, ranks: range | list[int]) -> bool:
        return bool(self._store.check([f"{name}/{rank}" for rank in ranks]))
