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
    ("name", "num_processes", "schedule", "stages_per_rank"),
    [
        ("llama", 2, "1f1b", 1),
        ("llama, tied", 3, "zb-h1", 1),
        ("llama, tied", 2, "zb-v", 2),
        ("qwen3", 2, "interleaved-1f1b", 2),
        ("gpt2", 4, "gpipe", 1),
    ],
)
def test_processes_train_as_the_unsplit_model(
    name: str, num_processes: int, schedule: str, stages_per_rank: int
) -> None:
    ended = torchrun(num_processes, "exact", name, schedule, str(stages_per_rank))
    assert ended.returncode == 0, ended.stderr[-3000:]


def test_processes_recompute_and_offload() -> None:
    ended = torchrun(2, "exact", "llama, tied", "1f1b", "1", "selective", "0.7")
    assert ended.returncode == 0, ended.stderr[-3000:]


def test_processes_share_layers_by_halves() -> None:
    """Each has the halves of two layers that the other doesn't; only what a process owns is in its memory."""
    ended = torchrun(2, "exact", "llama, tied", "zb-v", "2", "none", "0", "0.5 1 1.5 1")
    assert ended.returncode == 0, ended.stderr[-3000:]


def test_batches_of_different_shapes_are_found_out() -> None:
    ended = torchrun(2, "mismatch")
    assert "rank 1 found the mismatch" in ended.stdout, ended.stderr[-3000:]
    assert "rank 0 found the mismatch" in ended.stdout, ended.stderr[-3000:]


def test_a_rank_that_waits_in_vain_reports() -> None:
    ended = torchrun(2, "absent")
    assert "rank 1 reported" in ended.stdout, ended.stderr[-3000:]


@pytest.mark.parametrize("what", ["auto", "buffers", "mesh"])
def test_two_processes(what: str) -> None:
    ended = torchrun(2, what)
    assert ended.returncode == 0, ended.stderr[-3000:]
