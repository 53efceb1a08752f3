"""Contenders in separate processes, run one after the other: none meets the memory that another one has used.

Processes that wait are stopped: each of gloo's threads wakes up a hundred times a second, on cores where others are
timed. Between their turns they give back memory that they don't use, so that many contenders fit: with what
`slipstream train` sets for malloc, a process would keep the most that it ever needed.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import resource
import signal
import tempfile
import time
from collections.abc import Callable, Iterable
from multiprocessing import parent_process
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist
from torch import multiprocessing, nn

_END_WITH_PARENT = 1  # prctl's PR_SET_PDEATHSIG: a stopped process can't watch its parent itself
_PATIENCE = 1800  # seconds: "auto" takes dozens of steps before it is ready


class Runs(Protocol):
    """What a contender's processes build: something that takes a step on this rank."""

    def step(self) -> float | None:
        """Runs forward and backward; returns the loss where this rank has it."""
        ...

    def parameters(self) -> Iterable[nn.Parameter]: ...

    def report(self) -> object:
        """Returns anything about the last step that can be pickled."""
        ...


class Contender:
    """`build(*arguments)` runs on each of some processes, which then take a step whenever `run` is called.

    They are the ranks of one process group, or `apart`: each alone in one, at the same time.
    """

    def __init__(
        self, name: str, build: Callable[..., Runs], *arguments: object, num_processes: int = 2, apart: bool = False
    ) -> None:
        self.name = name
        self.losses: list[float] = []
        self._folder = tempfile.TemporaryDirectory(prefix="slipstream-benchmark-")
        store = Path(self._folder.name) / "store"
        context = multiprocessing.get_context("spawn")
        self._connections: list[Connection] = []
        self._processes = []
        for rank in range(num_processes):
            here, there = context.Pipe()
            group = (0, 1, f"{store}-{rank}") if apart else (rank, num_processes, str(store))
            process = context.Process(target=_serve, args=(*group, there, build, arguments), daemon=True)
            process.start()
            atexit.register(process.kill)  # before multiprocessing's own end, which a stopped process would never hear
            self._connections.append(here)
            self._processes.append(process)
        self._has_started = False

    @property
    def process_ids(self) -> list[int]:
        """The system's numbers of its processes."""
        return [process.pid for process in self._processes if process.pid is not None]

    def start(self) -> None:
        """Waits until its processes have imported and joined their group, and stops them."""
        if not self._has_started:
            self._has_started = True
            self._ask("start", is_known=True)

    def wait(self) -> None:
        """Builds it. Contenders import side by side and are built one after the other: "auto" times what it plans."""
        self.start()
        self._ask("build")

    def run(self) -> float:
        """Takes a step; returns the slowest rank's seconds."""
        answers = self._ask("step")
        losses = [loss for _, loss in answers if loss is not None]  # type: ignore[misc]
        self.losses = losses or self.losses
        return max(seconds for seconds, _ in answers)  # type: ignore[misc]

    def rest(self) -> None:
        """Gives memory back until its next turn, whose first step pays for it."""
        self._ask("rest")

    def report(self) -> object:
        """Returns rank 0's report."""
        return self._ask("report")[0]

    def peak_memory(self) -> list[int]:
        """Returns the most bytes that each process has had resident, imports and all."""
        return self._ask("peak memory")  # type: ignore[return-value]

    def close(self) -> None:
        """Ends its processes, those too that are left where one has ended by itself."""
        if all(process.is_alive() for process in self._processes):
            self._signal(signal.SIGCONT)
            for connection in self._connections:
                connection.send("close")
        for process in self._processes:
            process.join(20)
            process.kill()
        self._folder.cleanup()

    def _ask(self, what: str, is_known: bool = False) -> list[object]:
        """Returns the answer of each process, and stops them; `is_known`: they answer this unasked."""
        try:
            self._signal(signal.SIGCONT)
            for connection in self._connections if not is_known else ():
                connection.send(what)
            answers = [self._answer(connection, what) for connection in self._connections]
            self._signal(signal.SIGSTOP)
            return answers
        except (OSError, EOFError) as error:
            codes = [process.exitcode for process in self._processes]
            raise RuntimeError(f"{self.name}: a process ended with {codes} (-9: no memory?)") from error

    def _signal(self, number: signal.Signals) -> None:
        for process in self._processes:
            assert process.pid is not None
            os.kill(process.pid, number)

    def _answer(self, connection: Connection, what: str) -> object:
        if not connection.poll(_PATIENCE):
            raise RuntimeError(f"{self.name} gave no answer to {what!r}")
        return connection.recv()


def build_all(contenders: Iterable[Contender]) -> None:
    """Builds one contender after the other, once the processes of all have started: what "auto" measures then has the
    cores to itself."""
    contenders = list(contenders)
    for contender in contenders:
        contender.start()
    for contender in contenders:
        contender.wait()


def _serve(
    rank: int,
    world_size: int,
    store: str,
    connection: Connection,
    build: Callable[..., Runs],
    arguments: tuple[object, ...],
) -> None:
    parent = parent_process()
    assert parent is not None
    os.environ["SLIPSTREAM_STALL_LIMIT"] = "off"  # stopped processes wait for their turn
    ctypes.CDLL(None).prctl(_END_WITH_PARENT, signal.SIGKILL)
    if os.getppid() != parent.pid:  # it ended while this process was starting
        return
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    connection.send("started")
    if connection.recv() == "build":
        runs = build(*arguments)
        parameters = list(runs.parameters())
        connection.send("built")
        while (what := connection.recv()) != "close":
            connection.send(_answer(what, runs, parameters))
    dist.destroy_process_group()


def _answer(what: str, runs: Runs, parameters: Iterable[nn.Parameter]) -> object:
    if what == "rest":
        return ctypes.CDLL(None).malloc_trim(0)
    if what == "peak memory":
        return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return _timed_step(runs, parameters) if what == "step" else runs.report()


def _timed_step(runs: Runs, parameters: Iterable[nn.Parameter]) -> tuple[float, float | None]:
    for parameter in parameters:
        parameter.grad = None
    dist.barrier()
    began = time.perf_counter()
    loss = runs.step()
    dist.barrier()
    return time.perf_counter() - began, loss
