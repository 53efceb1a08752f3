"""Collects what all watchers report, in the watcher of rank 0, and tells them all where the run can't go on."""

from __future__ import annotations

import hmac
import socket
import threading
import time

from slipstream.watchdog.judgement import Fault, Report, describe_fault, find_fault, stall_limit
from slipstream.watchdog.wire import Line, wait_for

_LOOK_SECONDS = 1.0  # it looks as often as watchers report, too
_ASKING_SECONDS = 0.25
_SECONDS_FOR_DETAILS = 0.8
_SECONDS_TO_SETTLE = 0.3  # after a death: of several that come at once all are named
_SECONDS_TO_LEAVE = 2.0  # that others have to take the verdict, or to say good-bye
_PAUSED_SECONDS = 2.5  # a longer look was no look: this process was stopped itself, or found no processor


class Hub(threading.Thread):
    """Listens at `listening` for `num_ranks` watchers that know the token; `limit` is None for the default."""

    def __init__(self, listening: socket.socket, token: str, num_ranks: int, limit: float | None) -> None:
        super().__init__(name="hub of the watchers", daemon=True)
        self._listening, self._token, self._num_ranks, self._limit = listening, token, num_ranks, limit
        self._strangers: list[Line] = []  # that haven't said who they are
        self._lines: dict[int, Line] = {}
        self._reports: dict[int, Report] = {}
        self._paused_at = time.monotonic()  # when a rank was last in a phase whose silence doesn't count
        self._looked_at = time.monotonic()
        self._verdict: dict[str, object] | None = None
        self._verdict_at = 0.0
        self._leaves = False  # whether it may end before others, as rank 0 has ended well
        listening.setblocking(False)

    def run(self) -> None:
        while not self._has_ended():
            self._exchange(_LOOK_SECONDS)
            self._say_that_it_leaves()
            fault, limit = self._judge()
            if fault is not None and not self._verdict_at:
                self._tell(fault, limit)
        for each in (self._listening, *(line.connection for line in (*self._strangers, *self._lines.values()))):
            each.close()

    @property
    def has_watchers(self) -> bool:
        """Whether any watcher has come."""
        return bool(self._reports)

    def _has_ended(self) -> bool:
        """Returns whether nobody needs it any more."""
        is_over = bool(self._verdict_at) and time.monotonic() - self._verdict_at > _SECONDS_TO_LEAVE
        return is_over or (0 in self._reports and not self._lines)  # rank 0's watcher, in this process, always comes

    def _exchange(self, seconds: float) -> None:
        """Takes what watchers say within some seconds."""
        lines = [*self._strangers, *self._lines.values()]
        wait_for([self._listening, *(line.connection for line in lines)], seconds)
        try:
            while True:
                self._strangers.append(Line(self._listening.accept()[0]))
        except OSError:
            pass
        for line in list(self._strangers):
            self._introduce(line)
        now = time.monotonic()
        for rank, line in list(self._lines.items()):
            line.flush()
            for message in line.receive():
                self._reports[rank].update(message, now)
            if not line.is_open:  # without a rank's watcher nothing more is known of it
                line.connection.close()
                del self._lines[rank]
                report = self._reports[rank]
                report.ending = report.ending or ("finished" if report.is_watched else "dead")

    def _introduce(self, line: Line) -> None:
        """Lets a watcher in that says its rank and the token."""
        messages = line.receive()
        if messages or not line.is_open:
            self._strangers.remove(line)
        if not messages:
            return
        first, *others = messages
        rank = first.get("rank")
        if not hmac.compare_digest(str(first.get("token")), self._token) or not isinstance(rank, int):
            line.connection.close()
            return
        report = self._reports[rank] = Report(str(first.get("host")))
        self._lines[rank] = line
        for message in (first, *others):
            report.update(message, time.monotonic())
        if self._verdict is not None:  # another rank has ended before this one was watched
            line.send(self._verdict)

    def _say_that_it_leaves(self) -> None:
        """Tells all watchers that from now on the hub's end says nothing about rank 0."""
        if not self._leaves and 0 in self._reports and self._reports[0].ending == "finished":
            self._leaves = True
            self._send({"leaves": True})

    def _judge(self) -> tuple[Fault | None, float]:
        now = time.monotonic()
        if (pause := now - self._looked_at) > _PAUSED_SECONDS:  # nobody's silence says anything about it
            for report in self._reports.values():
                report.came += pause
            self._paused_at = now
        self._looked_at = now
        if any(not report.is_counted and not report.ending for report in self._reports.values()):
            self._paused_at = now
        if len(self._reports) < self._num_ranks and not any(each.ending for each in self._reports.values()):
            return None, 0.0
        limit = stall_limit(self._limit, self._reports)
        return find_fault(self._reports, limit, now, now - self._paused_at), limit

    def _tell(self, fault: Fault, limit: float) -> None:
        """Asks all watchers what their ranks wait for, and sends the verdict."""
        if fault.is_death:
            self._exchange(_SECONDS_TO_SETTLE)
        self._send({"ask": True, "blamed": list(fault.reasons)})
        for report in self._reports.values():
            report.detail = ["?"]
        deadline = time.monotonic() + _SECONDS_FOR_DETAILS
        while time.monotonic() < deadline and any(self._reports[rank].detail == ["?"] for rank in self._lines):
            self._exchange(_ASKING_SECONDS)
        for report in self._reports.values():
            report.detail = [] if report.detail == ["?"] else report.detail
        fault = self._judge()[0] or fault  # more may have died meanwhile
        # of an error of its own the rank tells by itself, and others may be about to end well
        grace = 5.0 if fault.is_failure else 1.5 if fault.is_death else 0.5
        self._verdict = {"verdict": describe_fault(fault, self._reports, limit), "grace": grace}
        self._send(self._verdict)
        self._verdict_at = time.monotonic() + grace

    def _send(self, message: dict[str, object]) -> None:
        for line in self._lines.values():
            line.send(message)
