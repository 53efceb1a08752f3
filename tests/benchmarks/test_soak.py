"""A run survives one fault of every kind, and ends with the weights of an undisturbed one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks.harness import TRIAL

from support.paths import ROOT, with_path
from support.timeouts import LIMIT


@pytest.mark.more
@pytest.mark.skipif(sys.platform != "linux", reason="ranks are found in /proc, and a full disk needs prlimit")
def test_eight_faults_leave_nothing_behind(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.soak", "--steps", "120", "--faults", "8", "--seed", "1"]
    environment = with_path(ROOT / "src") | {"OMP_NUM_THREADS": "1", TRIAL: str(tmp_path)}
    ended = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, env=environment, cwd=ROOT)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "8 faults, 0 problems" in ended.stdout
