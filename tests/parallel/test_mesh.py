"""What a mesh of four processes promises beside equal gradients: bytes, exports, dropout, limits, refusals."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

WORKER = Path(__file__).with_name("mesh_worker.py")
CASES = ["link_bytes", "export", "dropout", "accumulation", "auto", "limit", "refusals", "low_precision"]


def test_a_mesh_keeps_its_promises() -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4"]
    environment = os.environ | {"PYTHONPATH": str(WORKER.parents[1]), "OMP_NUM_THREADS": "1"}
    ended = subprocess.run([*launcher, str(WORKER)], capture_output=True, text=True, timeout=115, env=environment)
    assert ended.returncode == 0, ended.stderr[-4000:]
    assert ended.stdout.split() == CASES
