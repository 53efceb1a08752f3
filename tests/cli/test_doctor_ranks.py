"""Ranks of torchrun that run `slipstream doctor` exchange with their neighbours; where that fails, it names them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from support.forked import COMMAND, launch
from support.parameters import first_of
from support.paths import WORKERS
from support.timeouts import LIMIT

WORKER = WORKERS / "cli/failing_doctor.py"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
SECONDS = "10"  # of a pair: those that fail by another one's end don't wait, and a busy machine needs some


@pytest.fixture(autouse=True)
def _processors(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks exchange over gloo; on a busy machine some come late, which isn't what is tested."""
    monkeypatch.setenv("SLIPSTREAM_RENDEZVOUS_SECONDS", "120")
    if "gpu" not in request.keywords:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


@pytest.mark.parametrize("num_ranks", first_of([2, 3], 1, "grid"))
def test_every_pair_exchanges_both_ways(num_ranks: int, tmp_path: Path) -> None:
    if num_ranks == 2:
        ended = launch(num_ranks, COMMAND, "doctor", "--folder", tmp_path)
    else:
        command = [*TORCHRUN, f"--nproc-per-node={num_ranks}", "-m", "slipstream", "doctor", "--folder", str(tmp_path)]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, env=os.environ)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    lines = ended.stdout.splitlines()
    assert sum(line.startswith("Python ") for line in lines) == 1  # one rank speaks
    for first in range(num_ranks if num_ranks > 2 else 1):
        second = (first + 1) % num_ranks
        for way in (f"activations {first} to {second}", f"gradients {second} to {first}"):
            (line,) = (line for line in lines if line.startswith(way))
            assert "latency" in line
            assert "/s both ways at once; ended " in line
    assert any(line.startswith("all pairs at once") for line in lines) == (num_ranks > 2)
    assert any(line.startswith("all-to-all of unequal parts") for line in lines)


@pytest.mark.parametrize(
    ("failing", "how", "at", "problem"),
    first_of(
        [
            (1, "garble", 2, "ranks 0 and 1: 4194304 of 4194304 bytes are wrong in a message of the gradients 1 to 0"),
            (1, "stop", 1, f"ranks 0 and 1: gradients 1 to 0 did not end within {SECONDS} s"),
            # of the two directions one may end first
            (1, "stop", 88, rf"ranks 1 and 2: (activations 1 to 2|gradients 2 to 1).* did not end within {SECONDS} s"),
            (2, "end", 1, r"ranks 1 and 2: gradients 2 to 1 failed \(RuntimeError"),
        ],
        1,
        "grid",
    ),
)
def test_it_names_the_pair_that_fails(failing: int, how: str, at: int, problem: str, tmp_path: Path) -> None:
    ended = launch(3, WORKER, str(failing), how, str(at), "--timeout", SECONDS, "--folder", tmp_path)
    assert ended.returncode == 1, ended.stdout + ended.stderr
    (line,) = (line for line in ended.stdout.splitlines() if "fails: " in line)
    assert re.search(problem, line), ended.stdout + ended.stderr


@pytest.mark.more
def test_it_names_the_rank_that_does_not_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIPSTREAM_RENDEZVOUS_SECONDS", "12")
    ended = launch(3, WORKER, "1", "stop", "0", "--folder", tmp_path)
    assert ended.returncode == 1, ended.stdout + ended.stderr
    assert "of 3 ranks these didn't within 12 seconds: 1. See their output" in ended.stdout


def test_it_says_what_another_rank_has_found(tmp_path: Path) -> None:
    ended = launch(2, WORKER, "1", "elsewhere", "0", "--folder", tmp_path)
    assert ended.returncode == 1, ended.stdout + ended.stderr
    assert "fails: folder: a file of 32.0 MB couldn't be written to /proc" in ended.stdout
    assert "rank 1: folder: a file" in ended.stderr


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_gpus_exchange_both_ways(tmp_path: Path) -> None:
    command = [*TORCHRUN, "--nproc-per-node=2", "-m", "slipstream", "doctor", "--folder", str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "they exchange over nccl" in ended.stdout
    assert "activations 0 to 1" in ended.stdout
