"""A process that is asked to stop knows it, and ends at the second request whatever it waits for."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import pytest

from support.timeouts import LIMIT

SCRIPT = """
import ctypes, sys
from slipstream.launch import stop_request
from slipstream.launch.stop_request import StopRequest
if len(sys.argv) > 2:
    stop_request._SAME_REQUEST = float(sys.argv[2])
request = StopRequest()
request.listen()
if "begun" in sys.argv:
    request.begin()
print("listens", flush=True)
while not request.name:
    ctypes.CDLL(None).usleep(1000)
print(request.name, flush=True)
while True:
    ctypes.CDLL(None).pause()  # as a thread that waits in gloo
"""


@pytest.mark.parametrize("is_same", [True, False])
def test_the_second_request_ends_at_once(is_same: bool) -> None:
    """Unless it is the first one, which was sent to a launcher and passed on."""
    command = [sys.executable, "-c", SCRIPT, "begun", str(LIMIT if is_same else 0)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "listens\n"
        process.send_signal(signal.SIGUSR1)
        assert process.stdout.readline() == "SIGUSR1\n"
        process.send_signal(signal.SIGTERM)
        if is_same:
            time.sleep(0.5)
            assert process.poll() is None
            process.kill()
        else:
            assert process.wait(timeout=LIMIT) == 128 + signal.SIGTERM


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
        assert process.stderr.read().startswith("SIGTERM ended the run before its first step; nothing new")
