"""Ranks of a program of its own are watched: a killed one and a stopped one are named, and nobody is left."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from slipstream.schedule import add_communication, one_f_one_b
from slipstream.watchdog import Board
from slipstream.watchdog.sight_text import doing_text, wait_lines
from support.parameters import first_of
from support.paths import ROOT, with_path
from support.timeouts import LIMIT, SOON

# Two ranks without torch: rank 0 publishes where to meet; each says where it is and waits for what the test does to it.
RANK = """
import ctypes, json, pathlib, sys, time
from slipstream import watchdog
from slipstream.schedule import add_communication, one_f_one_b

rank, folder, how, limit = int(sys.argv[1]), pathlib.Path(sys.argv[2]), sys.argv[3], float(sys.argv[4])
meet, listening = folder / "meet", None
if rank == 0:
    listening, settings = watchdog.open_hub("127.0.0.1")
    (folder / "part").write_text(json.dumps(vars(settings)))
    (folder / "part").replace(meet)
while not meet.exists():
    time.sleep(0.01)
settings = watchdog.WatchSettings(**json.loads(meet.read_text()))
watchdog.start_watch(settings, rank, 2, limit, listening)
schedule = add_communication(one_f_one_b(2, 1, 2))
watchdog.note_order(rank, schedule)
mine = watchdog.board()
mine.set_step(3)

def is_ready():
    (folder / f"ready{rank}").touch()

def hang():
    is_ready()  # only now: the test may end or stop it at once
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
    with watchdog.counted_off("saving", uses_disk=True):
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
        assert not psutil.wait_procs(watchers, timeout=SOON)[1], "a watcher is left"
    finally:
        for rank in ranks:
            with suppress(ProcessLookupError):
                rank.kill()
            rank.communicate()


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
    assert survivor.returncode == -signal.SIGKILL


@pytest.mark.parametrize("is_stopped", first_of([False, True]))
def test_a_rank_that_does_not_get_on_is_named_after_the_limit(tmp_path: Path, is_stopped: bool) -> None:
    with two_ranks(tmp_path, "waits", limit=2) as ranks:
        if is_stopped:
            ranks[1].send_signal(signal.SIGSTOP)
        said = [rank.communicate(timeout=SOON)[1] for rank in ranks]
    assert said[0] == said[1]  # the last lines of every rank
    assert "(the limit of a wait is 2 s: training.stall_limit)" in said[0].splitlines()[0]
    if is_stopped:
        assert "rank 1" in said[0].splitlines()[0]
        assert "has been stopped (as by SIGSTOP)" in said[0]
        assert "stack" not in said[0]
    else:
        assert "hangs: it hasn't got on for" in said[0].splitlines()[0]
        assert re.search(r'stack: File ".*rank.py", line \d+ in hang', said[0])
    assert "rank 0 waits at 0B0.1" in said[0]


@pytest.mark.parametrize("is_stopped", first_of([True, False]))
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
        assert "hangs: it hasn't got on for" in first
        assert "(the limit of a wait is 1 s, 10 times while ranks load or save: training.stall_limit)" in first
        assert seconds > 9


def test_a_rank_that_fails_is_named_by_its_error(tmp_path: Path) -> None:
    with two_ranks(tmp_path, "fails", limit=500) as (survivor, failing):
        assert "ValueError: what went wrong" in failing.communicate(timeout=SOON)[1]
        _, said = survivor.communicate(timeout=SOON)
    assert "has failed (ValueError: what went wrong)" in said.splitlines()[0]


def test_a_rank_whose_hub_is_lost_ends(tmp_path: Path) -> None:
    """As where the machine of rank 0 is gone; after `leaves`, rank 0 may end with its watcher before others."""
    with two_ranks(tmp_path, "waits", limit=500) as (first, other):
        (watcher,) = psutil.Process(first.pid).children()
        watcher.kill()
        first.kill()
        _, said = other.communicate(timeout=SOON)
    assert said.startswith("error: rank 0 has ended without a word, and its watcher with it")


def test_a_rank_that_ends_well_blames_nobody(tmp_path: Path) -> None:
    with two_ranks(tmp_path, "leaves", limit=500) as ranks:
        for rank in (1, 0):  # the hub, which ends with rank 0, is there until the other has said good-bye
            (tmp_path / f"leave{rank}").touch()
            assert ranks[rank].communicate(timeout=SOON)[1] == ""
        assert [rank.returncode for rank in ranks] == [0, 0]


def test_a_board_says_where_its_rank_is() -> None:
    schedule = add_communication(one_f_one_b(2, 1, 2))
    mine = Board()
    theirs = Board(os.dup(mine.descriptor))
    before = theirs.look().counter
    mine.set_step(2)
    mine.set_action(6)
    mine.set_wait(b"a message" + b"!" * 500)
    sight = theirs.look()
    assert sight.counter > before
    assert (sight.step, sight.action, len(sight.waits)) == (2, 6, 159)
    order = f"0\n{schedule}"
    assert doing_text(sight, order).startswith("in step 2 at 0B0.1 (action 7 of 8), waiting in a message!")
    assert wait_lines(sight, order)[0] == (
        "in its pipeline, rank 0 waits at 0B0.1 (action 7 of 8) for 1SEND_B0.1 of rank 1."
    )
    assert wait_lines(sight, order[:40]) == []  # while another schedule is being written
