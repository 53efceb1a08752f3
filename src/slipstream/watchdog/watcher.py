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

from slipstream.errors import RankFailedError
from slipstream.schedule import Schedule, ScheduleError, report_wait
from slipstream.watchdog.board import Board, RankStatus, StallPolicy, State
from slipstream.watchdog.judgement import (
    LEAST_LIMIT,
    SURELY_COMPUTES,
    UNREACHABLE_AFTER,
    end_of,
    is_ready,
    state_of,
)
from slipstream.watchdog.supervisor import LOOK_SECONDS, PAUSED_SECONDS, accept_settings
from slipstream.watchdog.wire import Line, Link, wait_for

_SECONDS_TO_CONNECT = 60.0  # time until the hub's first word
_SECONDS_AFTER_ITS_RANK = 15.0  # time to tell the hub of the rank's end, as the hub may just be starting again
_SECONDS_FOR_A_STACK = 0.3
_SOON_SECONDS = 0.1  # pause between tries to connect, and between looks at a rank that is about to be ended
_GRACE_SECONDS = 1.5
_SECONDS_TO_EXIT = 2.0  # time for a running rank whose interpreter isn't blocked
_MOST_STACK_BYTES = 65536
# A rank counts as at work once it has read or written this much: a heartbeat in a file is less.
_LEAST_BYTES = 2**24


class Watcher:
    """Looks at the rank `parent` through its board, and exchanges messages with the hub."""

    def __init__(self, settings: dict[str, Any], supervisor: Line) -> None:
        self._settings = settings
        self._supervisor = supervisor
        self._parent = int(settings["parent"])
        self._end_of_rank = end_of(self._parent)
        self._board = Board(settings["board"])
        self._last: RankStatus = self._board.look()
        self._changed = self._reported = self._looked = self._active = time.monotonic()
        self._num_bytes = 0
        self._is_ready = False
        self._stopped_since: float | None = None
        self._longest = 0.0
        self._cpu = (time.monotonic(), 0.0, False)
        self._end_by: float | None = None  # time at which the rank is to be ended
        self._verdict = ""
        self._limit = float(settings["limit"] or LEAST_LIMIT)  # the limit last told by the hub
        self._hub_may_leave = self._is_heard = False
        self._ending: dict[str, Any] = {}  # facts about the rank's end; empty while it runs
        self._hub = Link(settings["address"], settings["port"], self._hello)
        # The rank has reached the hub, so a silent hub is a lost one.
        self._hub.has_heard = settings["is_reached"]

    def run(self) -> None:
        """Watches until the rank has ended."""
        while os.getppid() == self._parent and self._board.look().state != State.FINISHED:
            self._exchange(LOOK_SECONDS if self._end_by is None else _SOON_SECONDS)
            self._look()
            if self._end_by is not None and time.monotonic() > self._end_by:
                self._end_rank()
                return
            if self._end_by is None and not self._hub_may_leave and (loss := self._loss_of_the_hub()):
                self._decide(loss, _GRACE_SECONDS)
        # The end of the rank has come, so nothing waits for it any more.
        self._end_of_rank = None
        self._say_how_it_ended()

    def _hello(self) -> dict[str, Any]:
        names = ("rank", "num_ranks", "limit", "limit_setting", "token")
        who = {name: self._settings[name] for name in names} | {"host": socket.gethostname(), "is_watcher": True}
        return who | self._facts() | self._ending

    def _exchange(self, seconds: float) -> None:
        """Waits for a message, for the rank's end, or for some seconds; connects and obeys."""
        self._hub.keep()
        if self._hub.line is None:
            seconds = min(seconds, _SOON_SECONDS)
        wait_for([self._end_of_rank, self._supervisor, self._hub.line], seconds)
        self._supervisor.receive()
        for message in self._hub.receive():
            self._obey(message)

    def _loss_of_the_hub(self) -> str:
        """Returns why this rank can't go on without the hub; "" where it can."""
        starter = self._settings["starter"]
        place = f"{self._settings['address']}, port {self._settings['port']}"
        silent = time.monotonic() - self._hub.heard
        if self._hub.is_refused:
            return (
                f"{starter} has ended without a word, and the hub of the watchers with it: they were killed together, "
                "or their machine is gone"
            )
        if self._hub.has_heard and silent > self._limit + UNREACHABLE_AFTER:
            rank = self._settings["rank"]
            host = socket.gethostname()
            state = "waiting" if self._last.waits else "not waiting"
            return (
                f"the watchers' hub, which {starter} has started at {place}, hasn't answered for {silent:.0f} s: its "
                f"machine is gone, or the network between it and {host}\n  rank {rank} ({host}, process "
                f"{self._parent}), {state}: {self._position(self._last)['doing']}"
            )
        if not self._hub.has_heard and silent > _SECONDS_TO_CONNECT:
            sys.stderr.write(
                f"rank {self._settings['rank']} isn't watched: its watcher can't reach the hub at {place}\n"
            )
            sys.exit()
        return ""

    def _say_how_it_ended(self) -> None:
        """Tells the hub, until it has heard that."""
        status = self._board.look()
        ending = {State.RUNNING: "dead", State.FINISHED: "finished"}.get(status.state, status.phase)
        self._ending = {"ending": ending} | self._position(status)
        self._hub.send(self._ending)
        deadline = time.monotonic() + _SECONDS_AFTER_ITS_RANK
        while not self._is_heard and not self._hub.is_refused and time.monotonic() < deadline:
            self._exchange(LOOK_SECONDS)

    def _look(self) -> None:
        now = time.monotonic()
        status = self._board.look()
        if (pause := now - self._looked) > PAUSED_SECONDS:  # a pause of this process itself
            self._changed += pause
            self._active += pause
            self._hub.heard += pause
            self._cpu = now, self._cpu[1], self._cpu[2]
        self._looked = now
        if status.counter != self._last.counter:
            if self._last.policy == StallPolicy.COUNTED and self._last.step > 1:
                self._longest = max(self._longest, now - self._changed)
            self._changed = self._active = now
        self._last = status
        process = state_of(self._parent)
        if process is None or not process.is_stopped:
            self._stopped_since = None
        elif self._stopped_since is None:
            self._stopped_since = now
        if process is not None and now - self._cpu[0] > LOOK_SECONDS / 2:
            seconds = now - self._cpu[0]
            used = process.cpu_seconds - self._cpu[1]
            # A thread that looks at something every second is rarely ready, and hardly twice in a row.
            was_ready, self._is_ready = self._is_ready, is_ready(self._parent, process)
            computes = process.letter == "R" or used > SURELY_COMPUTES * seconds
            computes = computes or (self._is_ready and (used > 0 or was_ready))
            self._cpu = now, process.cpu_seconds, computes
            if self._cpu[2] and process.cpu_seconds:
                # Of a rank that computes the processor's seconds count, and not those in which others had it.
                self._changed = min(now, self._changed + max(0.0, seconds - used))
            if (self._cpu[2] and not status.waits) or process.num_bytes - self._num_bytes > _LEAST_BYTES:
                self._active = now
                self._num_bytes = process.num_bytes
        if now - self._reported > LOOK_SECONDS / 2:
            self._reported = now
            self._supervisor.send({})
            self._hub.send(self._facts())

    def _facts(self) -> dict[str, Any]:
        """Returns the facts for the hub's next report."""
        now = time.monotonic()
        return {
            "process": self._parent,
            "silent": now - self._changed,
            "idle": now - self._active,
            "stopped": 0.0 if self._stopped_since is None else max(1e-3, now - self._stopped_since),
            "computes": self._cpu[2],
            "longest": self._longest,
        } | self._position(self._last)

    def _position(self, status: RankStatus) -> dict[str, Any]:
        order = self._order() if status.action >= 0 else ""
        return {
            "is_counted": status.policy == StallPolicy.COUNTED,
            "may_be_long": status.policy == StallPolicy.LONG,
            "step": status.step,
            "waits": bool(status.waits),
            "doing": doing_text(status, order),
        }

    def _order(self) -> str:
        """Returns the rank's place on the pipeline, a newline, and the text of its schedule."""
        order = self._settings["order"]
        return os.pread(order, os.fstat(order).st_size, 0).decode()

    def _obey(self, message: dict[str, Any]) -> None:
        if message.get("ask"):
            status = self._board.look()
            lines = wait_lines(status, self._order())
            is_blamed = self._settings["rank"] in message.get("blamed", [])
            if is_blamed and self._stopped_since is None:
                lines += self._stack()
            self._hub.send(self._facts() | {"detail": lines})
        self._limit = float(message.get("limit", self._limit))
        if finished := message.get("finished"):
            os.pwrite(self._settings["finished"], json.dumps(finished).encode(), 0)  # the list only grows
            self._hub_may_leave = self._hub_may_leave or 0 in finished
        self._is_heard = self._is_heard or bool(message.get("bye"))
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
            self._supervisor.send({"exit_code": RankFailedError.exit_code})
            wait_for([self._end_of_rank], _SECONDS_TO_EXIT)
        with suppress(ProcessLookupError):
            if os.getppid() == self._parent:
                os.kill(self._parent, signal.SIGKILL)


def main() -> None:
    """Watches the process that has started this one."""
    Watcher(*accept_settings()).run()


_MOST_FRAMES = 8


def doing_text(status: RankStatus, order: str) -> str:
    """Returns where a rank is, as the end of a sentence: "in step 3 at 0B0.1 (action 7 of 12), waiting for ...".

    Args:
        status: on its board.
        order: the rank's place on the pipeline, a newline, and the text of its schedule; "" where none runs.
    """
    place = "before its first step" if status.step == 0 else f"in step {status.step}"
    if row := _row(order, status):
        place += f" at {row[status.action]} (action {status.action + 1} of {len(row)})"
    elif status.phase:
        place += f", {status.phase}"
    return f"{place}, waiting in {status.waits}" if status.waits else place


def wait_lines(status: RankStatus, order: str) -> list[str]:
    """Returns the actions missing for a rank's action, by the rules of order; none where it isn't at one."""
    if not status.waits or not (schedule := _parse(order, status)):
        return []
    rank, parsed = schedule
    first, *missing = report_wait(parsed, rank, parsed.actions[rank][status.action]).splitlines()
    return [f"in its pipeline, {first}", *missing]


def stack_lines(dump: str) -> list[str]:
    """Returns the innermost frames of the main thread in faulthandler's output."""
    threads = [thread for thread in dump.split("\n\n") if thread.strip()]
    current = next((thread for thread in reversed(threads) if thread.startswith("Current thread")), "")
    # A dump lists the first thread of a process last.
    main = threads[-1] if threads else ""
    frames = [line.strip() for line in (main or current).splitlines() if line.startswith("  File")]
    return [f"stack: {frame}" for frame in frames[:_MOST_FRAMES]]


def _row(order: str, status: RankStatus) -> list[str]:
    """Returns the texts of the rank's actions. Parsing the actions of all ranks at every report would slow their
    computing down."""
    rank, _, text = order.partition("\n")
    line = next((line for line in text.splitlines() if line.startswith(f"rank {rank}: ")), "")
    words = line.split()[2:]
    return words if 0 <= status.action < len(words) else []


def _parse(order: str, status: RankStatus) -> tuple[int, Schedule] | None:
    if status.action < 0 or not order:
        return None
    rank, _, text = order.partition("\n")
    try:
        schedule = Schedule.parse(text)
        return (int(rank), schedule) if status.action < len(schedule.actions[int(rank)]) else None
    # The order was being written meanwhile.
    except (ScheduleError, ValueError, IndexError):
        return None
