"""The hub tells its verdict also to a watcher that comes after it, and sees a rank end that has none yet."""

from __future__ import annotations

import socket
from contextlib import closing

from slipstream.watchdog import open_hub
from slipstream.watchdog.hub import Hub
from slipstream.watchdog.wire import Line, wait_for
from support.timeouts import LIMIT


def watcher(port: int, rank: int, token: str, **facts: object) -> Line:
    line = Line(socket.create_connection(("127.0.0.1", port)))
    line.send({"rank": rank, "token": token, "host": "here", "process": rank + 1, **facts})
    return line


def verdict_on(line: Line) -> str:
    while line.is_open:
        wait_for([line.connection], LIMIT)
        for message in line.receive():
            if "ask" in message:
                line.send({"detail": []})
            if "verdict" in message:
                return str(message["verdict"])
    return "none"


def test_a_rank_that_fails_before_the_others_are_watched_ends_them_too() -> None:
    listening, settings = open_hub("127.0.0.1")
    hub = Hub(listening, settings.token, num_ranks=2, limit=None)
    hub.start()
    failed = watcher(settings.port, 1, settings.token, ending="ValueError: what went wrong")
    with closing(failed.connection):
        assert "rank 1 (here, process 2) has failed (ValueError: what went wrong)" in verdict_on(failed)
    late = watcher(settings.port, 0, settings.token)
    with closing(late.connection):
        assert "rank 1 (here, process 2) has failed (ValueError: what went wrong)" in verdict_on(late)
    hub.join(LIMIT)
    assert not hub.is_alive()


def test_a_rank_that_ends_before_its_watcher_has_started_is_named() -> None:
    listening, settings = open_hub("127.0.0.1")
    hub = Hub(listening, settings.token, num_ranks=2, limit=None)
    hub.start()
    watched = watcher(settings.port, 0, settings.token, is_watched=True)
    with closing(watched.connection):
        watcher(settings.port, 1, settings.token, doing="before it was watched").connection.close()
        assert "rank 1 (here, process 2) has ended without a word" in verdict_on(watched)
    hub.join(LIMIT)
    assert not hub.is_alive()
