"""Takes requests to stop, watches the ranks of a run while it lasts, and names the cause where one ends."""

from __future__ import annotations

import json
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

from slipstream.errors import STOP_SIGNALS, NonFiniteError, RankFailedError, SlipstreamError, StoppedRunError
from slipstream.watchdog import WatchSettings, end_watch, explain_loss, open_hub, start_watch, supervised_hub

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

# Seconds in which the same signal is the same request: Slurm sends it to every process of a step, launchers pass on
# what they get, and people type it twice.
_SAME_REQUEST = 5.0
_REQUESTS_TO_END = 3


class RequestCount:
    """Counts the requests to stop that have come."""

    def __init__(self) -> None:
        self._number = 0
        self._came: dict[int, float] = {}

    def take(self, number: int) -> bool:
        """Takes a signal; returns whether it is another request than those of the last seconds."""
        now = time.monotonic()
        is_other = now - self._came.get(number, -math.inf) > _SAME_REQUEST
        if is_other:
            self._came[number] = now
            self._number += 1
        return is_other

    @property
    def ends_at_once(self) -> bool:
        """Whether so many have come that nobody means to wait for a checkpoint."""
        return self._number >= _REQUESTS_TO_END


class StopRequest:
    """Whether this process was asked to stop, and by which signal.

    Until `begin` there is nothing to save: a request then ends the process at once. torchrun sends one to the ranks
    that are left when another has died, and they may wait for that one where nothing else would end them.

    A thread takes the signals through a pipe, so that the third one ends the process even where its main thread waits
    in gloo or NCCL, in which no handler of Python runs.
    """

    def __init__(self) -> None:
        self.name = ""  # name of the signal; empty before one arrives
        self._has_begun = False

    def listen(self) -> None:
        """Begins to take the signals. Call it in the main thread."""
        reading, writing = os.pipe()
        os.set_blocking(writing, False)
        signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
        for signal_number in STOP_SIGNALS:
            # Only signals with a handler are written to the pipe.
            signal.signal(signal_number, lambda *_: None)
        threading.Thread(target=self._take, args=(reading,), name="stop requests", daemon=True).start()

    def begin(self) -> None:
        """Has requests wait from now on until this process asks for their `name`."""
        self._has_begun = True

    def _take(self, reading: int) -> None:
        requests = RequestCount()
        while True:
            signal_number = os.read(reading, 1)[0]
            if signal_number not in STOP_SIGNALS:
                continue
            if not self._has_begun:
                _end_at_once(signal.Signals(signal_number).name)
            requests.take(signal_number)
            if requests.ends_at_once:
                os._exit(128 + signal_number)
            self.name = self.name or signal.Signals(signal_number).name


def _end_at_once(name: str) -> None:
    text = f"{name} ended the run before its first step; there is nothing new to save"
    end_watch(text)
    # Our launcher says it once for all ranks.
    if launched_error_file() is None:
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()
    os._exit(StoppedRunError.exit_code)


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
    limit_setting: str = "training.stall_limit",
) -> Iterator[None]:
    """Watches this rank in the body. Every rank enters it.

    Args:
        store: where the ranks meet.
        rank: of this process, of `num_ranks`.
        num_ranks: of the run.
        limit: seconds that a rank may wait; None for the default, "off" for no watchers.
        address: of this machine, at which the other ranks reach it.
        error_file: where our launcher reads why the rank has ended.
        limit_setting: by which the limit is given.
    """
    if limit != "off" and num_ranks > 1:
        hub = None
        # Our launcher keeps the hub itself.
        if rank == 0 and launched_error_file() is None:
            hub, mine = open_hub(address)
            store.set(_KEY, json.dumps(vars(mine)))
        settings = WatchSettings(**json.loads(store.get(_KEY)))
        start_watch(settings, rank, num_ranks, limit, hub, error_file, limit_setting=limit_setting)
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
def watched_local_rank(
    limit: float | Literal["off"] | None, limit_setting: str = "training.stall_limit"
) -> Iterator[dict[str, Any]]:
    """Connects a rank of our launcher with the others, and watches it in the body; every rank enters it.

    Yields the connection as arguments of `init_process_group`. `limit` is that of `watched_run`, and so is the other.
    """
    import torch.distributed as dist

    from slipstream.parallel import NO_LIMIT

    rank, size, host, port = (os.environ[name] for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))
    store = dist.TCPStore(host, int(port), timeout=NO_LIMIT)  # type: ignore[attr-defined]
    with watched_run(store, int(rank), int(size), limit, host, launched_error_file(), limit_setting):
        yield {"rank": int(rank), "world_size": int(size), "store": store}


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
