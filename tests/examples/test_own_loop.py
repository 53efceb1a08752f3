"""A loop of one's own that loses a rank goes on to the bit when it is started again."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from slipstream.checkpoint import CheckpointFolder, Manifest
from support.forked import launch
from support.paths import ROOT, WORKERS, with_path
from support.timeouts import LIMIT

LOOP = ROOT / "examples" / "own_loop.py"


def torchrun(script: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    return subprocess.run(
        [*command, str(script), str(folder)],
        env=with_path(LOOP.parent),
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )


@pytest.mark.more
def test_a_loop_that_lost_a_rank_goes_on_to_the_bit(tmp_path: Path) -> None:
    undisturbed, folder = CheckpointFolder(tmp_path / "undisturbed"), CheckpointFolder(tmp_path / "killed")
    whole = launch(2, LOOP, undisturbed.path)
    assert whole.returncode == 0, whole.stderr
    killed = torchrun(WORKERS / "examples/dying_loop.py", folder.path)
    assert "exitcode  : -9" in killed.stderr, killed.stderr
    assert folder.steps() == [5]
    again = torchrun(LOOP, folder.path)
    assert again.returncode == 0, again.stderr
    assert whole.stdout.endswith(again.stdout)
    assert again.stdout != whole.stdout
    expected, found = (Manifest.read(each.complete(20)) for each in (undisturbed, folder))
    assert expected.files == found.files
