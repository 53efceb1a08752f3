"""Two standing processes that run cases one after another; one that hangs ends them, and two new ones go on."""

from __future__ import annotations

import json
import select
import socket
import time
from multiprocessing.process import BaseProcess
from pathlib import Path

from torch.distributed import TCPStore

from support.forked import start_standing


class StandingPair:
    """Runs cases of a program in two processes: `run` starts them where none wait."""

    def __init__(self, program: Path, arguments: tuple[str, ...]) -> None:
        self._program, self._arguments = program, arguments
        self._ranks: list[tuple[BaseProcess, socket.socket]] = []
        self._store: TCPStore | None = None

    def run(self, case: str, seconds: float) -> str:
        """Returns why a case has failed on some rank, "" if it passed on both; within `seconds`, and a minute more
        where the processes must start first."""
        if not self._ranks:
            self._store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
            self._ranks = start_standing(2, self._store.port, self._program, *self._arguments)
            seconds += 60
        for _, words in self._ranks:
            words.sendall(f"{case}\n".encode())
        problems, deadline = [], time.monotonic() + seconds
        for rank, (process, words) in enumerate(self._ranks):
            answer = _line_of(words, deadline)
            if not answer:
                process.join(1.0)
                what = "hangs" if process.exitcode is None else f"ended with {process.exitcode}"
                problems.append(f"{case}: rank {rank} {what} after {seconds:.0f} s at most")
            elif problem := json.loads(answer):
                problems.append(f"{case}: rank {rank}: {problem}")
        if problems:
            self.close()  # the other rank may wait for one that has given up
        return "\n".join(problems)

    def close(self) -> None:
        """Ends the processes."""
        for process, words in self._ranks:
            process.kill()
            process.join()
            words.close()
        self._ranks, self._store = [], None


def _line_of(words: socket.socket, deadline: float) -> bytes:
    """Returns what a process answers; b"" where it ends, or says nothing until the deadline."""
    ready, _, _ = select.select([words], [], [], max(0.0, deadline - time.monotonic()))
    with words.makefile("rb") as lines:
        return lines.readline() if ready else b""
