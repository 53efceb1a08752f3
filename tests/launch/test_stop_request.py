"""A process that is asked to stop knows it, and ends at the second request whatever it waits for."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

SCRIPT = """
import ctypes, sys
from slipstream.launch.stop_request import StopRequest
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


def test_the_second_request_ends_at_once() -> None:
    with subprocess.Popen([sys.executable, "-c", SCRIPT, "begun"], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "listens\n"
        process.send_signal(signal.SIGUSR1)
        assert process.stdout.readline() == "SIGUSR1\n"
        process.send_signal(signal.SIGTERM)  # the same request, sent to a launcher and passed on
        time.sleep(1.5)
        assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=10) == 128 + signal.SIGTERM


def test_before_the_first_step_a_request_ends_at_once() -> None:
    """Also where the main thread waits for a rank that has died, as torchrun then asks the others to end."""
    command = [sys.executable, "-c", SCRIPT]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == "listens\n"
        process.send_signal(signal.SIGTERM)
        try:
            assert process.wait(timeout=10) == 75
        finally:
            process.kill()
        assert process.stderr.read().startswith("SIGTERM ended the run before its first step; nothing new")
