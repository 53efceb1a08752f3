"""A run survives faults of its processes, its disk and its network, and ends with the weights of an undisturbed one."""

from __future__ import annotations

import json
import random
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from benchmarks.harness import TRIAL
from benchmarks.hosts import Hosts, NoHostsError
from benchmarks.soak.faults import KINDS, Fault, is_named
from benchmarks.soak.page import BEGIN, END, PAGE, records, text_of

from support.paths import ROOT, with_path
from support.timeouts import LIMIT, SOON

HOSTS = ["node0", "node0", "node1", "node2"]
GONE = "rank 2 (node1, process 7) has ended without a word: it was killed, or crashed; in step 3"
CUT = "error: the watchers' hub, which rank 0 has started at 10.77.0.1, port 5, hasn't answered for 10 s: its machine"
UNHEARD = "rank 2 (node1, process 7) hasn't answered for 11 s: its machine is gone, or the network between; in step 3"
OTHERS = "\n  rank 0 (node0, process 1), waiting: in step 3\n"
SAID = {
    "kill": f"error: {GONE}{OTHERS}",
    "damaged checkpoint": f"{GONE}{OTHERS}restart 1 of 9",
    "stop": "error: rank 2 (node1, process 7) has been stopped (as by SIGSTOP) for 5 s; in step 3",
    "rank and watcher killed": "error: rank 2 (node1, process 7) has ended without a word, and its watcher with it: x",
    "watcher killed": "the watcher of rank 2 (process 7) was ended by SIGKILL; it is started again",
    "watcher stopped": "the watcher of rank 2 (process 7) was silent for 4 s, as a stopped one is",
    "hub killed": "the watchers' hub (process 7) was ended by SIGKILL; it is started again",
    "hub stopped": "the watchers' hub (process 7) was silent for 4 s, as a stopped one is",
    "link cut": f"error: {UNHEARD}{OTHERS}{CUT}",
    "machine gone": f"error: {UNHEARD}{OTHERS}",
    "TERM": "SIGTERM ended the run",
    "gone for good": f"{GONE}{OTHERS}rank 2 was ended by SIGKILL; the other ranks were stopped\nrestart in 1 s, from "
    "the last good checkpoint, with 2 of 4 processes as --pp=2 --dp=1 --tp=1; process 3 is without work; process 2 is "
    "lost: once that is over, type rm lost/2",
}
WRONG = {"another rank": SAID["kill"].replace("rank 2", "rank 1"), "another host": SAID["kill"].replace("node1", "vm")}
WRONG |= {
    "another process": SAID["kill"].replace("7", "8"),
    "one too many": SAID["kill"] + "\nrank 3 (node2, process 9) ",
}
WRONG |= {"a helper, too": SAID["kill"] + SAID["hub killed"], "nothing": ""}


def fault(kind: str, rank: int = 2) -> Fault:
    return Fault(kind, step=3, rank=rank, host=HOSTS[rank], process=7)


@pytest.mark.parametrize("kind", KINDS)
def test_a_fault_is_named_by_who_where_and_what(kind: str) -> None:
    said = SAID.get(kind, "step 3/9: loss 5.1\n")
    assert is_named(fault(kind), said, HOSTS)
    for other, text in SAID.items():
        same = {kind, other} <= {
            "kill",
            "damaged checkpoint",
            "gone for good",
            "rank and watcher killed",
        } and kind != "rank and watcher killed"
        if other not in (kind, "TERM") and not same:
            assert not is_named(fault(kind), text, HOSTS), other


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_name_is_seen(what: str) -> None:
    assert not is_named(fault("kill"), WRONG[what], HOSTS)


def test_a_cut_at_the_hub_is_named_by_both_sides() -> None:
    others = UNHEARD + "\n" + UNHEARD.replace("rank 2 (node1, process 7)", "rank 3 (node2, process 8)")
    assert is_named(fault("link cut", rank=0), f"error: {others}\n{CUT}", HOSTS)
    assert not is_named(fault("link cut", rank=0), f"error: {UNHEARD}\n{CUT}", HOSTS)
    assert not is_named(fault("link cut", rank=0), f"error: {others}", HOSTS)
    assert is_named(fault("machine gone", rank=0), CUT, HOSTS)


def test_the_page_is_made_from_the_record() -> None:
    said = PAGE.read_text().partition(BEGIN)[2].partition(END)[0]
    assert said == f"\n{text_of(*records())}\n\n", "out of date: python -m benchmarks.soak.page"


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    try:
        made = Hosts(2, random.Random(0))
    except NoHostsError as error:
        pytest.skip(f"no hosts can be made on this machine: {error}")
    yield made
    made.close()


@pytest.mark.more
@pytest.mark.skipif(sys.platform != "linux", reason="hosts are network namespaces")
def test_a_switch_delays_holds_up_corrupts_and_cuts(hosts: Hosts) -> None:
    switch = hosts.switch
    assert switch is not None
    listening = hosts.inside(0, lambda: socket.create_server((hosts.addresses[0], 0)))
    port = listening.getsockname()[1]
    near = hosts.inside(1, lambda: socket.create_connection((hosts.addresses[0], port), SOON))
    far = listening.accept()[0]
    line = b'{"silent": 1}\n'
    with closing(listening), closing(near), closing(far):
        far.settimeout(SOON)

        def passed() -> bytes:
            near.sendall(line)
            data = b""
            while len(data) < len(line):
                data += far.recv(65536)
            return data

        assert passed() == line
        switch.delay = 0.2
        began = time.monotonic()
        assert passed() == line
        assert time.monotonic() - began > 0.19
        switch.delay, switch.stalls = 0.0, 1.0
        assert passed() == line
        assert switch.num_stalled >= 1  # TCP may send it once more meanwhile
        switch.stalls, switch.corrupts_at = 0.0, port
        assert passed() == b'si{"lent": 1}\n'
        assert passed() == line
        switch.cut = {1}
        near.sendall(line)
        far.settimeout(1)
        with pytest.raises(TimeoutError):
            far.recv(1)
        switch.cut = set()
        far.settimeout(SOON)
        assert far.recv(65536) == line  # TCP sends it once more


@pytest.mark.grid
@pytest.mark.skipif(sys.platform != "linux", reason="ranks are found in /proc, and a full disk needs prlimit")
def test_eight_faults_leave_nothing_behind(tmp_path: Path) -> None:
    kinds = [
        "kill",
        "link cut",
        "damaged checkpoint",
        "TERM",
        "hub killed",
        "watcher stopped",
        "corrupt line",
        "delays",
    ]
    command = [sys.executable, "-m", "benchmarks.soak", "--steps", "140", "--faults", "8", "--seed", "1"]
    environment = with_path(ROOT / "src") | {"OMP_NUM_THREADS": "1", TRIAL: str(tmp_path)}
    ended = subprocess.run(
        [*command, "--kinds", *kinds], capture_output=True, text=True, timeout=LIMIT, env=environment, cwd=ROOT
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "8 faults, 0 problems" in ended.stdout
    assert json.loads((tmp_path / "soak.json").read_text())["is_complete"]
