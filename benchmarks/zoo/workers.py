"""Runs tasks in forked children of a process that has imported everything, each within a time and a memory limit.

A child that crashes, hangs or takes too much loses its own task only, and keeps what it has sent before.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from multiprocessing import connection, get_context
from multiprocessing.context import ForkProcess
from typing import Any, TypeAlias

import psutil

Send: TypeAlias = Callable[[Any], None]
_PATIENCE = 8  # a child may wait this many times its processor time, for cores that others use
_INTERVAL = 0.1  # seconds between two looks at a child


@dataclass(frozen=True)
class Limits:
    """What a task may take between two things that it sends."""

    seconds: float  # of processor time
    memory: int  # bytes beyond what the parent has


@dataclass
class Result:
    """What a task has sent, and why it ended early, "" if it didn't."""

    task: str
    sent: list[Any] = field(default_factory=list)
    ended_by: str = ""


class _Child:
    def __init__(self, task: str, work: Callable[[str, Send], None], limits: Limits) -> None:
        self.connection, there = get_context("fork").Pipe(duplex=False)
        self.process: ForkProcess = get_context("fork").Process(target=_serve, args=(task, work, there), daemon=True)
        self.process.start()
        there.close()
        assert self.process.pid is not None
        self.result = Result(task)
        self._limits, self._watched = limits, psutil.Process(self.process.pid)
        self._base = psutil.Process().memory_info().rss
        self._restart_clock()

    def has_ended(self) -> bool:
        """Takes what the child has sent; returns whether that is all."""
        try:
            while self.connection.poll():
                self.result.sent.append(self.connection.recv())
                self._restart_clock()
            self.result.ended_by = self._excess()
        except EOFError:
            self.process.join(5)
            if self.process.exitcode:
                self.result.ended_by = f"the process ended with {self.process.exitcode}"
            return True
        if self.result.ended_by:
            self.process.kill()
            self.process.join(5)
        return bool(self.result.ended_by)

    def _restart_clock(self) -> None:
        self._since, self._used = time.monotonic(), self._processor_time()

    def _processor_time(self) -> float:
        try:
            times = self._watched.cpu_times()
        except psutil.NoSuchProcess:
            return 0.0
        return float(times.user + times.system)

    def _excess(self) -> str:
        if self._processor_time() - self._used > self._limits.seconds:
            return f"it took more than {self._limits.seconds:.0f} s"
        if time.monotonic() - self._since > _PATIENCE * self._limits.seconds:
            return f"it waited for more than {_PATIENCE * self._limits.seconds:.0f} s"
        try:
            taken = self._watched.memory_info().rss - self._base
        except psutil.NoSuchProcess:
            return ""
        return f"it took more than {self._limits.memory / 1e9:.1f} GB" if taken > self._limits.memory else ""


def run_forked(
    tasks: Iterable[str], work: Callable[[str, Send], None], num_processes: int, limits: Limits
) -> Iterator[Result]:
    """Yields the tasks' results as they end, `num_processes` of them at a time.

    Args:
        tasks: names.
        work: called with a name in a child, and with what sends any number of results.
        num_processes: running at a time.
        limits: of each thing that is sent.
    """
    waiting, running = iter(tasks), list[_Child]()
    while True:
        while len(running) < num_processes and (task := next(waiting, None)) is not None:
            running.append(_Child(task, work, limits))
        if not running:
            return
        connection.wait([child.connection for child in running], _INTERVAL)
        for child in [child for child in running if child.has_ended()]:
            running.remove(child)
            child.connection.close()
            yield child.result


def _serve(task: str, work: Callable[[str, Send], None], there: connection.Connection) -> None:
    silent = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(silent, stream.fileno())  # models print and warn
    work(task, there.send)
    there.close()
