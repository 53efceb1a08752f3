"""Lets the ranks of a process group watch each other, in programs that weren't started by `slipstream train`."""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from typing import Literal

from slipstream.errors import SlipstreamError
from slipstream.parallel.rank_group import RankGroup
from slipstream.watchdog import WatchSettings, is_watched, open_hub, start_watch

NO_LIMIT = timedelta(days=1)
"""The limit of a process group itself: its watchers end a run far sooner, and know more."""
_LOOPBACK = "127.0.0.1"
_VARIABLE = "SLIPSTREAM_STALL_LIMIT"


def watch_group(world: RankGroup, limit: float | Literal["off"] | None) -> None:
    """Starts a watcher for each rank, unless there is one, or `limit` is "off". Where it is None, the environment's
    SLIPSTREAM_STALL_LIMIT counts. Collective over `world`."""
    limit = _limit_of_the_environment() if limit is None else limit
    if world.size == 1 or not all(world.gather(not is_watched() and limit != "off")):
        return
    assert limit != "off"
    hosts = world.gather(socket.gethostname())
    listening, settings = None, None
    if world.rank == 0:
        listening, settings = open_hub(_LOOPBACK if len(set(hosts)) == 1 else _address_on_the_network(hosts))
    found = world.gather(None if settings is None else vars(settings))[0]
    start_watch(WatchSettings(**found), world.rank, world.size, limit, listening)


def _limit_of_the_environment() -> float | Literal["off"] | None:
    given = os.environ.get(_VARIABLE)
    if given is None or given == "off":
        return given  # type: ignore[return-value]
    try:
        return float(given)
    except ValueError:
        raise SlipstreamError(f"{_VARIABLE}={given} is neither a number of seconds nor off") from None


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
