"""Ranks of a program of its own are watched: a killed one and a stopped one are named, and nobody is left."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from slipstream.errors import RankFailedError
from slipstream.schedule import add_communication, one_f_one_b
from slipstream.watchdog import Board
from slipstream.watchdog.watcher import doing_text, wait_lines
from support.parameters import first_of
from support.paths import ROOT, with_path
from support.timeouts import LIMIT, SOON

# Two ranks without torch: rank 0 publishes where to meet; each says where it is and waits for what the test does to it.
RANK = """
import ctypes, json, pathlib, sys, time
from slipstream import watchdog
from slipstream.schedule import add_communication, one_f_one_b

rank, folder, how, limit = int(sys.argv[1]), pathlib.Path(sys.argv[2]), sys.argv[3], float(sys.argv[4])
meet, hub = folder / "meet", None
if rank == 0:
    hub, settings = watchdog.open_hub("127.0.0.1")
    (folder / "part").write_text(json.dumps(vars(settings)))
    (folder / "part").replace(meet)
while not meet.exists():
    time.sleep(0.01)
if rank == 1 and how == "by proxy":
    meet = folder / "proxy"
    while not meet.exists():
        time.sleep(0.01)
settings = watchdog.WatchSettings(**json.loads(meet.read_text()))
watchdog.start_watch(settings, rank, 2, limit, hub)
schedule = add_communication(one_f_one_b(2, 1, 2))
watchdog.note_order(rank, schedule)
mine = watchdog.board()
mine.set_step(3)

def is_ready():
    (folder / f"ready{rank}").touch()

def hang():
    is_ready()  # only now: the test may end or stop it at once
    while how in ("breathes", "by proxy"):
        time.sleep(0.05)
        if how == "by proxy" and not (folder / "cut").exists():  # until then it gets on
            mine.set_action(3) if rank == 1 else mine.set_wait(b"a message")
    while True:  # a signal ends a sleep
        ctypes.PyDLL(None).sleep(1000)  # holds the interpreter

mine.set_action([6, 3][rank])
if rank == 1 and how == "fails":
    is_ready()
    raise ValueError("what went wrong")
if how == "leaves":
    is_ready()
    while not (folder / f"leave{rank}").exists():
        time.sleep(0.01)
    sys.exit()
if rank == 1 and how == "saves":
    mine.set_action(-1)
    with watchdog.watchdog_paused("saving", uses_disk=True):
        hang()
if rank == 1:
    hang()
with watchdog.waiting(b"a message"):
    hang()
"""


@contextmanager
def two_ranks(folder: Path, how: str, limit: float) -> Iterator[list[subprocess.Popen[str]]]:
    (folder / "rank.py").write_text(RANK)
    ranks = [
        subprocess.Popen(
            [sys.executable, str(folder / "rank.py"), str(rank), str(folder), how, str(limit)],
            stderr=subprocess.PIPE,
            text=True,
            env=with_path(ROOT / "src"),
        )
        for rank in (0, 1)
    ]
    try:
        deadline = time.monotonic() + LIMIT
        while not all((folder / f"ready{rank}").exists() for rank in (0, 1)):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        watchers = [child for rank in ranks for child in psutil.Process(rank.pid).children()]
        yield ranks
        watchers += [child for rank in ranks if rank.poll() is None for child in psutil.Process(rank.pid).children()]
        assert not psutil.wait_procs(watchers, timeout=SOON)[1], "a watcher is left"
    finally:
        for rank in ranks:
            with suppress(ProcessLookupError):
                rank.kill()
            rank.communicate()


def helper(rank: subprocess.Popen[str], name: str) -> psutil.Process | None:
    """The rank's watcher, or the hub that it has started, while it runs."""
    for child in psutil.Process(rank.pid).children():
        with suppress(psutil.Error):
            if child.status() != psutil.STATUS_ZOMBIE and child.cmdline()[-1:] == [f"slipstream.watchdog.{name}"]:
                return child
    return None


def test_a_killed_rank_ends_the_other_which_says_what_it_waited_for(tmp_path: Path) -> None:
    with two_ranks(tmp_path, "waits", limit=500) as (survivor, victim):
        victim.kill()
        _, said = survivor.communicate(timeout=SOON)  # less than the limit
    first, *others = said.splitlines()
    assert re.match(rf"error: rank 1 \(.*, process {victim.pid}\) has ended without a word", first)
    assert "in step 3 at 1B0.1 (action 4 of 6)" in first or "in step 3 at 1" in first
    assert "waiting: in step 3 at 0B0.1 (action 7 of 8), waiting in a message" in others[0]
    assert "rank 0 waits at 0B0.1 (action 7 of 8) for 1SEND_B0.1 of rank 1." in said
    assert "missing on rank 1" in said
    assert survivor.returncode == -signal.SIGKILL  # its interpreter is held


def test_a_rank_that_waits_for_a_killed_one_exits_with_the_code_of_a_lost_rank(tmp_path: Path) -> None:
    """Without a launcher of ours, which would say it: whoever has started it sees no other signal."""
    with two_ranks(tmp_path, "breathes", limit=500) as (survivor, victim):
        victim.kill()
        _, said = survivor.communicate(timeout=SOON)
    assert re.match(rf"error: rank 1 \(.*, process {victim.pid}\) has ended without a word", said)
    assert survivor.returncode == RankFailedError.exit_code == 1


@pytest.mark.parametrize("is_stopped", first_of([False, True]))
def test_a_rank_that_does_not_get_on_is_named_after_the_limit(tmp_path: Path, is_stopped: bool) -> None:
    with two_ranks(tmp_path, "waits", limit=2) as ranks:
        if is_stopped:
            ranks[1].send_signal(signal.SIGSTOP)
        said = [rank.communicate(timeout=SOON)[1] for rank in ranks]
    assert said[0] == said[1]  # the last lines of every rank
    assert (
        "(the limit of a wait is 2 s: Runtime.stall_limit, or the environment's SLIPSTREAM_STALL_LIMIT)"
        in said[0].splitlines()[0]
    )
    if is_stopped:
        assert "rank 1" in said[0].splitlines()[0]
        assert "has been stopped (as by SIGSTOP)" in said[0]
        assert "stack" not in said[0]
    else:
        assert "hangs: it has made no progress for" in said[0].splitlines()[0]
        assert re.search(r'stack: File ".*rank.py", line \d+ in hang', said[0])
    assert "rank 0 waits at 0B0.1" in said[0]


@pytest.mark.more
@pytest.mark.parametrize("is_stopped", [True, False])
def test_a_rank_that_does_not_get_on_in_a_save_is_named(tmp_path: Path, is_stopped: bool) -> None:
    """A stopped one after the limit, and one that hangs after ten times the limit, as the disk may be slow."""
    began = time.monotonic()  # before the silence
    with two_ranks(tmp_path, "saves", limit=1) as ranks:
        if is_stopped:
            ranks[1].send_signal(signal.SIGSTOP)
        said = [rank.communicate(timeout=SOON)[1] for rank in ranks]
        seconds = time.monotonic() - began
    assert said[0] == said[1]
    first = said[0].splitlines()[0]
    assert re.match(rf"error: rank 1 \(.*, process {ranks[1].pid}\) ", first)
    assert "saving" in first
    if is_stopped:
        assert "has been stopped (as by SIGSTOP)" in first
    else:
        assert "hangs: it has made no progress for" in first
        assert "(the limit of a wait is 1 s, 10 times while ranks load or save: Runtime.stall_limit, or" in first
        assert seconds > 9


@pytest.mark.more
def test_a_rank_that_fails_is_named_by_its_error(tmp_path: Path) -> None:
    with two_ranks(tmp_path, "fails", limit=500) as (survivor, failing):
        assert "ValueError: what went wrong" in failing.communicate(timeout=SOON)[1]
        _, said = survivor.communicate(timeout=SOON)
    assert "has failed (ValueError: what went wrong)" in said.splitlines()[0]


def test_a_rank_whose_hub_is_lost_ends(tmp_path: Path) -> None:
    """As where the machine of rank 0 is gone; after `leaves`, rank 0 may end with its watcher before others."""
    with two_ranks(tmp_path, "waits", limit=500) as (first, other):
        for each in (helper(first, "hub"), helper(first, "watcher"), first):
            assert each is not None
            each.send_signal(signal.SIGSTOP)  # so that none of them starts another again
        for each in psutil.Process(first.pid).children():
            each.kill()
        first.kill()
        _, said = other.communicate(timeout=SOON)
    assert said.startswith("error: rank 0 has ended without a word, and the hub of the watchers with it")


@pytest.mark.more
def test_a_rank_that_is_killed_with_its_watcher_is_named(tmp_path: Path) -> None:
    """As by a control group out of memory: it hasn't finished, as it hasn't said good-bye."""
    with two_ranks(tmp_path, "waits", limit=500) as (survivor, victim):
        watcher = helper(victim, "watcher")
        assert watcher is not None
        for each in (victim, watcher):
            each.send_signal(signal.SIGSTOP)
        watcher.kill()
        victim.kill()
        _, said = survivor.communicate(timeout=SOON)
    assert re.match(rf"error: rank 1 \(.*, process {victim.pid}\) has ended without a word", said)


LOSSES = [
    ("hub", 0, "KILL"),
    ("hub", 0, "STOP"),
    ("watcher", 0, "KILL"),
    ("watcher", 1, "STOP"),
    ("watcher", 1, "KILL"),
]


@pytest.mark.parametrize(("name", "rank", "how"), first_of(LOSSES[:2]) + first_of(LOSSES[2:], 0, "grid"))
def test_a_lost_helper_is_named_and_started_again(tmp_path: Path, name: str, rank: int, how: str) -> None:
    """Nobody is blamed for it, and who is killed later is named."""
    with two_ranks(tmp_path, "breathes", limit=500) as ranks:
        lost = helper(ranks[rank], name)
        assert lost is not None
        lost.send_signal(getattr(signal, f"SIG{how}"))
        deadline = time.monotonic() + SOON
        while (found := helper(ranks[rank], name)) is None or found.pid == lost.pid:
            assert time.monotonic() < deadline, "it isn't started again"
            time.sleep(0.02)
        assert [each.poll() for each in ranks] == [None, None]
        ranks[1].kill()
        said = [each.communicate(timeout=SOON)[1] for each in ranks]
    who = "the watchers' hub" if name == "hub" else f"the watcher of rank {rank}"
    words = "was ended by SIGKILL" if how == "KILL" else r"was silent for \d+ s, as a stopped one is"
    assert re.search(rf"{who} \(process {lost.pid}\) {words}; it is started again, and the run goes on", said[rank])
    error = said[0][said[0].index("error: ") :]
    assert re.match(rf"error: rank 1 \(.*, process {ranks[1].pid}\) has ended without a word", error)


class Proxy(threading.Thread):
    """Passes on what rank 1 and its watcher exchange with the hub: late, with stalls, corrupted, or not at all."""

    def __init__(self, folder: Path, hides_watcher: bool) -> None:
        super().__init__(daemon=True)
        self.dice, self.delay, self.is_cut, self.corrupts = random.Random(0), 0.0, False, False
        self.hides_watcher, self.has_watcher = hides_watcher, threading.Event()  # once its first words have come here
        self.num_corrupted = 0
        self._settings = json.loads((folder / "meet").read_text())
        self._listening = socket.create_server(("127.0.0.1", 0))
        self._sockets = [self._listening]
        self.port = self._listening.getsockname()[1]
        (folder / "part").write_text(json.dumps(self._settings | {"port": self.port}))
        (folder / "part").replace(folder / "proxy")

    def run(self) -> None:
        with suppress(OSError):
            while True:
                near = self._listening.accept()[0]
                far = socket.create_connection(("127.0.0.1", self._settings["port"]))
                self._sockets += [near, far]
                for source, target in ((near, far), (far, near)):
                    threading.Thread(target=self._pass_on, args=(source, target), daemon=True).start()

    def close(self) -> None:
        """Ends all connections."""
        for each in self._sockets:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def _pass_on(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                if b'"is_watcher": true' in data:
                    self.is_cut |= self.hides_watcher
                    self.has_watcher.set()
                while self.is_cut:
                    time.sleep(0.05)
                time.sleep(self.delay * (self.dice.uniform(1, 10) if self.dice.random() < 0.01 else 1))
                if self.corrupts and self.dice.random() < 0.5:
                    data = data[:-2] + b'"' + data[-1:]
                    self.num_corrupted += 1
                target.sendall(data)
        for each in (source, target):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)


@contextmanager
def ranks_by_proxy(
    folder: Path, limit: float, hides_watcher: bool = False
) -> Iterator[tuple[list[subprocess.Popen[str]], Proxy]]:
    """Two ranks, of which rank 1 reaches the hub through a proxy, which is cut where it `hides_watcher`."""
    made: list[Proxy] = []

    def make() -> None:
        while not (folder / "meet").exists():
            time.sleep(0.01)
        made.append(Proxy(folder, hides_watcher))
        made[0].start()

    maker = threading.Thread(target=make, daemon=True)
    maker.start()
    with two_ranks(folder, "by proxy", limit) as ranks:
        maker.join()
        try:
            yield ranks, made[0]
        finally:
            made[0].close()


@pytest.mark.parametrize("what", first_of(["corrupt lines", "delays"]))
def test_a_bad_network_blames_nobody(tmp_path: Path, what: str) -> None:
    """A corrupt line costs its connection, which is made again; a delay of 200 ms and stalls of 2 s cost nothing."""
    with ranks_by_proxy(tmp_path, limit=500) as (ranks, proxy):
        proxy.corrupts, proxy.delay = what == "corrupt lines", 0.2 if what == "delays" else 0.0
        began = time.monotonic()
        while proxy.num_corrupted < 3 if proxy.corrupts else time.monotonic() - began < 5:
            assert [each.poll() for each in ranks] == [None, None]
            time.sleep(0.1)
        proxy.corrupts = False
        ranks[1].kill()
        _, said = ranks[0].communicate(timeout=SOON)
    assert re.match(rf"error: rank 1 \(.*, process {ranks[1].pid}\) has ended without a word", said)


@pytest.mark.more
@pytest.mark.parametrize("hides_watcher", [False, True])
def test_both_sides_of_a_cut_end_and_say_what_they_know(tmp_path: Path, hides_watcher: bool) -> None:
    """Five seconds after the limit; the side without the hub doesn't blame itself. The hub knows the watcher of rank 1,
    or that rank alone."""
    with ranks_by_proxy(tmp_path, limit=3, hides_watcher=hides_watcher) as (ranks, proxy):
        assert proxy.has_watcher.wait(LIMIT)
        proxy.is_cut = True
        (tmp_path / "cut").touch()
        said = [each.communicate(timeout=SOON)[1] for each in ranks]
        proxy.is_cut = False
    here, there = (rf"rank {n} \(.*, process {ranks[n].pid}\)" for n in (0, 1))
    blamed, *others = said[0].splitlines()
    assert re.match(rf"error: {there} hasn't answered for \d+ s: its machine is gone, or the network between", blamed)
    assert "as if stopped" not in said[0]
    assert re.match(rf"  {here}, waiting: in step 3 at 0B0.1", others[0])  # which isn't blamed
    blamed, *others = said[1].splitlines()
    place = rf"127.0.0.1, port {proxy.port}"
    assert re.match(
        rf"error: the watchers' hub, which rank 0 has started at {place}, hasn't answered for \d+ s", blamed
    )
    assert "its machine is gone, or the network between it and" in blamed
    assert re.match(rf"  {there}, not waiting: in step 3 at 1F0.1", others[0])
    assert len(others) == 1  # its own place, and no word of it or of rank 0 being to blame
    for each in said:
        assert not re.search(r"rank \d \(.*\) (has |hangs|is slow|hasn't been watched)", each)


@pytest.mark.more
def test_a_signal_for_a_stack_ends_no_rank_whose_handler_has_gone(tmp_path: Path) -> None:
    """As Python takes it away at its end."""
    program = """
import faulthandler, os, signal, sys
from slipstream import watchdog
hub, settings = watchdog.open_hub("127.0.0.1")
watchdog.start_watch(settings, 0, 2, 500.0, hub)
faulthandler.unregister(signal.SIGUSR2)
os.kill(os.getpid(), signal.SIGUSR2)
watchdog.end_watch()
print("alive")
"""
    ended = subprocess.run(
        [sys.executable, "-c", program], env=with_path(ROOT / "src"), capture_output=True, text=True, timeout=SOON
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "alive\n", "")


@pytest.mark.parametrize("is_stopped", first_of([False, True]))
def test_a_rank_that_ends_well_blames_nobody(tmp_path: Path, is_stopped: bool) -> None:
    with two_ranks(tmp_path, "leaves", limit=500) as ranks:
        for rank in (1, 0):
            if is_stopped and (hub := helper(ranks[0], "hub")) is not None:
                hub.suspend()  # who leaves says good-bye to the next one, or once this one goes on as rank 0 has ended
            (tmp_path / f"leave{rank}").touch()
            said = ranks[rank].communicate(timeout=SOON)[1].splitlines()
            assert [line for line in said if not (is_stopped and line.startswith("the watchers' hub"))] == []
        assert [rank.returncode for rank in ranks] == [0, 0]


def test_a_board_says_where_its_rank_is() -> None:
    schedule = add_communication(one_f_one_b(2, 1, 2))
    mine = Board()
    theirs = Board(os.dup(mine.descriptor))
    before = theirs.look().counter
    mine.set_step(2)
    mine.set_action(6)
    mine.set_wait(b"a message" + b"!" * 500)
    status = theirs.look()
    assert status.counter > before
    assert (status.step, status.action, len(status.waits)) == (2, 6, 159)
    order = f"0\n{schedule}"
    assert doing_text(status, order).startswith("in step 2 at 0B0.1 (action 7 of 8), waiting in a message!")
    assert wait_lines(status, order)[0] == (
        "in its pipeline, rank 0 waits at 0B0.1 (action 7 of 8) for 1SEND_B0.1 of rank 1."
    )
    assert wait_lines(status, order[:40]) == []  # while another schedule is being written
