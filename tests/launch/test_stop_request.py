"""A process that is asked to stop knows it, and ends at the second request whatever it waits for."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from slipstream.errors import StoppedRunError
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


@pytest.mark.parametrize("is_same", [True, False])
def test_the_third_request_ends_at_once(is_same: bool) -> None:
    """Unless all are the first one, which was sent to every process, and passed on by launchers."""
    command = [sys.executable, "-c", SCRIPT, "begun", str(LIMIT if is_same else 0)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "listens\n"
        for number in range(3):
            process.send_signal(signal.SIGTERM)
            assert process.stdout.readline() == f"taken {number}\n"
        if is_same:
            process.send_signal(signal.SIGUSR1)  # a second one
            assert process.stdout.readline() == "taken 3\n"
            process.kill()
        assert process.wait(timeout=LIMIT) == (-signal.SIGKILL if is_same else 128 + signal.SIGTERM)


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


def test_before_the_first_step_a_request_ends_at_once() -> None:
    """Also where the main thread waits for a rank that has died, as torchrun then asks the others to end."""
    command = [sys.executable, "-c", SCRIPT]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == "listens\n"
        process.send_signal(signal.SIGTERM)
        try:
            assert process.wait(timeout=LIMIT) == 75
        finally:
            process.kill()
        assert process.stderr.read().startswith("SIGTERM ended the run before its first step; there is nothing new")
