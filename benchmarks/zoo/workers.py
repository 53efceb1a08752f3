"""Runs tasks in forked children of a process that has imported everything, each within a time and a memory limit.

A child that crashes, hangs or takes too much loses its own task only, and keeps what it has sent before. A task may
have several children, the ranks of one group.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import connection, get_context
from multiprocessing.context import ForkProcess
from typing import Any, TypeAlias

import psutil

Send: TypeAlias = Callable[[Any], None]
_INTERVAL = 0.1  # seconds between two looks at a child


@dataclass(frozen=True)
class Limits:
    """What a task may take between two things that it sends."""

    seconds: float  # of processor time
    memory: int  # bytes beyond what the parent has
    patience: int = 8  # a child may wait this many times its seconds, for cores that others use


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
            self.kill()
        return bool(self.result.ended_by)

    def kill(self) -> None:
        self.process.kill()
        self.process.join(5)

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
        if time.monotonic() - self._since > self._limits.patience * self._limits.seconds:
            return f"it waited for more than {self._limits.patience * self._limits.seconds:.0f} s"
        try:
            taken = self._watched.memory_info().rss - self._base
        except psutil.NoSuchProcess:
            return ""
        return f"it took more than {self._limits.memory / 1e9:.1f} GB" if taken > self._limits.memory else ""


class _Team:
    """The children of one task, of which none outlives one that had to be ended."""

    def __init__(self, children: list[_Child]) -> None:
        self.children, self.running = children, list(children)

    def has_ended(self) -> bool:
        self.running = [child for child in self.running if not child.has_ended()]
        if any(child.result.ended_by for child in self.children):
            for child in self.running:
                child.has_ended()  # takes what it has sent
                child.kill()
            self.running = []
        return not self.running

    def result(self) -> Result:
        """Returns what all have sent, in their order, and why the first of them ended early."""
        for child in self.children:
            child.connection.close()
        results = [child.result for child in self.children]
        sent = [each for result in results for each in result.sent]
        return Result(results[0].task, sent, next((each.ended_by for each in results if each.ended_by), ""))


def run_forked(
    tasks: Iterable[str],
    work: Callable[..., None],
    num_processes: int,
    limits: Limits,
    num_ranks: Callable[[str], int] | None = None,
) -> Iterator[Result]:
    """Yields the tasks' results as they end, `num_processes` of them at a time.

    Args:
        tasks: names.
        work: called with a name in a child, and with what sends any number of results; with `num_ranks` also with the
            child's rank.
        num_processes: running at a time.
        limits: of each thing that is sent.
        num_ranks: how many children a task has at a time; by default one.
    """
    waiting, running = iter(tasks), list[_Team]()
    while True:
        while len(running) < num_processes and (task := next(waiting, None)) is not None:
            works = [partial(work, rank=rank) for rank in range(num_ranks(task))] if num_ranks else [work]
            running.append(_Team([_Child(task, each, limits) for each in works]))
        if not running:
            return
        connection.wait([child.connection for team in running for child in team.running], _INTERVAL)
        for team in [team for team in running if team.has_ended()]:
            running.remove(team)
            yield team.result()


def _serve(task: str, work: Callable[[str, Send], None], there: connection.Connection) -> None:
    silent = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(silent, stream.fileno())  # models print and warn
    work(task, there.send)
    there.close()
