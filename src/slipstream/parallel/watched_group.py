"""Starts the watchers of a group of ranks, which end the run where one dies or waits too long."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable, Sequence
from itertools import count
from typing import TYPE_CHECKING, Any, Literal

from slipstream.errors import SlipstreamError
from slipstream.parallel.rank_group import RankGroup
from slipstream.watchdog import WatchSettings, end_watch, is_watched, loopback_address, open_hub, start_watch

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_VARIABLE = "SLIPSTREAM_STALL_LIMIT"
# Each meeting of this program's ranks at a store needs keys of its own.
_meetings = count()


def watch_group(world: RankGroup, limit: float | Literal["off"] | None, is_provisional: bool = False) -> None:
    """Starts a watcher for each rank, unless there is one, or `limit` is "off". Where it is None, the environment's
    SLIPSTREAM_STALL_LIMIT counts. A provisional one notices only deaths, until the next call. Collective over
    `world`."""
    _watch(world.gather, world.rank, world.global_ranks, limit, is_provisional)


def watch_store(
    store: Store, rank: int, size: int, limit: float | Literal["off"] | None, is_provisional: bool = False
) -> None:
    """Starts a watcher for each of `size` ranks, as `watch_group`; they meet at a store, and needn't have a group yet.
    Collective."""
    meeting = next(_meetings)

    def gather(value: Any) -> list[Any]:
        keys = [f"slipstream/watch/{meeting}/{next(rounds)}/{member}" for member in range(size)]
        store.set(keys[rank], json.dumps(value))
        return [json.loads(store.get(key)) for key in keys]

    rounds = count()
    _watch(gather, rank, range(size), limit, is_provisional)


def _watch(
    gather: Callable[[Any], list[Any]],
    rank: int,
    names: Sequence[int],
    limit: float | Literal["off"] | None,
    is_provisional: bool = False,
) -> None:
    """Starts a watcher for each rank; `names` has the numbers by which errors name them."""
    limit = limit_of_the_environment() if limit is None else limit
    if len(names) == 1 or not all(gather(not is_watched(is_provisional) and limit != "off")):
        if not is_provisional and not is_watched():
            end_watch()  # a provisional one
        return
    assert limit != "off"
    hosts = gather(socket.gethostname())
    hub, settings = None, None
    if rank == 0:
        hub, settings = open_hub(loopback_address() if len(set(hosts)) == 1 else _address_on_the_network(hosts))
    shared = gather(None if settings is None else vars(settings))[0]
    start_watch(WatchSettings(**shared), rank, len(names), limit, hub, is_provisional=is_provisional, names=names)


def limit_of_the_environment() -> float | Literal["off"] | None:
    """Returns how long a rank may wait where nobody else says so."""
    setting = os.environ.get(_VARIABLE)
    if setting is None or setting == "off":
        return setting  # type: ignore[return-value]
    try:
        return float(setting)
    except ValueError:
        raise SlipstreamError(f"{_VARIABLE}={setting} is neither a number of seconds nor off") from None


def _address_on_the_network(hosts: list[str]) -> str:
    """Returns this machine's address on the route to another one. Nothing is sent."""
    other = next(host for host in hosts if host != socket.gethostname())
    for target in (os.environ.get("MASTER_ADDR", other), other):
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((target, 9))
            address = str(probe.getsockname()[0])
        if not address.startswith("127."):
            break
    return address
