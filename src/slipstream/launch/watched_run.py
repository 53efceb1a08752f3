"""Watches the ranks of a run while it lasts, and turns errors that another rank's end has caused into its name."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal

from slipstream.errors import NonFiniteError, RankFailedError, SlipstreamError, StoppedRunError
from slipstream.watchdog import WatchSettings, end_watch, explain_loss, open_hub, start_watch, supervised_hub

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_KEY = "watch"
_DECIDED_BY_ALL = (SlipstreamError, NonFiniteError, StoppedRunError)


@contextmanager
def watched_run(
    store: Store,
    rank: int,
    num_ranks: int,
    limit: float | Literal["off"] | None,
    address: str,
    error_file: str | None = None,
) -> Iterator[None]:
    """Watches this rank in the body. Every rank enters it.

    Args:
        store: where the ranks meet.
        rank: of this process, of `num_ranks`.
        num_ranks: of the run.
        limit: seconds that a rank may wait; None for the default, "off" for no watchers.
        address: of this machine, at which the other ranks reach it.
        error_file: where our launcher reads why the rank has ended.
    """
    if limit != "off" and num_ranks > 1:
        hub = None
        if rank == 0 and launched_error_file() is None:  # our launcher keeps the hub itself
            hub, mine = open_hub(address)
            store.set(_KEY, json.dumps(vars(mine)))
        start_watch(WatchSettings(**json.loads(store.get(_KEY))), rank, num_ranks, limit, hub, error_file)
    try:
        yield
    except _DECIDED_BY_ALL:
        end_watch()
        raise
    except Exception as error:
        verdict = explain_loss("") if isinstance(error, RuntimeError) else ""
        end_watch(f"{type(error).__name__}: {error}".partition("\n")[0])
        if verdict and verdict not in str(error):
            raise RankFailedError(verdict) from error
        raise
    end_watch()


@contextmanager
def kept_hub(store: Store, address: str, num_ranks: int) -> Iterator[None]:
    """Keeps the hub of a launcher's ranks, and starts it again where it has ended, while the body runs."""
    if num_ranks == 1:
        yield
        return
    with supervised_hub(address) as settings:
        store.set(_KEY, json.dumps(vars(settings)))
        yield


def launched_error_file() -> str | None:
    """Returns the file in which a rank of our launcher says why it has ended; None under another launcher."""
    return os.environ.get("TORCHELASTIC_ERROR_FILE") if "SLIPSTREAM_PARENT" in os.environ else None
