"""The rank's side: starts its watcher, writes its status, and asks why another rank is gone."""

from __future__ import annotations

import atexit
import faulthandler
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.util import Finalize
from typing import Any, Literal

from slipstream.watchdog.board import Board, StallPolicy, State, anonymous_file
from slipstream.watchdog.supervisor import Supervised, Supervisor, WatchSettings
from slipstream.watchdog.wire import Link

StallLimit = float | Literal["off"] | None
_SECONDS_TO_EXPLAIN = 3.0
_SECONDS_TO_END = 3.0


@dataclass
class _Watch:
    """The watch over this process; by default, none."""

    board: Board = field(default_factory=Board)
    watcher: Supervised | None = None
    supervisor: Supervisor | None = None
    # Descriptors: `order` is the watcher's input, `verdict` and `finished` are its outputs.
    order: int = -1
    verdict: int = -1
    finished: int = -1
    names: Sequence[int] = ()
    written_order: object = None
    process: int = 0  # process id; a fork isn't the watched process
    is_provisional: bool = False
    before: _Watch | None = None  # the provisional watch before this one, whose watcher ends by itself

    def finish(self) -> None:
        """Tells the watcher to end, and the hub if this process has started it, once nobody needs that."""
        self.board.set_state(State.FINISHED)
        if self.supervisor is not None:
            self.supervisor.stop()


_watch: _Watch | None = None
_dumps_stacks = False  # True if this module handles SIGUSR2


def board() -> Board | None:
    """Returns the board on which this rank writes its status; None where it isn't watched, or in another thread than
    the main one."""
    if _watch is None or threading.current_thread() is not threading.main_thread():
        return None
    return _watch.board


def is_watched(provisionally: bool = False) -> bool:
    """Returns whether this process has a watcher that isn't provisional, or where that is asked for any at all."""
    return _is_own() and _watch is not None and (provisionally or not _watch.is_provisional)


def _is_own() -> bool:
    # A forked process has the variable of the one that it comes from, and no watcher.
    return _watch is not None and _watch.process == os.getpid()


def start_watch(
    settings: WatchSettings,
    rank: int,
    num_ranks: int,
    limit: float | None = None,
    hub: Supervised | None = None,
    error_file: str | None = None,
    is_provisional: bool = False,
    names: Sequence[int] | None = None,
    limit_setting: str = "Runtime.stall_limit, or the environment's SLIPSTREAM_STALL_LIMIT",
) -> None:
    """Starts this rank's watcher, which ends with it, in place of a provisional one.

    Args:
        settings: of the run's watchers, the same on every rank.
        rank: of this process, of `num_ranks`.
        num_ranks: of the run.
        limit: seconds that a rank may wait; by default the larger of 60 and five times the longest wait so far.
        hub: on rank 0, unless a launcher keeps it: this process does from now on.
        error_file: where a launcher reads why the rank has ended; by default it is written to standard error.
        is_provisional: whether another call may follow; until then deaths alone are noticed, and no silence.
        names: by which errors name the ranks, where they are some of a larger group.
        limit_setting: by which the limit is given, as errors name it.
    """
    global _watch
    files = {name: anonymous_file(f"slipstream-{name}") for name in ("order", "verdict", "finished")}
    watch = _Watch(order=files["order"], verdict=files["verdict"], finished=files["finished"])
    watch.names = range(num_ranks) if names is None else names
    watch.before = _watch if _is_own() else None
    watch.process = os.getpid()
    watch.is_provisional = is_provisional
    watch.board.set_state(State.RUNNING, StallPolicy.ANY_LENGTH if is_provisional else StallPolicy.COUNTED)
    stack = anonymous_file("slipstream-stack")
    descriptors = files | {"board": watch.board.descriptor, "stack": stack}
    run: dict[str, Any] = {"rank": rank, "num_ranks": num_ranks, "limit": limit, "token": settings.token}
    run["limit_setting"] = limit_setting
    options = descriptors | vars(settings) | run | {"error_file": error_file, "stack_signal": _dump_stacks_to(stack)}
    me = run | {"host": socket.gethostname(), "process": os.getpid(), "doing": "before it was watched"}
    link = Link(settings.address, settings.port, lambda: me)
    if hub is not None:
        hub.start()
    # The link shows the end of this process even before its watcher has started.
    link.keep()
    options["is_reached"] = link.line is not None
    watch.watcher = Supervised(f"the watcher of rank {rank}", "watcher", options, list(descriptors.values()))
    watch.watcher.start()
    watch.supervisor = Supervisor([watch.watcher, *([] if hub is None else [hub])], link)
    watch.supervisor.start()
    _watch = watch
    # The provisional watcher ends only now, so that there is no moment without one.
    if watch.before is not None:
        watch.before.finish()
    atexit.register(_end_at_exit)
    # A process of multiprocessing ends without calling atexit's functions.
    Finalize(None, _end_at_exit, exitpriority=0)


def end_watch(failure: str = "") -> None:
    """Announces the end of this rank, with or without an error, to the others, and waits for its watcher's end."""
    global _watch
    if _watch is None or not _is_own():
        return
    watch, _watch = _watch, None
    if failure:
        watch.board.set_phase(failure)
        watch.board.set_state(State.FAILED)
        # The watcher reports the failure once this process has gone.
        return
    watch.finish()
    for old_watch in (watch, watch.before):
        with suppress(subprocess.TimeoutExpired):
            if old_watch is not None and old_watch.watcher is not None and old_watch.watcher.process is not None:
                old_watch.watcher.process.wait(_SECONDS_TO_END)


def note_order(rank: int, schedule: object) -> None:
    """Notes which schedule this process runs as which of the pipeline's ranks. Its text is written when it changes."""
    if _watch is not None and _watch.written_order is not schedule:
        _watch.written_order = schedule
        data = f"{rank}\n{schedule}".encode()
        os.truncate(_watch.order, 0)
        os.pwrite(_watch.order, data, 0)


@contextmanager
def waiting(what: bytes) -> Iterator[None]:
    """Shows on the board what the main thread waits for meanwhile, such as b"an all-reduce"."""
    mine = board()
    if mine is None:
        yield
        return
    mine.set_wait(what)
    yield
    # After an error the wait stays on the board, and says where the rank was.
    mine.set_wait(b"")


@contextmanager
def watchdog_paused(phase: str, uses_disk: bool = False) -> Iterator[None]:
    """Marks a phase of unknown length, such as "exporting", in which nobody's silence counts.

    Where the phase `uses_disk`, a run in which nobody reads, writes, computes or gets on is ended after ten times the
    limit.
    """
    mine = board()
    if mine is None:
        yield
        return
    before = mine.look()
    mine.set_phase(phase)
    # Within another phase, that phase's policy stays.
    if before.policy == StallPolicy.COUNTED:
        mine.set_state(State.RUNNING, StallPolicy.LONG if uses_disk else StallPolicy.ANY_LENGTH)
    try:
        yield
    finally:
        mine.set_phase(before.phase)
        mine.set_state(State.RUNNING, before.policy)


def explain_loss(problem: str) -> str:
    """Returns the watchers' explanation of an error that another rank's end may have caused: the verdict, within some
    seconds, or `problem` where there is none."""
    if _watch is None or not _is_own():
        return problem
    deadline = time.monotonic() + _SECONDS_TO_EXPLAIN
    while time.monotonic() < deadline:
        if size := os.fstat(_watch.verdict).st_size:
            return os.pread(_watch.verdict, size, 0).decode()
        time.sleep(0.02)
    return problem


def finished_ranks() -> set[int]:
    """Returns the ranks that the watchers know to have ended without an error; of one that ends now, a second later."""
    if _watch is None or not _is_own():
        return set()
    written = os.pread(_watch.finished, 2**20, 0)
    return {_watch.names[rank] for rank in json.loads(written or "[]")}


def _dump_stacks_to(descriptor: int) -> int:
    """Lets a signal write the stacks of all threads, by a handler in C; returns its number, 0 where it is in use."""
    global _dumps_stacks
    usr2 = getattr(signal, "SIGUSR2", 0)
    # Only the main thread can set signal handlers.
    is_main = threading.current_thread() is threading.main_thread()
    if not usr2 or not is_main or (signal.getsignal(usr2) is not signal.SIG_DFL and not _dumps_stacks):
        return 0
    # This setting applies again once Python has taken its handler away, at the end.
    signal.signal(usr2, signal.SIG_IGN)
    faulthandler.register(usr2, file=descriptor, all_threads=True)
    _dumps_stacks = True
    return int(usr2)


def _leave_to_parent() -> None:
    """Closes in a fork the lines by which its parent's end is noticed."""
    for watch in (_watch, None if _watch is None else _watch.before):
        if watch is not None and watch.supervisor is not None:
            watch.supervisor.leave_to_parent()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_to_parent)


def _end_at_exit() -> None:
    """Tells apart a program's end from its failure, where it doesn't call `end_watch`."""
    failure = getattr(sys, "last_value", None)
    end_watch("" if failure is None else f"{type(failure).__name__}: {failure}".partition("\n")[0])
