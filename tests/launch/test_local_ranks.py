"""However one local rank ends, all of them end, and the launcher reports the first cause."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from slipstream.errors import RankFailedError, SlipstreamError
from slipstream.launch.local_ranks import MALLOC, launch_ranks
from slipstream.terminal import at_level
from support.parameters import first_of
from support.timeouts import LIMIT

# Each rank says that it is there, then rank 0 waits inside gloo for a message that nobody sends.
RANK = """
import os, pathlib, sys, time
import torch, torch.distributed as dist
from slipstream.errors import SlipstreamError
from slipstream.launch.local_ranks import reported_to_the_launcher

def run():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    pathlib.Path(sys.argv[1], f"pid{rank}").write_text(str(os.getpid()))
    dist.barrier()
    if sys.argv[2] == "fine":
        return
    if rank == 1 and sys.argv[2] == "raise":
        raise RuntimeError("the first cause")
    if rank == 1 and sys.argv[2] == "user":
        raise SlipstreamError("what to put right")
    if rank == 1 and sys.argv[2] == "exit":
        os._exit(3)
    if rank == 1:
        time.sleep(1000)
    dist.recv(torch.zeros(1), src=1)

with reported_to_the_launcher():
    run()
"""
PARENT = """
import sys
from slipstream.launch.local_ranks import launch_ranks
launch_ranks(sys.argv[1:], num_ranks=2)
"""


@pytest.fixture
def script(tmp_path: Path) -> list[str]:
    path = tmp_path / "rank.py"
    path.write_text(RANK)
    return [str(path), str(tmp_path)]


def rank_pids(folder: Path) -> list[int]:
    """The ranks' process ids, once both have written them."""
    files = [folder / "pid0", folder / "pid1"]
    deadline = time.monotonic() + LIMIT
    while not all(file.exists() and file.read_text() for file in files):
        assert time.monotonic() < deadline, "the ranks didn't start"
        time.sleep(0.05)
    return [int(file.read_text()) for file in files]


def assert_gone(pids: list[int], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while any(alive(pid) for pid in pids):
        assert time.monotonic() < deadline, f"left behind: {[pid for pid in pids if alive(pid)]}"
        time.sleep(0.05)


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def start_parent(script: list[str], scenario: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", PARENT, *script, scenario], stderr=subprocess.PIPE, text=True)


@pytest.mark.more
def test_ranks_that_end_well(script: list[str], tmp_path: Path) -> None:
    handler = signal.getsignal(signal.SIGINT)
    launch_ranks([*script, "fine"], num_ranks=2)
    assert signal.getsignal(signal.SIGINT) is handler
    assert_gone(rank_pids(tmp_path), seconds=0)


def test_an_exception_is_told_with_its_rank_and_traceback(script: list[str], tmp_path: Path) -> None:
    with pytest.raises(RankFailedError) as failure:
        launch_ranks([*script, "raise"], num_ranks=2)
    assert "rank 1 failed" in str(failure.value)
    assert str(failure.value).endswith("RuntimeError: the first cause")
    assert "in run" in str(failure.value)
    assert_gone(rank_pids(tmp_path), seconds=0)


def test_a_users_error_in_a_rank_is_a_users_error(script: list[str]) -> None:
    with pytest.raises(SlipstreamError, match=r"^what to put right$"):
        launch_ranks([*script, "user"], num_ranks=2)


@pytest.mark.more
def test_an_exit_without_a_word(script: list[str]) -> None:
    with pytest.raises(RankFailedError, match="rank 1 ended with exit code 3"):
        launch_ranks([*script, "exit"], num_ranks=2)


@pytest.mark.more
@pytest.mark.parametrize("victim", [1, 0])
def test_a_killed_rank_ends_the_other_and_is_named(script: list[str], tmp_path: Path, victim: int) -> None:
    parent = start_parent(script, "wait")
    pids = rank_pids(tmp_path)
    os.kill(pids[victim], signal.SIGKILL)
    started = time.monotonic()
    _, errors = parent.communicate(timeout=30)
    assert time.monotonic() - started < 10
    assert parent.returncode != 0
    last = errors.strip().splitlines()[-1]
    assert last.endswith(f"rank {victim} was ended by SIGKILL; the other ranks were stopped")
    assert_gone(pids, seconds=0)


@pytest.mark.parametrize("name", first_of(["SIGINT", "SIGTERM", "SIGKILL"]))
def test_the_ranks_end_with_their_launcher(script: list[str], tmp_path: Path, name: str) -> None:
    parent = start_parent(script, "wait")
    pids = rank_pids(tmp_path)
    connections = [each for pid in (parent.pid, *pids) for each in psutil.Process(pid).net_connections()]
    listening = {each.laddr.ip for each in connections if each.status == psutil.CONN_LISTEN}
    assert listening == {"127.0.0.1"}  # nobody on another machine reaches the store or a rank
    parent.send_signal(getattr(signal, name))
    _, errors = parent.communicate(timeout=10)
    assert parent.returncode != 0
    assert_gone(pids, seconds=10)
    if name == "SIGINT":
        assert errors.strip().endswith("KeyboardInterrupt")


@pytest.mark.skipif(sys.platform != "linux", reason="other systems can't end a process with its parent")
def test_ranks_that_still_import_end_with_their_launcher(tmp_path: Path) -> None:
    """An import may hold the interpreter for seconds, in which no thread of it looks for the parent."""
    write = "pathlib.Path(sys.argv[1], 'pid' + os.environ['RANK']).write_text(str(os.getpid()))"
    rank = f"import ctypes, os, pathlib, sys; {write}; ctypes.PyDLL(None).sleep(1000)"  # holds the interpreter
    parent = subprocess.Popen([sys.executable, "-c", PARENT, "-c", rank, str(tmp_path)])
    pids = rank_pids(tmp_path)
    parent.kill()
    parent.wait()
    assert_gone(pids, seconds=2)


def test_ranks_get_one_thread_memory_settings_and_the_level(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    write = "import json, os, sys; open(sys.argv[1], 'w').write(json.dumps(dict(os.environ)))"
    with at_level("warning"):
        launch_ranks(["-c", write, str(tmp_path / "environment")], num_ranks=1)
    environment = (tmp_path / "environment").read_text()
    for name, value in {**MALLOC, "OMP_NUM_THREADS": "1", "WORLD_SIZE": "1", "SLIPSTREAM_LOG_LEVEL": "warning"}.items():
        assert f'"{name}": "{value}"' in environment
