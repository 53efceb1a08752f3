"""The hub hears watchers, whatever else comes to its port, and says who is to blame; setting up is watched too."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from slipstream.watchdog.board import Board, anonymous_file
from slipstream.watchdog.judgement import Report, describe_fault, find_fault, stall_limit
from slipstream.watchdog.supervisor import Supervised, Supervisor, WatchSettings, open_hub
from slipstream.watchdog.watcher import Watcher
from slipstream.watchdog.wire import Line, wait_for, wait_for_an_end
from support.forked import launch
from support.parameters import first_of
from support.paths import WORKERS
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


def test_who_waits_for_a_rank_that_is_found_to_save_is_not_blamed(hub: RunningHub) -> None:
    """What the hub knows of it may be a second old: it asks before it blames."""
    waiting = hub.watcher(0, limit=0.2, is_counted=True, waits=True, silent=0.3)
    saving = hub.watcher(1, limit=0.2, is_counted=True)
    assert answer_on(saving, "blamed") == [0]
    saving.send({"is_counted": False, "may_be_long": True, "doing": "saving"})
    assert answer_on(waiting, "blamed") == [0]
    time.sleep(0.5)  # in which the hub judges again
    saving.send({"ending": "dead"})
    assert "rank 1 (here, process 2) has ended without a word" in str(answer_on(waiting, "verdict"))
    for each in (waiting, saving):
        each.connection.close()


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


def report(**values: object) -> Report:
    given = Report("node0", process=100, came=1000.0, is_counted=True, step=5, doing="in step 5")
    given.update(values, now=1000.0)
    return given


WAITS = {"silent": 9.0, "waits": True}
SAVES = {"silent": 90.0, "is_counted": False, "may_be_long": True}


@pytest.mark.parametrize(
    ("reports", "blamed", "words"),
    [
        ({0: report(**WAITS), 1: report(silent=9.0)}, {1}, "hangs"),
        ({0: report(**WAITS), 1: report(silent=9.0, computes=True)}, {1}, "is slow"),
        ({0: report(**WAITS), 1: report(silent=9.0, stopped=9.0)}, {1}, "stopped"),
        ({0: report(**WAITS), 1: report(silent=9.0, stopped=1.0, waits=True)}, {1}, "stopped"),
        ({0: report(**WAITS), 1: report(**WAITS)}, {0, 1}, "has waited"),
        ({0: report(**WAITS), 1: report(silent=0.1)}, {0}, "has waited"),
        ({0: report(**WAITS), 1: report(**WAITS), 2: report(ending="finished")}, {2}, "has ended well"),
        ({0: report(**WAITS), 1: report(silent=0.1), 2: report(ending="finished")}, {0}, "has waited"),
        ({0: report(**WAITS), 1: report(silent=9.0), 2: report(ending="finished")}, {1}, "hangs"),
        ({0: report(**WAITS), 1: report(ending="dead")}, {1}, "without a word"),
        ({0: report(**WAITS, is_counted=False), 1: report(ending="dead")}, {1}, "without a word"),
        ({0: report(), 1: report(ending="ValueError: x")}, {1}, "ValueError: x"),
        # a process that is stopped does nothing, whatever it was at
        ({0: report(is_counted=False, stopped=9.0), 1: report()}, {0}, "stopped"),
        # nobody has read, written or computed for ten times the limit
        ({0: report(**WAITS, idle=60.0), 1: report(**SAVES, idle=51.0)}, {1}, "10 times while ranks load or save"),
    ],
)
def test_who_is_blamed(reports: dict[int, Report], blamed: set[int], words: str) -> None:
    fault = find_fault(reports, limit=5.0, now=1000.0, since_pause=100.0)
    assert fault is not None
    assert set(fault.reasons) == blamed
    assert words in describe_fault(fault, reports, 5.0).splitlines()[0]


@pytest.mark.parametrize(
    "reports",
    [
        {0: report(silent=4.0, waits=True), 1: report(silent=4.0)},
        {0: report(**WAITS), 1: report(is_counted=False)},  # it exports, and the other waits for that
        {0: report(**WAITS, ending="finished"), 1: report()},
        {0: report(**WAITS, idle=60.0), 1: report(**SAVES, idle=49.0)},  # it reads or writes now and then
        {0: report(**WAITS, idle=60.0), 1: report(**SAVES, idle=60.0), 2: report(is_counted=False, idle=60.0)},
    ],
)
def test_nobody_is_blamed(reports: dict[int, Report]) -> None:
    assert find_fault(reports, limit=5.0, now=1000.0, since_pause=100.0) is None


def test_a_wait_for_a_phase_that_does_not_count_is_forgiven_when_it_ends() -> None:
    reports = {0: report(**WAITS), 1: report()}
    assert find_fault(reports, limit=5.0, now=1000.0, since_pause=1.0) is None
    assert find_fault(reports, limit=5.0, now=1000.0, since_pause=6.0) is not None


def test_a_machine_that_does_not_answer_is_named_after_the_limit_and_ten_seconds_at_least() -> None:
    reports = {0: report(), 1: report()}
    assert find_fault(reports, limit=5.0, now=1009.0, since_pause=100.0) is None
    reports[0].came = 1011.0
    fault = find_fault(reports, limit=5.0, now=1011.0, since_pause=100.0)
    assert fault is not None
    assert set(fault.reasons) == {1}


def test_who_waits_for_a_rank_that_is_not_heard_is_not_blamed() -> None:
    """As where a link is cut: the others fall silent with it, and it is lost some seconds later."""
    reports = {0: report(**WAITS), 1: report(silent=0.1), 2: report(**WAITS)}
    assert find_fault(reports, limit=5.0, now=1001.0, since_pause=100.0) is not None
    reports[0].came = reports[2].came = 1006.0
    assert find_fault(reports, limit=5.0, now=1006.0, since_pause=100.0) is None
    reports[0].came = reports[2].came = 1011.0
    fault = find_fault(reports, limit=5.0, now=1011.0, since_pause=100.0)
    assert fault is not None
    assert set(fault.reasons) == {1}
    assert "hasn't answered for 11 s" in describe_fault(fault, reports, 5.0)


def test_the_default_limit_grows_with_the_longest_wait_and_is_long_while_first_steps_compute() -> None:
    assert stall_limit(7.0, {0: report()}) == 7.0
    assert stall_limit(None, {0: report(step=1, idle=90.0), 1: report(step=1, idle=50.0)}) == 600
    assert stall_limit(None, {0: report(step=1, idle=90.0), 1: report(step=1, idle=61.0)}) == 60
    assert stall_limit(None, {0: report(longest=3.0)}) == 60
    assert stall_limit(None, {0: report(longest=3.0), 1: report(longest=30.0)}) == 150


@pytest.mark.parametrize("group", first_of(["first", "mesh", "later"]))
def test_killed_in_set_up(tmp_path: Path, group: str) -> None:
    ended = launch(2, WORKERS / "parallel/killed_in_set_up.py", tmp_path, group)
    deadline = time.monotonic() + LIMIT
    while not (tmp_path / "seconds").exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert float((tmp_path / "seconds").read_text()) < SOON  # less than any limit
    assert "rank 1 (" in ended.stderr
    assert "has ended without a word" in ended.stderr


def test_a_mesh_is_watched_for_deaths_until_the_pipeline_says_how_long_ranks_may_wait() -> None:
    ended = launch(2, WORKERS / "parallel/watched_mesh.py")
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines() == ["watched"] * 2
    assert "error" not in ended.stderr


def reports_of(silent: float, waits_for: float, **facts: Any) -> dict[int, Report]:
    """A rank that doesn't wait, and another one that waits for it."""
    who = {"came": 1000.0, "is_counted": True, "was_watched": True, "step": 3}
    return {0: Report("a", silent=silent, **who, **facts), 1: Report("b", silent=waits_for, waits=True, **who)}


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGHUP"])
def test_a_helper_that_is_just_starting_leaves_signals_to_its_supervisor(name: str, capfd: Any) -> None:
    """As Ctrl-C, or the launcher that ends a rank with all that it has started."""
    helper, _ = open_hub("127.0.0.1")
    helper.start()
    assert helper.process is not None
    os.kill(helper.process.pid, signal.Signals[name])
    deadline = time.monotonic() + SOON
    while not helper._has_spoken and helper.line is not None and time.monotonic() < deadline:
        wait_for([helper.line], 0.1)
        helper.look(0.0)
    try:
        assert helper._has_spoken
        assert helper.process.poll() is None
    finally:
        helper.close(kills=True)
    assert capfd.readouterr().err == ""


def test_who_waits_for_a_rank_that_computes_is_not_blamed() -> None:
    """It computes within the limit, which on a busy machine takes others any time."""
    judge = partial(find_fault, limit=5.0, now=1000.0, since_pause=100.0)
    assert judge(reports_of(1.0, 60.0, computes=True), since_computing=0.0) is None
    assert judge(reports_of(1.0, 60.0), since_computing=4.0) is None
    hanging = judge(reports_of(6.0, 60.0), since_computing=6.0)
    slow = judge(reports_of(6.0, 60.0, computes=True), since_computing=1.0)
    assert hanging is not None
    assert slow is not None
    assert "hangs: it has made no progress for 6 s, and doesn't compute" in hanging.reasons[0]
    assert "is slow: it has computed for 6 s without progress" in slow.reasons[0]
    waiting = judge(reports_of(0.0, 60.0), since_computing=6.0)
    assert waiting is not None
    assert waiting.reasons == {1: "has waited for 60 s"}


BUSY = "while True: pass"
AS_THREAD = "import threading, time; threading.Thread(target=lambda: exec('while True: pass')).start(); time.sleep(1e4)"
IDLE = "import time; time.sleep(1e4)"


@pytest.mark.skipif(sys.platform != "linux", reason="needs priorities of processes")
@pytest.mark.parametrize(("program", "gets"), [(BUSY, 0.0), (AS_THREAD, 0.0), (IDLE, 0.0), (BUSY, 1.0)])
def test_a_rank_that_finds_no_processor_has_not_been_silent(program: str, gets: float) -> None:
    """Beside a program that burns the one processor on which both may run."""
    one = {min(os.sched_getaffinity(0))}
    commands = [program, *([] if gets else [BUSY])]
    processes = [subprocess.Popen([sys.executable, "-c", command]) for command in commands]
    mine, theirs = socket.socketpair()
    try:
        for process in processes:
            os.sched_setaffinity(process.pid, one)
        settings = {"parent": processes[0].pid, "board": Board().descriptor, "limit": None, "address": "127.0.0.1"}
        settings |= {"port": 1, "is_reached": False, "order": anonymous_file("order")}
        time.sleep(1.0)  # in which Python starts
        if not gets:
            for task in os.listdir(f"/proc/{processes[0].pid}/task"):
                os.sched_setscheduler(int(task), os.SCHED_BATCH, os.sched_param(0))
                os.setpriority(os.PRIO_PROCESS, int(task), 19)
        watcher, before = Watcher(settings, Line(mine)), psutil.Process(processes[0].pid).cpu_times()
        for _ in range(5):
            time.sleep(1.0)
            watcher._look()
        facts, after = watcher._facts(), psutil.Process(processes[0].pid).cpu_times()
    finally:
        for process in processes:
            process.kill()
            process.wait()
        mine.close()
        theirs.close()
    assert facts["computes"] == (program != IDLE)
    used = after.user + after.system - before.user - before.system
    assert (facts["silent"] > 4.0) if program == IDLE else (abs(facts["silent"] - used) < 1.5)
