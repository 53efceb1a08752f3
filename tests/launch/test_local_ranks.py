"""However one local rank ends, all of them end, and the launcher reports the first cause."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from _pytest.mark import ParameterSet
from transformers import LlamaConfig

from slipstream.errors import RankFailedError
from slipstream.launch import fork_server, forked_ranks
from slipstream.launch.forked_ranks import ForkServer
from slipstream.launch.local_ranks import MALLOC, _raise_first_cause
from slipstream.terminal import at_level
from support.forked import ForkedProgram, run_alone
from support.parameters import first_of
from support.timeouts import LIMIT, SOON

# Each rank says that it is there, then rank 0 waits inside gloo for a message that nobody sends.
RANK = """
import os, pathlib, sys, time
from slipstream.errors import SlipstreamError
from slipstream.launch.local_ranks import reported_to_the_launcher

def run():
    import torch, torch.distributed as dist
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

def main():
    with reported_to_the_launcher():
        run()

if __name__ == "__main__":
    main()
"""
PARENT = """
import os, sys, tempfile
from slipstream.launch import fork_server, launch_ranks
tempfile.tempdir = os.environ.get("TMPDIR")  # of this test, not of the process that forks
del os.environ["OMP_NUM_THREADS"]
if sys.argv[1] == "forked":
    import torch
    torch.set_num_threads(2)  # as it does by itself on two cores
    with fork_server() as server:
        assert server is not None
        launch_ranks("rank", sys.argv[2:], 2, server)
else:
    launch_ranks("rank", sys.argv[2:], 2)
"""


def in_both_ways(*cases: tuple[Any, ...]) -> list[ParameterSet]:
    """Each case with ranks that a fork server starts, and, for `make exactness`, with new processes, which import
    torch."""
    return [pytest.param("forked", *case) for case in cases] + [
        pytest.param("anew", *case, marks=pytest.mark.grid) for case in cases
    ]


@pytest.fixture
def launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "rank.py").write_text(RANK)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    path = tmp_path / "launcher.py"
    path.write_text(PARENT)
    return path


@pytest.fixture
def waiting(launcher: Path, tmp_path: Path, how: str) -> Iterator[ForkedProgram]:
    """A launcher whose ranks wait for ever."""
    program = ForkedProgram(tmp_path, launcher, how, tmp_path, "wait")
    yield program
    if program.returncode is None:
        program.send_signal(signal.SIGKILL)
        program.communicate()


def removers(program: ForkedProgram) -> list[psutil.Process]:
    """The processes that wait for the end of a program to remove its folders."""
    with suppress(psutil.Error):
        return [each for each in psutil.Process(program.pid).children() if "sh" in each.cmdline()[:1]]
    return []


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


@pytest.mark.parametrize(
    ("how", "end", "last"),
    in_both_ways(
        ("fine", ""),
        ("raise", "RuntimeError: the first cause"),
        ("user", "slipstream.errors.SlipstreamError: what to put right"),
        ("exit", "rank 1 ended with exit code 3; the other ranks were stopped"),
    ),
)
def test_the_first_cause_is_told(launcher: Path, tmp_path: Path, how: str, end: str, last: str) -> None:
    ended = run_alone(launcher, how, tmp_path, end)
    assert_gone(rank_pids(tmp_path), seconds=0)
    assert (ended.returncode == 0) == (end == "fine")
    assert ended.stderr.strip().endswith(last)
    if end == "raise":
        assert "rank 1 failed" in ended.stderr
        assert "in run" in ended.stderr
    if end == "fine":
        assert ended.stderr == ""


@pytest.mark.parametrize(("how", "victim"), [*in_both_ways((1,)), pytest.param("forked", 0, marks=pytest.mark.more)])
def test_a_killed_rank_ends_the_other_and_is_named(waiting: ForkedProgram, tmp_path: Path, victim: int) -> None:
    pids = rank_pids(tmp_path)
    os.kill(pids[victim], signal.SIGKILL)
    _, errors = waiting.communicate(timeout=SOON)
    assert waiting.returncode == 1
    last = errors.strip().splitlines()[-1]
    assert last.endswith(f"rank {victim} was ended by SIGKILL; the other ranks were stopped")
    assert_gone(pids, seconds=0)


@pytest.mark.parametrize(("how", "name"), in_both_ways(("SIGINT",), ("SIGTERM",), ("SIGKILL",)))
def test_the_ranks_end_with_their_launcher(waiting: ForkedProgram, tmp_path: Path, name: str) -> None:
    pids = rank_pids(tmp_path)
    connections = [each for pid in (waiting.pid, *pids) for each in psutil.Process(pid).net_connections()]
    listening = {each.laddr.ip for each in connections if each.status == psutil.CONN_LISTEN}
    assert listening == {"127.0.0.1"}  # nobody on another machine reaches the store or a rank
    assert [psutil.Process(pid).name() for pid in pids] == ["rank 0", "rank 1"]  # as `top` shows them
    waiting.send_signal(getattr(signal, name))
    _, errors = waiting.communicate(timeout=SOON)
    assert waiting.returncode != 0
    assert_gone(pids, seconds=SOON)
    if name == "SIGINT":
        assert errors.strip().endswith("KeyboardInterrupt")


@pytest.mark.parametrize("is_short", [False, True])
def test_memory_is_named_only_where_it_may_have_run_out(is_short: bool) -> None:
    with pytest.raises(RankFailedError) as raised:
        _raise_first_cause({1: -signal.SIGKILL, 0: 1}, {}, is_short)
    assert ("perhaps because memory ran out" in str(raised.value)) == is_short


SAVES_FOR_LONG = """
import os, pathlib, sys, time
from slipstream.errors import StoppedRunError
from slipstream.launch import StopRequest
from slipstream.launch.local_ranks import reported_to_the_launcher

def main():
    with reported_to_the_launcher():
        request = StopRequest()
        request.listen()
        request.begin()
        folder, rank = pathlib.Path(sys.argv[1]), os.environ["RANK"]
        (folder / ("pid" + rank)).write_text(str(os.getpid()))
        while not request.name:
            time.sleep(0.01)
        (folder / ("asked" + rank)).touch()
        while not (folder / "may save").exists():
            time.sleep(0.01)
        time.sleep(4)  # longer than ranks have to end that are asked to by their launcher
        raise StoppedRunError("saved by rank " + rank)

if __name__ == "__main__":
    main()
"""


@pytest.mark.more
@pytest.mark.parametrize("names", [["SIGTERM", "SIGTERM", "SIGTERM"], ["SIGUSR1", "SIGTERM"]])
def test_a_request_that_is_repeated_leaves_ranks_the_time_to_save(
    launcher: Path, tmp_path: Path, names: list[str]
) -> None:
    (tmp_path / "rank.py").write_text(SAVES_FOR_LONG)
    program = ForkedProgram(tmp_path, launcher, "forked", tmp_path)
    pids = rank_pids(tmp_path)
    for number, name in enumerate(names):
        program.send_signal(getattr(signal, name))
        deadline = time.monotonic() + SOON
        while number == 0 and len([*tmp_path.glob("asked?")]) < 2:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    (tmp_path / "may save").touch()
    _, errors = program.communicate(timeout=SOON)
    assert re.search(r"StoppedRunError: saved by rank [01]$", errors.strip()), errors
    assert_gone(pids, seconds=0)


@pytest.mark.skipif(sys.platform != "linux", reason="other systems start each rank anew")
@pytest.mark.parametrize("how", ["forked"])
def test_a_killed_fork_server_is_named(waiting: ForkedProgram, tmp_path: Path) -> None:
    pids = rank_pids(tmp_path)
    (server,) = (each for each in psutil.Process(waiting.pid).children() if "sh" not in each.cmdline()[:1])
    server.kill()
    _, errors = waiting.communicate(timeout=SOON)
    said = f"process {server.pid}, which forks the ranks, was ended by SIGKILL, and its ranks have ended with it"
    assert errors.strip().splitlines()[-1].endswith(said)
    assert_gone(pids, seconds=SOON)


PROFILES = """
import os, sys, tempfile
from slipstream.cli import main
tempfile.tempdir = os.environ["TMPDIR"]
sys.argv = ["slipstream", "profile", sys.argv[2], "--seq-len=16", "--device=cpu"]
main()
"""


@pytest.mark.parametrize(("how", "num_folders"), [("forked", 1), ("anew", 1), ("profile", 2)])
def test_a_killed_launcher_leaves_no_temporary_folder(
    launcher: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str, num_folders: int
) -> None:
    (tmp_path / "temporary").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    if how == "profile":
        LlamaConfig().save_pretrained(tmp_path)
        launcher.write_text(PROFILES)
    program = ForkedProgram(tmp_path, launcher, how, tmp_path, "wait")
    deadline = time.monotonic() + LIMIT
    while len([*(tmp_path / "temporary").glob("slipstream-*")]) < num_folders or len(removers(program)) < num_folders:
        assert time.monotonic() < deadline
        assert program.returncode is None, program.communicate()
        time.sleep(0.01)
    program.send_signal(signal.SIGKILL)
    program.communicate()
    deadline = time.monotonic() + SOON
    while [*(tmp_path / "temporary").glob("slipstream-*")]:
        assert time.monotonic() < deadline
        time.sleep(0.05)


HOLDS_THE_INTERPRETER = """
import ctypes, os, pathlib, sys
def main():
    pathlib.Path(sys.argv[1], "pid" + os.environ["RANK"]).write_text(str(os.getpid()))
    ctypes.PyDLL(None).sleep(1000)
if __name__ == "__main__":
    main()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="other systems can't end a process with its parent")
@pytest.mark.parametrize("is_rank", [True, False], ids=["rank", "launcher"])
@pytest.mark.parametrize("how", ["forked", "anew"])
def test_ranks_that_still_import_end_with_each_other_and_their_launcher(
    launcher: Path, tmp_path: Path, how: str, is_rank: bool
) -> None:
    """An import may hold the interpreter for seconds, in which no thread of it looks for the parent."""
    (tmp_path / "rank.py").write_text(HOLDS_THE_INTERPRETER)
    parent = ForkedProgram(tmp_path, launcher, how, tmp_path)
    pids = rank_pids(tmp_path)
    os.kill(pids[1] if is_rank else parent.pid, signal.SIGKILL)
    _, errors = parent.communicate(timeout=SOON)
    assert_gone(pids, seconds=SOON)  # less than an import
    if is_rank:
        assert errors.strip().endswith("rank 1 was ended by SIGKILL; the other ranks were stopped")


SAYS_WHERE_IT_IS = """
import json, os, re, sys, torch
def main():
    large = torch.empty(2**28, dtype=torch.uint8)
    heaps = re.findall(r"(\\w+)-(\\w+) .*\\[heap\\]", open("/proc/self/maps").read())
    kept = any(int(start, 16) <= large.data_ptr() < int(end, 16) for start, end in heaps)
    said = [sys.argv[1:], dict(os.environ), torch.get_num_threads(), kept]
    open(f"{sys.argv[1]}/{os.environ['RANK']}.json", "w").write(json.dumps(said))
if __name__ == "__main__":
    main()
"""


ASKS_AND_IS_GONE = f"""
import multiprocessing, os, sys
from slipstream.launch.forked_ranks import _serve
processes = multiprocessing.get_context("fork")
ours, theirs = processes.Pipe()
server = processes.Process(target=_serve, args=(theirs, ours, os.getpid()))
server.start()
theirs.close()
assert ours.recv()
ours.send(("rank", sys.argv[1:], [os.environ | {{"RANK": "0"}}]))
ours.close()
server.join({SOON})
server.kill()  # no server may stay
assert server.exitcode == 0
"""


@pytest.mark.skipif(sys.platform != "linux", reason="other systems start each rank anew")
def test_a_fork_server_that_is_killed_before_its_first_word_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forked_ranks, "_serve", lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    with pytest.raises(RankFailedError, match=r"which forks the ranks, was ended by SIGKILL before it was"):
        ForkServer()


def test_a_fork_server_that_can_not_answer_ends_with_the_ranks_it_has_started(launcher: Path, tmp_path: Path) -> None:
    (tmp_path / "rank.py").write_text(HOLDS_THE_INTERPRETER)
    launcher.write_text(ASKS_AND_IS_GONE)
    ended = run_alone(launcher, tmp_path)
    assert ended.returncode == 0, ended.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="the settings are glibc's")
@pytest.mark.parametrize("how", first_of(["forked", "anew"]))
def test_ranks_get_the_memory_settings_and_one_thread(launcher: Path, tmp_path: Path, how: str) -> None:
    (tmp_path / "rank.py").write_text(SAYS_WHERE_IT_IS)
    with at_level("warning"):
        assert run_alone(launcher, how, tmp_path).stderr == ""
    for rank in range(2):
        arguments, environment, num_threads, kept = json.loads((tmp_path / f"{rank}.json").read_text())
        assert arguments == [str(tmp_path)]
        assert num_threads == 1
        assert kept  # 256 MiB, in memory that isn't returned to the system
        place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
        assert (
            environment.items()
            >= {**MALLOC, **place, "OMP_NUM_THREADS": "1", "SLIPSTREAM_LOG_LEVEL": "warning"}.items()
        )


def test_a_process_with_threads_forks_no_ranks() -> None:
    ends = threading.Event()
    thread = threading.Thread(target=ends.wait)
    thread.start()
    with fork_server() as server:
        assert server is None
    ends.set()
    thread.join()
