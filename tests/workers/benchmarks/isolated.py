"""A benchmark that is killed while its contender waits; it has printed the contender's process id before."""

from __future__ import annotations

import os
import signal

from benchmarks.isolated import Contender
from torch import nn


class Counts:
    """A contender whose steps are numbers."""

    def __init__(self) -> None:
        self.steps = 0

    def step(self) -> float:
        self.steps += 1
        return float(self.steps)

    def parameters(self) -> list[nn.Parameter]:
        return []

    def report(self) -> int:
        return self.steps


if __name__ == "__main__":
    contender = Contender("counts", Counts, num_processes=1)
    contender.wait()
    print(contender._processes[0].pid, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
