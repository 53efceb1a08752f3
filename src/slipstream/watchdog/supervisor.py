"""Starts the hub and the watchers, hears from each every second, and starts those again that have ended or are silent.

    launcher, or rank 0 --- hub <--- watcher --- rank
                             ^-------------------'

A stopped process and a killed one are one case: whoever is silent is killed. Nothing is lost with a watcher, as it
reads all its facts anew; the state that a hub has to remember it tells its supervisor, which tells it the next.
"""

from __future__ import annotations

import ctypes
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream.watchdog.judgement import exit_text
from slipstream.watchdog.wire import Line, Link, listen_at, wait_for

LOOK_SECONDS = 1.0
# After a longer pause, this process was stopped itself or found no processor, so its look doesn't count.
PAUSED_SECONDS = 2.5
_MOST_SILENCE = 4.0  # seconds; restarting a watcher that is only slow does no harm
_SECONDS_TO_START = 20.0  # time for the first word, including Python's start
_SECONDS_TO_END = 1.0  # time to end once its line is closed
_LEAST_LIFE = 0.5  # seconds between two starts; four times as long after each failed one
_MOST_FAILURES = 5  # failed starts in a row, without a word
_SOURCES = str(Path(__file__).parents[2])
_PROGRAM = """
import importlib, sys
sys.path.insert(0, sys.argv[1])
importlib.import_module(sys.argv[2]).main()
"""
_PR_SET_PDEATHSIG = 1
# With the supervisor its helpers end.
_MEANT_FOR_THE_SUPERVISOR = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGUSR2)


class Supervised:
    """A helper process, and the line to it. All calls are the supervisor's, but for the first `start`."""

    def __init__(
        self,
        name: str,
        module: str,
        settings: Mapping[str, Any],
        descriptors: Sequence[int],
        listening: socket.socket | None = None,
        has_own_session: bool = False,
    ) -> None:
        """Starts nothing yet.

        Args:
            name: in messages.
            module: of the watchdog, whose `main` runs.
            settings: for its first line; a command line could be read by other users.
            descriptors: that it inherits.
            listening: which it inherits too: it is started only once somebody has come there.
            has_own_session: whether signals from the terminal don't reach it.
        """
        self.name = name
        self._module = module
        self._settings = dict(settings)
        self._descriptors = list(descriptors)
        self.listening = listening
        self._has_own_session = has_own_session
        self.process: subprocess.Popen[bytes] | None = None
        self.line: Line | None = None
        self._memory: Any = None
        self._began = self._heard = 0.0
        self._has_spoken = False
        self._num_failures = 0
        self._next_start = 0.0

    @property
    def source(self) -> Line | socket.socket | None:
        """The connection or socket that becomes readable when there is something to do."""
        is_due = time.monotonic() >= self._next_start
        return self.line if self.line is not None else self.listening if is_due else None

    def start(self) -> None:
        """Starts the process."""
        mine, theirs = socket.socketpair()
        passed = [*self._descriptors, *([] if self.listening is None else [self.listening.fileno()])]
        command = [sys.executable, "-I", "-S", "-c", _PROGRAM, _SOURCES, f"slipstream.watchdog.{self._module}"]
        # A new process inherits what is blocked; it ignores these once Python has started in it.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _MEANT_FOR_THE_SUPERVISOR)
        try:
            with theirs:
                self.process = subprocess.Popen(
                    command,
                    stdin=theirs.fileno(),
                    stdout=subprocess.DEVNULL,
                    pass_fds=passed,
                    cwd="/",
                    start_new_session=self._has_own_session,
                )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        self.line = Line(mine)
        self._began = self._heard = time.monotonic()
        self._has_spoken = False
        self.line.send(self._settings | {"parent": os.getpid(), "memory": self._memory})

    def look(self, pause: float) -> None:
        """Reads the process's messages; kills it where it is silent, and starts it where it has ended. Its silence in
        the last `pause` seconds doesn't count."""
        self._heard += pause
        if self.line is not None and self.process is not None:
            self._hear(self.line, self.process)
        is_wanted = self.listening is None or wait_for([self.listening], 0)
        if self.line is None and time.monotonic() >= self._next_start and is_wanted:
            try:
                self.start()
            except OSError as error:  # too many processes, or too few descriptors
                self._note_loss(f"can't be started ({error})")

    def _hear(self, line: Line, process: subprocess.Popen[bytes]) -> None:
        now = time.monotonic()
        for message in line.receive():
            self._heard = now
            self._has_spoken = True
            self._num_failures = 0
            self._memory = message.get("memory", self._memory)
            # The rank's main thread waits for ever, so the process ends here.
            if (exit_code := message.get("exit_code")) is not None:
                os._exit(exit_code)
        # The other process has ended, or is about to.
        if not line.is_open:
            with suppress(subprocess.TimeoutExpired):
                process.wait(_SECONDS_TO_END)
            process.kill()
            if code := process.wait():
                self._note_loss(exit_text(code))
            else:
                self._leave()
        elif now - self._heard > (_MOST_SILENCE if self._has_spoken else _SECONDS_TO_START):
            process.kill()
            process.wait()
            self._note_loss(f"was silent for {now - self._heard:.0f} s, as a stopped one is")

    def close(self, kills: bool = False) -> None:
        """Lets the process end by itself, which has work left, or ends it."""
        self._leave()
        if self.process is not None and kills:
            self.process.kill()
            self.process.wait()
        elif self.process is not None:
            # One that was stopped goes on, so as to end, also before it could ask to be told of this process's end.
            self.process.send_signal(signal.SIGCONT)
        if self.listening is not None:
            self.listening.close()

    def _leave(self) -> None:
        """Closes the line; the process isn't started again."""
        if self.line is not None:
            self.line.close()
        self.line, self._next_start = None, float("inf")

    def _note_loss(self, how: str) -> None:
        """Reports the end of the process and starts it again, after a pause if it keeps ending."""
        process = "" if self.process is None else f" (process {self.process.pid})"
        self._num_failures += not self._has_spoken
        self._leave()
        if self._num_failures < _MOST_FAILURES:
            self._next_start = self._began + _LEAST_LIFE * 4**self._num_failures
            follows = "it is started again, and the run goes on"
        else:
            follows = "from now on the run goes on without it"
        with suppress(OSError, ValueError):
            sys.stderr.write(f"{self.name}{process} {how}; {follows}\n")
            sys.stderr.flush()


class Supervisor(threading.Thread):
    """Looks after some processes, and after this rank's own link to the hub, if this is a rank."""

    def __init__(self, helpers: Sequence[Supervised], link: Link | None = None) -> None:
        super().__init__(name="supervisor of the watch", daemon=True)
        self._helpers = list(helpers)
        self._link = link
        self._kills = False
        self._ending, self._end = socket.socketpair()
        self._is_over = False

    def run(self) -> None:
        looked = time.monotonic()
        while not self._is_over:
            lines = [None if self._link is None else self._link.line, *(helper.source for helper in self._helpers)]
            wait_for([self._ending, *lines], LOOK_SECONDS)
            self._is_over = wait_for([self._ending], 0)
            now = time.monotonic()
            pause = now - looked if now - looked > PAUSED_SECONDS else 0.0
            looked = now
            if self._link is not None and not self._is_over:
                self._link.receive()
                self._link.keep()
            for helper in [] if self._is_over else self._helpers:
                helper.look(pause)
        if self._link is not None:
            self._link.send({"ending": "finished"})
            if self._link.line is not None:
                self._link.line.close()
        for helper in self._helpers:
            helper.close(self._kills)

    def stop(self, kills: bool = False) -> None:
        """Lets the helpers end by themselves, or kills them."""
        self._kills = kills
        self._end.close()
        self.join()
        self._ending.close()

    def leave_to_parent(self) -> None:
        """Closes the lines that a fork has inherited, so that the parent's end is noticed while the fork lives."""
        lines = [None if self._link is None else self._link.line, *(helper.line for helper in self._helpers)]
        for line in lines:
            if line is not None:
                line.connection.close()
        for helper in self._helpers:
            if helper.listening is not None:
                helper.listening.close()


@dataclass(frozen=True)
class WatchSettings:
    """The settings that the watchers of a run share: where the hub listens, the token by which it knows them, and who
    has started it, "rank 0" or "the launcher"."""

    address: str
    port: int
    token: str
    starter: str = "rank 0"


def open_hub(address: str, starter: str = "rank 0") -> tuple[Supervised, WatchSettings]:
    """Returns a hub for the watchers at an address of this machine, which starts when the first one connects, and their
    settings."""
    listening = listen_at(address)
    settings = WatchSettings(address, listening.getsockname()[1], secrets.token_hex(16), starter)
    options = {"listening": listening.fileno(), "token": settings.token}
    return Supervised("the watchers' hub", "hub", options, [], listening, starter != "rank 0"), settings


@contextmanager
def supervised_hub(address: str) -> Iterator[WatchSettings]:
    """Has a launcher keep the hub of its ranks while the body runs."""
    hub, settings = open_hub(address, "the launcher")
    supervisor = Supervisor([hub])
    supervisor.start()
    try:
        yield settings
    finally:
        supervisor.stop(kills=True)


def accept_settings() -> tuple[dict[str, Any], Line]:
    """Returns, in a helper process, its settings and the line to its supervisor."""
    for signal_number in _MEANT_FOR_THE_SUPERVISOR:
        signal.signal(signal_number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _MEANT_FOR_THE_SUPERVISOR)
    if sys.platform == "linux":
        # A helper that is stopped when its supervisor ends goes on then, so as to end too.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGCONT)
    line = Line(socket.socket(fileno=sys.stdin.fileno()))
    while line.is_open:
        wait_for([line], LOOK_SECONDS)
        if messages := line.receive():
            # The answer comes only now: a supervisor that has ended meanwhile has left its settings.
            line.send({})
            return messages[0], line
    sys.exit()
