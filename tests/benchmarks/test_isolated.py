"""Contenders of a benchmark are stopped while another one runs, and none outlives the benchmark."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from benchmarks.harness import interleaved
from benchmarks.isolated import Contender

from support.paths import ROOT, TESTS, WORKERS, with_path
from support.timeouts import LIMIT, SOON
from workers.benchmarks.isolated import Counts


def state(pid: int) -> str:
    """As the system has it: "T" is stopped; "" where there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return ""


def becomes(pid: int, wanted: tuple[str, ...]) -> bool:
    deadline = time.monotonic() + SOON
    while state(pid) not in wanted:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


@pytest.mark.more
def test_contenders_that_wait_are_stopped() -> None:
    contender = Contender("counts", Counts)
    contender.start()
    pids = [process.pid for process in contender._processes]
    assert all(becomes(pid, ("T",)) for pid in pids)
    contender.wait()
    assert all(becomes(pid, ("T",)) for pid in pids)
    assert contender.run() < SOON
    assert contender.losses == [1.0, 1.0]
    assert all(becomes(pid, ("T",)) for pid in pids)
    assert contender.report() == 1
    contender.rest()
    assert all(becomes(pid, ("T",)) for pid in pids)
    contender.close()
    assert not any(process.is_alive() for process in contender._processes)


@pytest.mark.more
@pytest.mark.parametrize("how", ["killed", "fail"])
def test_stopped_contenders_end_with_the_benchmark(how: str, tmp_path: Path) -> None:
    # no pipes, which a contender that lives on would hold open
    with (tmp_path / "pid").open("w") as told, (tmp_path / "errors").open("w") as errors:
        subprocess.run(
            [sys.executable, WORKERS / "benchmarks/isolated.py", how],
            env=with_path(TESTS, ROOT),
            stdout=told,
            stderr=errors,
            timeout=LIMIT,
        )
    pid = int((tmp_path / "pid").read_text().split()[0])
    ended = becomes(pid, ("", "Z"))
    if not ended:
        os.kill(pid, signal.SIGKILL)
    assert ended


def test_the_first_step_of_a_turn_and_the_first_rounds_do_not_count() -> None:
    numbers = iter(range(100))
    assert interleaved({"a": lambda: next(numbers) / 1000}, repeats=2, warmups=1, steps=3) == {
        "a": [0.004, 0.005, 0.007, 0.008]
    }
    numbers = iter(range(100))
    assert interleaved({"a": lambda: next(numbers) / 1000}, repeats=2, warmups=1) == {"a": [0.001, 0.002]}


def test_contenders_rest_after_a_turn_of_several_steps() -> None:
    happened: list[str] = []
    run = {name: lambda name=name: happened.append(name) or 0.0 for name in "ab"}  # type: ignore[misc,func-returns-value]
    rests = {"a": lambda: happened.append("rest")}
    interleaved(run, repeats=1, warmups=0, steps=2, rests=rests)
    assert happened == ["a", "a", "rest", "b", "b"]
    happened.clear()
    interleaved(run, repeats=1, warmups=0, rests=rests)
    assert happened == ["a", "b"]
