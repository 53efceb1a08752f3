"""A request to stop is answered at any moment, and a log on a full disk ends nothing."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from slipstream.errors import StoppedRunError
from support.forked import ForkedProgram, run_alone
from support.timeouts import LIMIT

SCRIPT = """
import ctypes, sys
from slipstream.launch import stop_request
from slipstream.launch.stop_request import StopRequest
if len(sys.argv) > 2:
    stop_request._SAME_REQUEST = float(sys.argv[2])
taken, count = stop_request.RequestCount.take, []
def take(requests, number):
    is_other = taken(requests, number)
    print(f"taken {len(count)}", flush=True)
    count.append(number)
    return is_other
stop_request.RequestCount.take = take
request = StopRequest()
request.listen()
if "begun" in sys.argv:
    request.begin()
print("listens", flush=True)
while True:
    ctypes.CDLL(None).pause()  # as a thread that waits in gloo
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    (tmp_path / "script.py").write_text(SCRIPT)
    return tmp_path / "script.py"


@pytest.mark.parametrize("is_same", [True, False])
def test_the_third_request_ends_at_once(tmp_path: Path, script: Path, is_same: bool) -> None:
    """Unless all are the first one, which was sent to every process, and passed on by launchers."""
    process = ForkedProgram(tmp_path, script, "begun", str(LIMIT if is_same else 0))
    process.wait_for("listens\n")
    for number in range(3):
        process.send_signal(signal.SIGTERM)
        process.wait_for(f"taken {number}\n")
    if is_same:
        process.send_signal(signal.SIGUSR1)  # a second one
        process.wait_for("taken 3\n")
        process.send_signal(signal.SIGKILL)
    process.communicate()
    assert process.returncode == (-signal.SIGKILL if is_same else 128 + signal.SIGTERM)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_request_while_imports_run_is_answered_as_any(tmp_path: Path, number: signal.Signals) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(
        f"model: {{config: {{model_type: llama}}}}\ndata: {{files: [{config}]}}\n"
        f"training: {{output: {tmp_path / 'run'}, steps: 2, seq_len: 32}}\n"
    )
    command = [sys.executable, "-m", "slipstream", "train", str(config)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "importing torch and transformers\n"
        process.send_signal(number)
        _, said = process.communicate(timeout=LIMIT)
    assert said == f"{number.name} ended the run while no rank was training; there is nothing new to save\n"
    assert process.returncode == StoppedRunError.exit_code
    assert not (tmp_path / "run").exists()


def test_before_the_first_step_a_request_ends_at_once(tmp_path: Path, script: Path) -> None:
    """Also where the main thread waits for a rank that has died, as torchrun then asks the others to end."""
    process = ForkedProgram(tmp_path, script)
    process.wait_for("listens\n")
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate()
    assert process.returncode == 75
    assert errors.startswith("SIGTERM ended the run before its first step; there is nothing new")


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
    (tmp_path / "program.py").write_text(PROGRAM)
    ended = run_alone(tmp_path / "program.py")
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines() == ["before", "while the disk is full", "after"]
