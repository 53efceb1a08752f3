"""Launchers here, and tasks of a scheduler on a host, forked from a process there that has imported what they need.

A new process takes eight seconds of a core until it has imported torch and transformers, and a soak starts up to four
after each of its faults. These are what `python -m slipstream` would be.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.hosts import Hosts

_IMPORTED = (
    "slipstream.cli.train",
    "slipstream.train.training_rank",
    "slipstream.pipeline.pipeline",
    "transformers.models.auto.modeling_auto",
    "transformers.models.llama.modeling_llama",
)
_PROGRAM = "from benchmarks.soak.tasks import main; main()"
_PATIENCE = 1800.0  # seconds until a host is ready, on a machine that has much else to do


class Task:
    """A launcher or a task as a subprocess.Popen shows it."""

    def __init__(self, host: TaskHost, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._host = host

    def poll(self) -> int | None:
        """Returns the exit code, a negative one for a signal; None while the task runs."""
        if self.returncode is None:
            self.returncode = self._host.code(self.pid)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)


class TaskHost:
    """The process that forks a host's tasks, or this machine's launchers.

    Attributes:
        pids: of this process and of its helper, which run for as long as the soak.
    """

    def __init__(self, host: tuple[Hosts, int] | None, log: Path, environment: Mapping[str, str]) -> None:
        """Starts the process, on one of some hosts or on this machine; its tasks write to `log`."""
        mine, theirs = os.pipe(), os.pipe()
        command = [sys.executable, "-c", _PROGRAM, str(theirs[0]), str(mine[1])]
        with log.open("ab") as file:
            self._process = subprocess.Popen(
                command if host is None else host[0].command(host[1], command),
                stdout=file,
                stderr=subprocess.STDOUT,
                env=dict(environment),
                pass_fds=(theirs[0], mine[1]),
            )
        os.close(theirs[0])
        os.close(mine[1])
        self._read, self._write = Connection(mine[0], writable=False), Connection(theirs[1], readable=False)
        self.pids: list[int] = []

    def wait(self) -> None:
        """Waits until it can start tasks."""
        if not self._read.poll(_PATIENCE):
            raise RuntimeError("a host's process didn't get ready to start tasks")
        self.pids = self._read.recv()

    def start(self, arguments: Sequence[str], environments: Sequence[Mapping[str, str]]) -> list[Task]:
        """Starts `python -m slipstream` with these arguments, once for each environment."""
        return [Task(self, pid) for pid in self._ask((list(arguments), [dict(each) for each in environments]))]

    def code(self, pid: int) -> int | None:
        """Returns the exit code of a task; None while it runs."""
        return self._ask(pid)[0]

    def close(self) -> None:
        """Ends the process, and its tasks."""
        self._process.kill()
        self._process.wait()

    def _ask(self, what: object) -> Any:
        self._write.send(what)
        return self._read.recv()


def main() -> None:
    from slipstream.launch.forked_ranks import ForkedRank, fork_server

    for name in _IMPORTED:
        import_module(name)
    read, write = (Connection(int(each)) for each in sys.argv[1:])
    with fork_server() as server:
        assert server is not None
        write.send([os.getpid(), server.pid])
        started: dict[int, ForkedRank] = {}
        while True:
            try:
                asked = read.recv()
            except EOFError:
                return
            if isinstance(asked, int):
                write.send([started[asked].poll()])
            else:
                found = server.start("slipstream.cli", *asked)
                started |= {each.pid: each for each in found}
                write.send([each.pid for each in found])
