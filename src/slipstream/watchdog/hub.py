"""Collects the reports of all watchers, in a process of its own, and tells them where the run can't go on.

Each rank has two lines to it, its own and its watcher's. A rank that has ended said so on one of them, or its watcher
did; where both are closed without a word, the two were killed together.
"""

from __future__ import annotations

import hmac
import os
import resource
import socket
import time
from contextlib import suppress
from typing import Any

from slipstream.watchdog.judgement import Fault, Report, describe_fault, find_fault, stall_limit, state_of
from slipstream.watchdog.supervisor import LOOK_SECONDS, PAUSED_SECONDS, accept_settings
from slipstream.watchdog.wire import Line, wait_for

_ASKING_SECONDS = 0.25
_SECONDS_FOR_DETAILS = 0.8
_SECONDS_TO_SETTLE = 0.3  # time after a death to collect others that come at once
_SECONDS_TO_LEAVE = 2.0  # time for others to take the verdict
_SECONDS_TO_RETURN = 1.0  # time for a rank to come back after both its lines were closed, as by a restarted proxy
_SECONDS_TO_COME = 5.0  # time for the watcher of a rank that has ended, possibly just starting
_BREATH_SECONDS = 0.01  # pause between looks, which leaves the processor to others in a flood of messages
_MOST_STRANGERS = 256  # connections that haven't introduced themselves yet, as a watcher does at once
_SECONDS_TO_INTRODUCE = 10.0
_MOST_BYTES_OF_A_STRANGER = 2**13
_MOST_AT_ONCE = 64  # connections accepted per look


class Hub:
    """Listens at `listening` for watchers and ranks that know the token, until its supervisor and they have gone."""

    def __init__(self, listening: socket.socket, token: str, supervisor: Line, memory: dict[str, Any] | None) -> None:
        self._listening = listening
        self._token = token
        self._supervisor = supervisor
        self._parent = os.getppid()
        self._strangers: dict[Line, float] = {}  # stranger -> time of its arrival
        self._watchers: dict[int, Line] = {}
        self._ranks: dict[int, Line] = {}
        self._closed: dict[int, float] = {}  # ranks that closed their own line -> time at which both lines were closed
        memory = memory or {"ranks": {}, "verdict": None}  # the memory of the hub before this one
        now = time.monotonic()
        self._reports = {int(rank): Report(came=now, **report) for rank, report in memory["ranks"].items()}
        self._verdict: dict[str, Any] | None = memory["verdict"]
        self._verdict_at = 0.0
        self._remembered: Any = None
        self._num_ranks, self._limit, self._limit_setting = 0, None, ""  # as told by each rank
        self._paused_at = self._looked_at = now  # last time of a rank in a phase whose silence doesn't count
        self._computed_at = self._looked_at  # last time of a computing rank with a silence that isn't too long
        self._told_at = 0.0
        self._finished: list[int] = []  # finished ranks that the others know of
        listening.setblocking(False)

    def run(self) -> None:
        """Serves until nobody needs it any more."""
        while not self._has_ended():
            self._exchange(LOOK_SECONDS)
            fault, limit = self._judge()
            if fault is not None and self._verdict is None:
                self._tell(fault, limit)

    def _has_ended(self) -> bool:
        if self._supervisor.is_open and os.getppid() == self._parent:
            return False
        is_told = self._verdict_at and time.monotonic() - self._verdict_at > _SECONDS_TO_LEAVE
        return bool(is_told) or not (self._watchers or self._ranks)

    def _exchange(self, seconds: float) -> None:
        """Takes the messages of the next seconds, and says every second that this process is alive."""
        wait_for(
            [self._listening, self._supervisor, *self._strangers, *self._watchers.values(), *self._ranks.values()],
            seconds,
        )
        time.sleep(_BREATH_SECONDS)
        self._supervisor.receive()
        now = time.monotonic()
        with suppress(OSError):
            for _ in range(_MOST_AT_ONCE):
                self._strangers[Line(self._listening.accept()[0], _MOST_BYTES_OF_A_STRANGER)] = now
        for line in list(self._strangers):
            self._introduce(line)
        for line, came in list(self._strangers.items()):
            if now - came > _SECONDS_TO_INTRODUCE or len(self._strangers) > _MOST_STRANGERS:
                del self._strangers[line]
                line.close()
        for rank, line in list(self._ranks.items()):
            self._hear(rank, line)
            if not line.is_open:
                line.close()
                del self._ranks[rank]
                if line.end == "closed":
                    self._closed[rank] = now
        for rank, line in list(self._watchers.items()):
            line.flush()
            self._hear(rank, line)
            if not line.is_open:
                line.close()
                del self._watchers[rank]
                self._reports[rank].has_lost_watcher = line.end in ("closed", "reset")
                if rank in self._closed:
                    self._closed[rank] = now
        finished = sorted(rank for rank, report in self._reports.items() if report.ending == "finished")
        if now - self._told_at >= (LOOK_SECONDS if finished == self._finished else _ASKING_SECONDS):
            self._told_at = now
            self._finished = finished
            self._send({"limit": stall_limit(self._limit, self._reports), "finished": finished})
            self._remember()

    def _introduce(self, line: Line) -> None:
        """Lets a watcher or a rank in that says its rank and the token."""
        messages = line.receive()
        if not line.is_open or messages:
            del self._strangers[line]
        if not messages or not self._is_known(messages[0]):
            if not line.is_open or messages:
                line.close()
            return
        first = messages[0]
        rank = messages[0]["rank"]
        self._num_ranks, self._limit = first["num_ranks"], first.get("limit")
        self._limit_setting = str(first.get("limit_setting", ""))
        line.most_bytes = 2**20
        lines = self._watchers if first.get("is_watcher") else self._ranks
        # The earlier connection was lost without a word.
        if rank in lines:
            lines[rank].close()
        lines[rank] = line
        self._closed.pop(rank, None)
        report = self._reports.setdefault(rank, Report(str(first.get("host"))))
        if lines is self._watchers:
            report.was_watched, report.has_lost_watcher = True, False
        self._take(report, line, messages)
        # Another rank has ended before this one was watched.
        if self._verdict is not None:
            line.send(self._verdict)

    def _is_known(self, first: dict[str, Any]) -> bool:
        """Returns whether a first message has the token, and says who it is from in a way that makes sense."""
        # compare_digest refuses text that isn't ASCII, so the bytes are compared.
        token = str(first.get("token")).encode(errors="replace")
        is_token = hmac.compare_digest(token, self._token.encode())
        rank, num_ranks, limit = (first.get(name) for name in ("rank", "num_ranks", "limit"))
        if not is_token or type(rank) is not int or type(num_ranks) is not int:
            return False
        return 0 <= rank < num_ranks and (limit is None or isinstance(limit, int | float))

    def _hear(self, rank: int, line: Line) -> None:
        self._take(self._reports[rank], line, line.receive())

    def _take(self, report: Report, line: Line, messages: list[dict[str, Any]]) -> None:
        before = report.ending
        for message in messages:
            report.update(message, time.monotonic())
        if report.ending != before:
            self._remember()
        # A next hub would know of this end, too.
        if any("ending" in message for message in messages):
            line.send({"bye": True})

    def _remember(self) -> None:
        """Says that this process is alive, and hands on the state that its successor needs, where it has changed."""
        ranks = {rank: report.lasting() for rank, report in self._reports.items()}
        memory = {"ranks": ranks, "verdict": self._verdict}
        self._supervisor.send({} if memory == self._remembered else {"memory": memory})
        self._remembered = memory

    def _judge(self) -> tuple[Fault | None, float]:
        now = time.monotonic()
        # This process was stopped itself, so nobody's silence says anything.
        if (pause := now - self._looked_at) > PAUSED_SECONDS:
            for report in self._reports.values():
                report.came += pause
            self._closed = {rank: since + pause for rank, since in self._closed.items()}
            self._paused_at = now
        self._looked_at = now
        # Ctrl-Z has stopped the starter, and perhaps all ranks.
        if (starter := state_of(self._parent)) is not None and starter.is_stopped:
            for report in self._reports.values():
                report.came = now
        for rank, report in self._reports.items():
            report.has_own_line, report.has_watcher = rank in self._ranks, rank in self._watchers
            both_closed = rank in self._closed and not report.has_own_line and not report.has_watcher
            patience = _SECONDS_TO_RETURN if report.was_watched else _SECONDS_TO_COME
            if both_closed and not report.ending and now - self._closed[rank] > patience:
                report.ending = "gone" if report.was_watched else "dead"
        if any(not report.is_counted and not report.ending for report in self._reports.values()):
            self._paused_at = now
        if len(self._reports) < self._num_ranks and not any(report.ending for report in self._reports.values()):
            return None, 0.0
        limit = stall_limit(self._limit, self._reports)
        alive = [report for report in self._reports.values() if not report.ending]
        if any(report.computes and not report.waits and report.silent <= limit for report in alive):
            self._computed_at = now
        return find_fault(self._reports, limit, now, now - self._paused_at, now - self._computed_at), limit

    def _tell(self, fault: Fault, limit: float) -> None:
        """Asks all watchers where their ranks are now, and sends the verdict if the run still can't go on."""
        if fault.is_death:
            deadline = time.monotonic() + _SECONDS_TO_SETTLE
            while time.monotonic() < deadline:
                self._exchange(_SECONDS_TO_SETTLE)
        self._send({"ask": True, "blamed": list(fault.reasons)})
        asked = [rank for rank in self._watchers if not self._reports[rank].ending]
        for rank in asked:
            self._reports[rank].detail = ["?"]
        deadline = time.monotonic() + _SECONDS_FOR_DETAILS
        while time.monotonic() < deadline and any(self._reports[rank].detail == ["?"] for rank in asked):
            self._exchange(_ASKING_SECONDS)
        for report in self._reports.values():
            report.detail = [] if report.detail == ["?"] else report.detail
        # Meanwhile more may have died, and a rank that others wait for may have got on, or begun to load or save.
        if (found := self._judge()[0]) is None:
            return
        # of an error of its own the rank tells by itself, and others may be about to end well
        grace = 5.0 if found.is_failure else 1.5 if found.is_death else 0.5
        self._verdict = {"verdict": describe_fault(found, self._reports, limit, self._limit_setting), "grace": grace}
        self._send(self._verdict)
        self._verdict_at = time.monotonic() + grace
        self._remember()

    def _send(self, message: dict[str, Any]) -> None:
        for line in self._watchers.values():
            line.send(message)


def main() -> None:
    """Is the hub that this process's supervisor has started."""
    settings, line = accept_settings()
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # two lines of each rank, of a thousand perhaps
    listening = socket.socket(fileno=settings["listening"])
    Hub(listening, settings["token"], line, settings["memory"]).run()
