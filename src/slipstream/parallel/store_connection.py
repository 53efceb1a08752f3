"""Connects a rank to the store at which all meet, in a limited time, and explains why it can't."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING

from slipstream.errors import SlipstreamError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

RENDEZVOUS_SECONDS = "SLIPSTREAM_RENDEZVOUS_SECONDS"
"""The environment's variable with the seconds that a rank waits for the others."""
_DEFAULT_SECONDS, _CONNECT_SECONDS = 120.0, 10.0
# The store mostly keeps its own limit, so an answer is overdue this long after it.
_SECONDS_FOR_AN_ANSWER = 2.0


def describe_held_port(rank: int, place: str, reason: str) -> str:
    """Returns why a rank can't use the store at a place where somebody listens."""
    here = f"rank {rank} on {socket.gethostname()}"
    if rank == 0 and "already in use" in reason.lower():
        with socket.create_server(("", 0)) as free:
            port = free.getsockname()[1]
        return (
            f"{here} can't listen at {place} (address already in use): another program, or another run, holds that "
            f"port; choose a free port, such as MASTER_PORT={port}, and give it to all ranks (torchrun: --master-port)"
        )
    if rank == 0:
        return (
            f"{here} can't listen at {place} ({reason}); choose a free port with MASTER_PORT, and start rank 0 on the "
            "machine that MASTER_ADDR names"
        )
    return (
        f"{here} reached {place}, but what listens there doesn't answer as the store of rank 0 does ({reason}): "
        "another program holds that port on the master, or rank 0 is stopped. See rank 0's output, and choose a free "
        "port there with MASTER_PORT"
    )


def time_limit(environment: Mapping[str, str]) -> float:
    """Returns the seconds that a rank waits for the master's answer, and for the other ranks."""
    setting = environment.get(RENDEZVOUS_SECONDS, str(_DEFAULT_SECONDS))
    try:
        seconds = float(setting)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise SlipstreamError(
            f"{RENDEZVOUS_SECONDS}={setting} is not a number of seconds above 0; remove it, or set it to 300"
        )
    return seconds


def connected_store(
    connect: Callable[[], Store], seconds: float, gives_up: Callable[[], bool] = lambda: True
) -> Store | Exception:
    """Returns the store, the error of connecting to it, or a TimeoutError after some seconds, unless it `gives_up`
    later only."""
    results: list[Store | Exception] = []

    def try_to() -> None:
        try:
            results.append(connect())
        except (RuntimeError, OSError) as error:
            results.append(error)

    # In a thread, as no limit of the store holds once its connection is made: it waits for ever for the first answer.
    thread = threading.Thread(target=try_to, name="connecting to the store", daemon=True)
    thread.start()
    thread.join(seconds)
    while not results and not gives_up():
        thread.join(seconds)
    thread.join(_SECONDS_FOR_AN_ANSWER)
    return results[0] if results else TimeoutError("no answer")


def accepts(address: str, port: int, seconds: float) -> bool:
    """Returns whether somebody listens there."""
    with suppress(OSError):
        socket.create_connection((address, port), timeout=min(_CONNECT_SECONDS, seconds)).close()
        return True
    return False
