"""The process that watches one rank, its parent: reports to the hub, and ends the rank where the run can't go on.

It imports little, to be there early and to need few megabytes. It ends with its rank, shortly after.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from slipstream.watchdog.board import Board, Sight, Silence, State
from slipstream.watchdog.hub import Hub
from slipstream.watchdog.process_state import state_of
from slipstream.watchdog.sight_text import doing_text, stack_lines, wait_lines
from slipstream.watchdog.wire import Line, wait_for

_LOOK_SECONDS = 1.0  # every look takes a core from a rank for a moment
_PAUSED_SECONDS = 2.5
_SECONDS_TO_CONNECT = 60.0
_SECONDS_AFTER_ITS_RANK = 1.5  # to tell others of its death
_SECONDS_FOR_A_STACK = 0.3
_SOON_SECONDS = 0.1  # between tries to connect, and between looks at a rank that is about to be ended
_MOST_STACK_BYTES = 65536
_LEAST_BYTES = 2**24  # read or written, by which a rank counts as at work: a heartbeat in a file is less


_HUB_IS_LOST = (
    "rank 0 has ended without a word, and its watcher with it: they were killed together, or their machine is gone"
)


class Watcher:
    """Looks at the rank `parent` through its board, and exchanges messages with the hub on `line`."""

    def __init__(self, settings: dict[str, Any], line: Line) -> None:
        self._settings, self._line, self._parent = settings, line, int(settings["parent"])
        self._board = Board(settings["board"])
        self._last: Sight = self._board.look()
        self._changed = self._reported = self._looked = self._active = time.monotonic()
        self._num_bytes = 0
        self._stopped_since: float | None = None
        self._longest, self._cpu = 0.0, (time.monotonic(), 0.0, False)
        self._end_by: float | None = None  # when the rank is ended
        self._verdict = ""
        self._hub_may_leave = False
        # Standard input, which ends when the rank closes it or is gone: then this needn't wait for the next look.
        self._lifeline = [sys.stdin.fileno()]

    def run(self) -> None:
        """Watches until the rank has ended."""
        who = {"rank": self._settings["rank"], "token": self._settings["token"], "is_watched": True}
        self._line.send(who | self._facts())
        while os.getppid() == self._parent and self._board.look().state != State.FINISHED:
            self._wait()
            self._look()
            for message in self._line.receive():
                self._obey(message)
            if self._end_by is not None and time.monotonic() > self._end_by:
                self._end_rank()
                return
            if not (self._line.is_open or self._hub_may_leave or self._end_by is not None):
                self._decide(_HUB_IS_LOST, _SECONDS_AFTER_ITS_RANK)
        self._say_how_it_ended()

    def _wait(self) -> None:
        """Waits for a message, for the rank's end, or for the time of the next look."""
        sources = [*self._lifeline, *([self._line.connection] if self._line.is_open else [])]
        seconds = _LOOK_SECONDS if self._end_by is None else _SOON_SECONDS
        if set(self._lifeline) & set(wait_for(sources, seconds)):
            self._lifeline = []

    def _say_how_it_ended(self) -> None:
        sight = self._board.look()
        ending = {State.RUNNING: "dead", State.FINISHED: "finished"}.get(sight.state, sight.phase)
        self._line.send({"ending": ending} | self._position(sight))
        deadline = time.monotonic() + _SECONDS_AFTER_ITS_RANK
        while ending != "finished" and self._line.is_open and time.monotonic() < deadline:
            wait_for([self._line.connection], _LOOK_SECONDS)
            for message in self._line.receive():
                if message.get("ask"):
                    self._line.send({"detail": []})
                if "verdict" in message:
                    return

    def _look(self) -> None:
        now, sight = time.monotonic(), self._board.look()
        if now - self._looked > _PAUSED_SECONDS:  # this process was stopped with its rank, or found no processor
            self._changed += now - self._looked
            self._active += now - self._looked
        self._looked = now
        if sight.counter != self._last.counter:
            if self._last.silence == Silence.COUNTED and self._last.step > 1:
                self._longest = max(self._longest, now - self._changed)
            self._changed = self._active = now
        self._last = sight
        process = state_of(self._parent)
        if process is None or not process.is_stopped:
            self._stopped_since = None
        elif self._stopped_since is None:
            self._stopped_since = now
        if process is not None and now - self._cpu[0] > _LOOK_SECONDS / 2:
            began, used, _ = self._cpu
            self._cpu = now, process.cpu_seconds, (process.cpu_seconds - used) > 0.3 * (now - began)
            if (self._cpu[2] and not sight.waits) or process.num_bytes - self._num_bytes > _LEAST_BYTES:
                self._active, self._num_bytes = now, process.num_bytes
        if now - self._reported > _LOOK_SECONDS / 2:
            self._reported = now
            self._line.send(self._facts())

    def _facts(self) -> dict[str, Any]:
        """Returns what the hub is told from time to time."""
        now = time.monotonic()
        return {
            "host": socket.gethostname(),
            "process": self._parent,
            "silent": now - self._changed,
            "idle": now - self._active,
            "stopped": 0.0 if self._stopped_since is None else max(1e-3, now - self._stopped_since),
            "computes": self._cpu[2],
            "longest": self._longest,
        } | self._position(self._last)

    def _position(self, sight: Sight) -> dict[str, Any]:
        order = self._order() if sight.action >= 0 else ""
        return {
            "is_counted": sight.silence == Silence.COUNTED,
            "may_be_long": sight.silence == Silence.LONG,
            "step": sight.step,
            "waits": bool(sight.waits),
            "doing": doing_text(sight, order),
        }

    def _order(self) -> str:
        """Returns the rank's place on the pipeline, a newline, and the text of its schedule."""
        order = self._settings["order"]
        return os.pread(order, os.fstat(order).st_size, 0).decode()

    def _obey(self, message: dict[str, Any]) -> None:
        if message.get("ask"):
            sight = self._board.look()
            lines = wait_lines(sight, self._order())
            is_blamed = self._settings["rank"] in message.get("blamed", [])
            if is_blamed and self._stopped_since is None:
                lines += self._stack()
            self._line.send(self._facts() | {"detail": lines})
        self._hub_may_leave = self._hub_may_leave or bool(message.get("leaves"))
        if "verdict" in message and not self._verdict:
            self._decide(str(message["verdict"]), float(message.get("grace", 0.0)))

    def _decide(self, verdict: str, grace: float) -> None:
        """Has the rank end within some seconds, in which it may raise the verdict by itself."""
        self._verdict = verdict
        os.pwrite(self._settings["verdict"], verdict.encode(), 0)
        self._end_by = time.monotonic() + grace

    def _stack(self) -> list[str]:
        """Returns where the rank's main thread is: a handler in C writes it, even where the interpreter is held."""
        if not self._settings["stack_signal"]:
            return []
        before = os.fstat(self._settings["stack"]).st_size
        with suppress(OSError):
            os.kill(self._parent, self._settings["stack_signal"])
            time.sleep(_SECONDS_FOR_A_STACK)
            return stack_lines(os.pread(self._settings["stack"], _MOST_STACK_BYTES, before).decode(errors="replace"))
        return []

    def _end_rank(self) -> None:
        """Ends a rank that hasn't raised the verdict by itself: it waits where nothing else reaches it."""
        if file := self._settings["error_file"]:
            part = Path(f"{file}.{os.getpid()}.part")
            part.write_text(
                json.dumps({"message": self._verdict, "time": time.time(), "kind": "RankFailedError"}), encoding="utf-8"
            )
            with suppress(FileExistsError):
                os.link(part, file)
            part.unlink()
        else:
            sys.stderr.write(f"error: {self._verdict}\n")
            sys.stderr.flush()
        with suppress(ProcessLookupError):
            if os.getppid() == self._parent:
                os.kill(self._parent, signal.SIGKILL)


def _connection(settings: dict[str, Any]) -> socket.socket:
    """Returns that which the rank has made, if it could, or else a new one."""
    if (descriptor := settings.pop("connection", None)) is not None:
        return socket.socket(fileno=descriptor)
    return socket.create_connection((settings["address"], settings["port"]), timeout=5)


def main() -> None:
    """Watches the process that has started this one; the settings are a line of standard input, which then stays open
    for as long as the rank lives."""
    for each in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGUSR2):
        signal.signal(each, signal.SIG_IGN)  # meant for the rank, with which this ends
    settings = json.loads(sys.stdin.readline())
    hub = None
    if settings["listening"] is not None:
        listening = socket.socket(fileno=settings["listening"])
        hub = Hub(listening, settings["token"], settings["num_ranks"], settings["limit"])
        hub.start()
    deadline = time.monotonic() + _SECONDS_TO_CONNECT
    while True:  # also for a rank that has ended meanwhile, which has to be told
        with suppress(OSError):
            connection = _connection(settings)
            Watcher(settings, Line(connection)).run()
            connection.close()
            break
        if os.getppid() != settings["parent"]:
            deadline = min(deadline, time.monotonic() + _SECONDS_AFTER_ITS_RANK)
        if time.monotonic() > deadline:
            where = f"{settings['address']}, port {settings['port']}"
            sys.stderr.write(
                f"rank {settings['rank']} isn't watched: its watcher can't reach that of rank 0 at {where}\n"
            )
            return
        time.sleep(_SOON_SECONDS)
    if hub is not None and hub.has_watchers:
        hub.join()


if __name__ == "__main__":
    main()
