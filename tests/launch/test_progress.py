"""Lines that a full disk doesn't take end nothing, and come once there is room."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from support.paths import ROOT, with_path
from support.timeouts import LIMIT

PROGRAM = """
import resource
from slipstream.launch import Progress
from slipstream.terminal import make_console

progress = Progress(make_console())
progress.say("before")
resource.setrlimit(resource.RLIMIT_FSIZE, (len("before\\n"), resource.RLIM_INFINITY))
progress.say("while the disk is full")
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
progress.say("after")
"""


@pytest.mark.skipif(sys.platform == "win32", reason="has no limit of a file's size")
def test_a_log_on_a_full_disk(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with log.open("w") as output:
        command = [sys.executable, "-c", PROGRAM]
        ended = subprocess.run(
            command, stdout=output, stderr=subprocess.PIPE, text=True, timeout=LIMIT, env=with_path(ROOT / "src")
        )
    assert ended.returncode == 0, ended.stderr
    assert log.read_text().splitlines() == ["before", "while the disk is full", "after"]
