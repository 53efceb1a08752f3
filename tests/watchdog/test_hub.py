"""The hub bears whatever is sent to it, tells its verdict also to a watcher that comes later, and loses nobody."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import closing, suppress

import psutil
import pytest

from slipstream.watchdog.supervisor import Supervised, Supervisor, WatchSettings, open_hub
from slipstream.watchdog.wire import Line, wait_for, wait_for_an_end
from support.parameters import first_of
from support.timeouts import LIMIT, SOON


class RunningHub:
    """A hub in a process of its own, and what watchers say to it."""

    def __init__(self) -> None:
        self.process: Supervised
        self.settings: WatchSettings
        self.process, self.settings = open_hub("127.0.0.1")
        self.supervisor = Supervisor([self.process])
        self.supervisor.start()

    def connect(self) -> socket.socket:
        return socket.create_connection((self.settings.address, self.settings.port))

    def hello(self, rank: int, **facts: object) -> dict[str, object]:
        who = {"rank": rank, "num_ranks": 2, "limit": None, "token": self.settings.token, "host": "here"}
        return who | {"process": rank + 1, **facts}

    def line(self, rank: int, **facts: object) -> Line:
        line = Line(self.connect())
        line.send(self.hello(rank, **facts))
        return line

    def watcher(self, rank: int, **facts: object) -> Line:
        return self.line(rank, is_watcher=True, **facts)

    def hears(self) -> bool:
        """Whether the hub answers somebody who says good-bye."""
        line = self.watcher(0, ending="finished")
        with closing(line.connection):
            return answer_on(line, "bye") is True

    def system_process(self) -> psutil.Process:
        assert self.process.process is not None
        return psutil.Process(self.process.process.pid)


@pytest.fixture
def hub() -> Iterator[RunningHub]:
    running = RunningHub()
    yield running
    running.supervisor.stop(kills=True)


def answer_on(line: Line, name: str) -> object:
    """What the hub says under a name."""
    deadline = time.monotonic() + SOON
    while line.is_open and time.monotonic() < deadline:
        wait_for([line], 1)
        for message in line.receive():
            if "ask" in message:
                line.send({"detail": []})
            if name in message:
                return message[name]
    return "none"


def test_a_rank_that_fails_before_the_others_are_watched_ends_them_too(hub: RunningHub) -> None:
    failed = hub.watcher(1, ending="ValueError: what went wrong")
    with closing(failed.connection):
        assert "rank 1 (here, process 2) has failed (ValueError: what went wrong)" in str(answer_on(failed, "verdict"))
    late = hub.watcher(0)
    with closing(late.connection):
        assert "rank 1 (here, process 2) has failed (ValueError: what went wrong)" in str(answer_on(late, "verdict"))


@pytest.mark.more
def test_a_rank_that_ends_before_its_watcher_has_started_is_named(hub: RunningHub) -> None:
    watched = hub.watcher(0)
    with closing(watched.connection):
        hub.line(1, doing="before it was watched").connection.close()
        assert "rank 1 (here, process 2) has ended without a word" in str(answer_on(watched, "verdict"))


@pytest.mark.parametrize("has_said_goodbye", [False, True])
def test_who_leaves_without_a_word_has_not_finished(hub: RunningHub, has_said_goodbye: bool) -> None:
    """A rank whose own line and whose watcher's line are closed was killed with it, unless one of them said more."""
    other, lines = hub.watcher(0, is_counted=True), [hub.line(1), hub.watcher(1, is_counted=True)]
    with closing(other.connection):
        if has_said_goodbye:
            lines[0].send({"ending": "finished"})
        for line in lines:
            line.connection.close()
        if has_said_goodbye:
            lines = [hub.line(0), other]
            other.send({"ending": "dead"})
        rank, words = (0, "") if has_said_goodbye else (1, ", and its watcher with it")
        expected = f"rank {rank} (here, process {rank + 1}) has ended without a word{words}: "
        assert expected in str(answer_on(other, "verdict"))
        for line in lines:
            line.connection.close()


BAD_LINES = {
    "not ASCII": '{"rank": 1, "num_ranks": 2, "token": "é"}'.encode(),
    "a surrogate": rb'{"rank": 1, "num_ranks": 2, "token": "\ud800"}',
    "nested": b"[" * 100_000,
    "nested objects": b'{"token":' * 100_000,
    "not UTF-8": b'{"token": "\xff\xfe"}',
    "a long number": b'{"rank": ' + b"1" * 100_000 + b"}",
    "no object": b"[1, 2]",
    "no rank": b'{"rank": true, "token": {}}',
    "nothing": b"",
    "zeros": bytes(10_000),
}


@pytest.mark.parametrize("what", first_of([*BAD_LINES]))
def test_a_bad_line_costs_its_own_connection(hub: RunningHub, what: str) -> None:
    assert hub.hears()
    process = hub.system_process()
    with hub.connect() as stranger:
        stranger.settimeout(SOON)
        with suppress(OSError):  # the hub may have closed it meanwhile
            stranger.sendall(BAD_LINES[what] + b"\n")
            assert stranger.recv(1) == b""
    assert hub.hears()
    assert hub.system_process() == process


def test_a_corrupt_line_of_a_watcher_blames_nobody(hub: RunningHub) -> None:
    watchers = [hub.watcher(rank, is_counted=True) for rank in (0, 1)]
    watchers[1].connection.sendall(b'{"silent": 0.1, "do\x00ing": }\n')
    assert answer_on(watchers[1], "verdict") == "none"
    assert not watchers[1].is_open
    again = hub.watcher(1, is_counted=True)
    watchers[0].send({"ending": "dead"})
    assert "rank 0 (here, process 1) has ended without a word" in str(answer_on(again, "verdict"))
    for each in (*watchers, again):
        each.connection.close()


def test_a_line_without_an_end_takes_no_memory(hub: RunningHub) -> None:
    assert hub.hears()
    process = hub.system_process()
    before = process.memory_info().rss
    with hub.connect() as stranger, suppress(OSError):
        stranger.settimeout(SOON)
        for _ in range(70):
            stranger.sendall(b"x" * 2**20)
    assert hub.hears()
    assert process.memory_info().rss - before < 16 * 2**20


def test_a_flood_of_connections_does_not_keep_a_watcher_out(hub: RunningHub) -> None:
    """Also where nobody of them says a word."""
    silent = [hub.connect() for _ in range(400)]
    assert hub.hears()
    for each in silent:
        each.close()
    assert hub.hears()


def mutated(line: bytes, dice: random.Random) -> bytes:
    """A line with some of its bytes changed, left out, doubled, or swapped for a part of another."""
    data = bytearray(line)
    for _ in range(dice.randint(1, 4)):
        at = dice.randrange(len(data) + 1)
        how = dice.randrange(4)
        if how == 0 and at < len(data):
            data[at] = dice.randrange(256)
        elif how == 1:
            del data[at : at + dice.randrange(20)]
        elif how == 2:
            data[at:at] = data[at : at + dice.randrange(40)] * dice.randint(1, 50)
        else:
            data[at:at] = dice.choice(
                [b"null", b"-1", b"1e999", b"NaN", b'"', b"{", b"[" * 3000, "é".encode(), b"\\ud800"]
            )
    return bytes(data)


def test_random_and_mutated_lines(hub: RunningHub) -> None:
    """Ten thousand; the hub answers after each hundred, and is the same process at the end."""
    assert hub.hears()
    process, dice = hub.system_process(), random.Random(0)
    for _ in range(100):
        connections = []
        for _ in range(100):
            hello = hub.hello(dice.randrange(3), is_watcher=dice.random() < 0.5, silent=0.5, doing="in step 3")
            valid = json.dumps(hello).encode()
            kind = dice.randrange(3)
            line = dice.randbytes(dice.randrange(3000)) if kind == 0 else mutated(valid, dice)
            connections.append(hub.connect())
            with suppress(OSError):
                # Half of what is mutated follows a good line, as what a watcher says.
                connections[-1].sendall((valid + b"\n" if kind == 2 else b"") + line + b"\n")
        assert hub.hears()
        for connection in connections:
            connection.close()
    assert hub.system_process() == process


@pytest.mark.parametrize("how", first_of([signal.SIGKILL, signal.SIGSTOP]))
def test_a_lost_hub_is_started_again_at_the_same_place(
    hub: RunningHub, how: signal.Signals, capfd: pytest.CaptureFixture[str]
) -> None:
    """It still knows who has said good-bye, and blames nobody of those who haven't come back yet."""
    watchers = [hub.watcher(0, is_counted=True), hub.watcher(1, is_counted=True, ending="finished")]
    assert answer_on(watchers[1], "bye") is True
    lost = hub.system_process()
    os.kill(lost.pid, how)
    assert answer_on(watchers[0], "verdict") == "none"
    assert not watchers[0].is_open
    again = hub.watcher(0, is_counted=True)
    assert answer_on(again, "limit") is not None
    assert hub.system_process().pid != lost.pid
    again.send({"ending": "dead"})
    other = hub.watcher(1, ending="finished")
    verdict = str(answer_on(other, "verdict"))
    assert verdict.startswith("rank 0 (here, process 1) has ended without a word")
    assert "rank 1" not in verdict
    words = "was ended by SIGKILL" if how is signal.SIGKILL else "was silent for"
    assert f"the watchers' hub (process {lost.pid}) {words}" in capfd.readouterr().err
    for each in (*watchers, again, other):
        each.connection.close()


def test_the_end_of_a_process_is_waited_for() -> None:
    """Of a child that isn't collected yet, and of another descriptor meanwhile."""
    with subprocess.Popen(["sleep", "1000"]) as process:
        reading, writing = os.pipe()
        os.write(writing, b"!")
        wait_for_an_end([process.pid], LIMIT, reading)
        process.kill()
        began = time.monotonic()
        wait_for_an_end([process.pid], LIMIT)
        assert time.monotonic() - began < SOON
    wait_for_an_end([process.pid], LIMIT)  # it has gone
    assert time.monotonic() - began < SOON
    for each in (reading, writing):
        os.close(each)
