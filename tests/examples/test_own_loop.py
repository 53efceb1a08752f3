"""A loop of one's own that loses a rank goes on to the bit when it is started again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from slipstream.checkpoint import CheckpointFolder, Manifest
from support.forked import launch
from support.paths import ROOT
from support.timeouts import LIMIT

LOOP = ROOT / "examples" / "own_loop.py"


def started(folder: Path) -> subprocess.Popen[str]:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([*torchrun, str(LOOP), str(folder)], **pipes)  # type: ignore[call-overload,no-any-return]


def process_of_rank(torchrun: int, rank: int) -> int:
    """The process that torchrun has started for a rank."""
    children = Path(f"/proc/{torchrun}/task/{torchrun}/children").read_text().split()
    own = [
        child
        for child in children
        if f"RANK={rank}".encode() in Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
    ]
    return int(own[0])


@pytest.mark.more
def test_a_loop_that_lost_a_rank_goes_on_to_the_bit(tmp_path: Path) -> None:
    undisturbed, folder = CheckpointFolder(tmp_path / "undisturbed"), CheckpointFolder(tmp_path / "killed")
    whole = launch(2, LOOP, undisturbed.path)
    assert whole.returncode == 0, whole.stderr
    torchrun = started(folder.path)
    deadline = time.monotonic() + LIMIT
    while not folder.steps():
        assert time.monotonic() < deadline
        assert torchrun.poll() is None
        time.sleep(0.005)
    os.kill(process_of_rank(torchrun.pid, 1), signal.SIGKILL)
    torchrun.communicate(timeout=LIMIT)
    assert torchrun.returncode != 0
    assert folder.steps()[0] < 20
    again = started(folder.path)
    output, errors = again.communicate(timeout=LIMIT)
    assert again.returncode == 0, errors
    assert whole.stdout.endswith(output)
    assert output != whole.stdout
    expected, found = (Manifest.read(each.complete(20)) for each in (undisturbed, folder))
    assert expected.files == found.files
