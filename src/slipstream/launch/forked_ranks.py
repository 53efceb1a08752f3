"""Forks local ranks from a process that has done their imports, so that they needn't each do so.

    launcher --fork--> server --fork--> rank 0, rank 1, ...

The server is the launcher before it started a thread or used a GPU, and computes nothing, so its forks are like new
processes. It ends with the launcher, and its ranks with it.
"""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
import os
import queue
import signal
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from multiprocessing.connection import Connection
from typing import Any

from slipstream.errors import RankFailedError
from slipstream.launch.stop_request import STOP_SIGNALS
from slipstream.watchdog import exit_text, wait_for_an_end

_FORK: Any = multiprocessing.get_context("fork")
_ANSWERED_BY_THE_LAUNCHER = {signal.SIGINT, *STOP_SIGNALS}
_SECONDS_TO_LOOK = 1.0  # longest interval between looks for the launcher, whose end is usually seen at once
_SECONDS_TO_END = 3.0
_PR_SET_PDEATHSIG = 1
# mallopt's names of the settings of MALLOC, which no environment variable can change in a running process. A
# threshold of -1 is never reached.
_MALLOPT = {"MALLOC_TRIM_THRESHOLD_": (-1, -1), "MALLOC_TOP_PAD_": (-2, 2**26), "MALLOC_MMAP_THRESHOLD_": (-3, -1)}


@contextmanager
def fork_server() -> Iterator[ForkServer | None]:
    """Yields a server that forks ranks of this process as it is now; None where each has to be started anew: on systems
    other than Linux, where another thread runs, and where CUDA is in use."""
    if sys.platform != "linux" or threading.active_count() > 1:
        yield None
        return
    server = ForkServer()
    try:
        yield server if server.is_fit else None
    finally:
        server.close()


class ForkServer:
    """The launcher's side: asks for ranks, and hears how they end.

    Attributes:
        pid: of the server.
        is_fit: whether the ranks could use a GPU: torch has not called CUDA in this process.
    """

    def __init__(self) -> None:
        self._codes: dict[int, int] = {}
        self._started: queue.SimpleQueue[list[int]] = queue.SimpleQueue()
        self._has_ended = False
        self._connection, theirs = _FORK.Pipe()
        self._process = _FORK.Process(target=_serve, args=(theirs, self._connection, os.getpid()), name="fork server")
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _ANSWERED_BY_THE_LAUNCHER)
        self._process.start()
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        self.pid: int = self._process.pid
        theirs.close()
        try:
            self.is_fit: bool = self._connection.recv()
        except (EOFError, OSError):
            self._has_ended = True
            raise RankFailedError(f"{self.ending} before it was ready, perhaps because memory was short") from None
        # In a thread, as a signal in the main thread could lose a message.
        threading.Thread(target=self._hear, name="ends of ranks", daemon=True).start()

    def start(
        self, module: str, arguments: Sequence[str], environments: Sequence[Mapping[str, str]]
    ) -> list[ForkedRank]:
        """Forks a rank for each environment, which is all of it, to run the module's `main` with these arguments.

        Raises RankFailedError if the server has ended.
        """
        with suppress(BrokenPipeError):
            self._connection.send((module, list(arguments), [dict(environment) for environment in environments]))
        if pids := self._started.get():
            return [ForkedRank(self, pid) for pid in pids]
        raise RankFailedError("the process that forks the ranks has ended, perhaps because memory was short")

    def code(self, pid: int) -> int | None:
        """Returns the exit code of a rank, a negative one for a signal; None while it runs."""
        return self._codes.get(pid, -signal.SIGKILL if self._has_ended else None)

    @property
    def ending(self) -> str:
        """The end of the server, as the beginning of a sentence; "" while it runs."""
        if not self._has_ended:
            return ""
        self._process.join(_SECONDS_TO_END)
        return f"process {self.pid}, which forks the ranks, {exit_text(self._process.exitcode or 0)}"

    def close(self) -> None:
        """Ends the server, and any ranks that still run."""
        self._process.kill()
        self._process.join()

    def _hear(self) -> None:
        try:
            while True:
                message = self._connection.recv()
                if isinstance(message, list):
                    self._started.put(message)
                else:
                    pid, code = message
                    self._codes[pid] = code
        except (EOFError, OSError):
            self._has_ended = True
            self._started.put([])


class ForkedRank:
    """A rank as its launcher sees it, which may also be a subprocess.Popen."""

    def __init__(self, server: ForkServer, pid: int) -> None:
        self.pid = pid
        self._server = server

    def poll(self) -> int | None:
        """Returns the exit code, a negative one for a signal; None while the rank runs."""
        return self._server.code(self.pid)


def _serve(connection: Connection, other_end: Connection, launcher: int) -> None:
    """Forks ranks when it is asked to, and tells when one has ended."""
    import torch

    other_end.close()
    # SIGCONT also wakes a stopped server, which then ends.
    _signal_at_the_end_of(launcher, signal.SIGCONT)
    # The launcher answers the terminal's Ctrl-C, so this process leaves the terminal.
    os.setsid()
    # Otherwise the first collection in a rank would copy everything that was imported.
    gc.freeze()
    connection.send(not torch.cuda._is_in_bad_fork())
    running: list[Any] = []
    # The launcher may end at any moment.
    with suppress(EOFError, ConnectionError):
        while os.getppid() == launcher:
            if connection.poll():
                module, arguments, environments = connection.recv()
                started = [
                    _FORK.Process(
                        target=_run, args=(module, arguments, env, connection, os.getpid()), name=f"rank {rank}"
                    )
                    for rank, env in enumerate(environments)
                ]
                running += started
                for rank in started:
                    rank.start()
                connection.send([rank.pid for rank in started])
            for rank in [rank_process for rank_process in running if rank_process.exitcode is not None]:
                running.remove(rank)
                connection.send((rank.pid, rank.exitcode))
            wait_for_an_end([rank.pid for rank in running], _SECONDS_TO_LOOK, connection.fileno())
    for rank in running:
        rank.kill()
    for rank in running:
        rank.join(_SECONDS_TO_END)
    # multiprocessing would wait for ranks that are yet to die.
    os._exit(0)


def _run(module: str, arguments: list[str], environment: dict[str, str], connection: Connection, server: int) -> None:
    """Runs a module in this process as `python -m module *arguments` would."""
    import torch

    connection.close()
    _signal_at_the_end_of(server, signal.SIGKILL)
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for signal_number in STOP_SIGNALS:
        signal.signal(signal_number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _ANSWERED_BY_THE_LAUNCHER)
    # The other variables were set when this process began.
    defaults = environment.keys() - os.environ.keys()
    for name in defaults & _MALLOPT.keys():
        ctypes.CDLL(None).mallopt(*_MALLOPT[name])
    if "OMP_NUM_THREADS" in defaults:
        torch.set_num_threads(int(environment["OMP_NUM_THREADS"]))
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = [module, *arguments]
    import_module(module).main()


def _signal_at_the_end_of(parent: int, number: int) -> None:
    """Lets Linux send this process a signal when its parent has ended."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        os._exit(1)
