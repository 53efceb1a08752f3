"""No thread of gloo's outlives the interpreter, which it might abort."""

from __future__ import annotations

import subprocess
import sys

import pytest

from support.paths import TESTS, WORKERS, with_path
from support.timeouts import LIMIT

WORKER = WORKERS / "parallel/ends.py"


@pytest.mark.grid  # a real torchrun
@pytest.mark.skipif(sys.platform != "linux", reason="threads are counted in /proc")
def test_no_thread_outlives_the_interpreter() -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(WORKER)]
    environment = with_path(TESTS) | {"OMP_NUM_THREADS": "1"}
    ended = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, env=environment)
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert ended.stdout.count("threads at the end: ['python']\n") == 2, ended.stdout
