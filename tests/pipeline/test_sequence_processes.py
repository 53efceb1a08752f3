"""A sequence over real processes and gloo: its messages, skips and replicas."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

WORKER = Path(__file__).with_name("sequence_worker.py")


def torchrun(num_processes: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_processes}"]
    path = os.pathsep.join([str(WORKER.parents[1]), str(WORKER.parents[2]), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [*launcher, str(WORKER), *arguments],
        capture_output=True,
        text=True,
        timeout=110,
        env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
    )


@pytest.mark.parametrize(
    ("num_processes", "schedule", "recompute", "stages_per_rank"),
    [
        (2, "1f1b", "full", "1"),
        (2, "zb-v", "none", "2"),
        (3, "gpipe", "checkpoints", "1"),
        (3, "interleaved-1f1b", "selective", "2"),
        (3, "zb-h1", "none", "1"),
    ],
)
def test_processes_change_no_bit(num_processes: int, schedule: str, recompute: str, stages_per_rank: str) -> None:
    ended = torchrun(num_processes, "split", schedule, recompute, stages_per_rank)
    assert ended.returncode == 0, ended.stderr[-3000:]


@pytest.mark.parametrize("what", ["straight", "buffers"])
def test_a_skip_goes_past_the_stages_between(what: str) -> None:
    ended = torchrun(3, what)
    assert ended.returncode == 0, ended.stderr[-3000:]


@pytest.mark.parametrize(
    ("num_processes", "name", "schedule", "recompute", "stages_per_rank"),
    [
        (2, "transformer", "1f1b", "none", "1"),
        (3, "mixed", "zb-h1", "full", "1"),
        (2, "mixed", "interleaved-1f1b", "checkpoints", "2"),
        (3, "transformer", "zb-v", "none", "2"),
    ],
)
def test_token_slices(num_processes: int, name: str, schedule: str, recompute: str, stages_per_rank: str) -> None:
    ended = torchrun(num_processes, "slices", name, schedule, recompute, stages_per_rank)
    assert ended.returncode == 0, ended.stderr[-3000:]


@pytest.mark.parametrize(("num_processes", "what"), [(2, "sliced_bytes"), (4, "sliced_replicas")])
def test_slices_share_what_is_whole(num_processes: int, what: str) -> None:
    ended = torchrun(num_processes, what)
    assert ended.returncode == 0, ended.stderr[-3000:]


@pytest.mark.parametrize("over", ["all", "own"])
def test_replicas_share_a_batch_and_its_statistics(over: str) -> None:
    ended = torchrun(4, "replicas", over)
    assert ended.returncode == 0, ended.stderr[-3000:]


def test_ranks_with_other_inputs_find_out() -> None:
    ended = torchrun(2, "mismatch")
    assert "but 0SEND_F0.0 of (4, 4, 4, 2) torch.float32 came" in ended.stdout, ended.stdout + ended.stderr[-3000:]
