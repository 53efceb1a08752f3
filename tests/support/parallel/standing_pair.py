"""Two standing processes that run cases one after another; one that hangs ends them, and two new ones go on."""

from __future__ import annotations

import json
import select
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from torch.distributed import TCPStore

from support.paths import ROOT, TESTS, with_path


class StandingPair:
    """Runs cases of a program in two processes: `run` starts them where none wait."""

    def __init__(self, program: Path, arguments: tuple[str, ...], environment: Mapping[str, str]) -> None:
        self._program, self._arguments, self._environment = program, arguments, environment
        self._processes: list[subprocess.Popen[str]] = []
        self._store: TCPStore | None = None
        self.started = 0

    def run(self, case: str, seconds: float) -> str:
        """Returns why a case has failed on some rank, "" if it passed on both; within `seconds`, and a minute more
        where the processes must start first."""
        if not self._processes:
            self._start()
            seconds += 60
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(f"{case}\n")
            process.stdin.flush()
        problems, deadline = [], time.monotonic() + seconds
        for rank, process in enumerate(self._processes):
            answer = _line_of(process, deadline)
            if answer is None:
                what = f"ended with {process.returncode}" if process.poll() is not None else "hangs"
                problems.append(f"{case}: rank {rank} {what} after {seconds:.0f} s at most")
            elif problem := json.loads(answer):
                problems.append(f"{case}: rank {rank}: {problem}")
        if problems:
            self.close()  # the other rank may wait for one that has given up
        return "\n".join(problems)

    def close(self) -> None:
        """Ends the processes."""
        for process in self._processes:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                assert pipe is not None
                pipe.close()
        self._processes, self._store = [], None

    def _start(self) -> None:
        self._store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        self.started += 1
        for rank in range(2):
            place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
            place |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(self._store.port)}
            place |= {"TORCHELASTIC_USE_AGENT_STORE": "True"}
            self._processes.append(
                subprocess.Popen(
                    [sys.executable, str(self._program), *self._arguments],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                    env=with_path(TESTS, ROOT) | place | dict(self._environment),
                    cwd=ROOT,
                )
            )


def _line_of(process: subprocess.Popen[str], deadline: float) -> str | None:
    """Returns what a process answers; None where it ends, or says nothing until the deadline."""
    assert process.stdout is not None
    ready, _, _ = select.select([process.stdout], [], [], max(0.0, deadline - time.monotonic()))
    return (process.stdout.readline() or None) if ready else None
