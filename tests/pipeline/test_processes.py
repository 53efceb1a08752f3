"""The same through torchrun: real processes, gloo, and the messages between them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

WORKER = Path(__file__).with_name("worker.py")


def torchrun(num_processes: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    launcher = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={num_processes}",
    ]
    environment = os.environ | {"PYTHONPATH": str(WORKER.parents[1]), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [*launcher, str(WORKER), *arguments], capture_output=True, text=True, timeout=110, env=environment
    )


@pytest.mark.parametrize(
    ("name", "num_processes", "schedule"),
    [("llama", 2, "1f1b"), ("llama, tied", 3, "1f1b"), ("qwen3", 2, "gpipe"), ("gpt2", 4, "1f1b")],
)
def test_processes_train_as_the_unsplit_model(name: str, num_processes: int, schedule: str) -> None:
    ended = torchrun(num_processes, "exact", name, schedule)
    assert ended.returncode == 0, ended.stderr[-3000:]


def test_batches_of_different_shapes_are_found_out() -> None:
    ended = torchrun(2, "mismatch")
    assert "rank 1 found the mismatch" in ended.stdout, ended.stderr[-3000:]
    assert "rank 0 found the mismatch" in ended.stdout, ended.stderr[-3000:]


@pytest.mark.parametrize("what", ["buffers", "mesh"])
def test_two_processes(what: str) -> None:
    ended = torchrun(2, what)
    assert ended.returncode == 0, ended.stderr[-3000:]
