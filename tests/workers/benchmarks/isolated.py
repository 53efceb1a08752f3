"""A benchmark that ends while its contender waits, after it has printed the contender's process id.

It is killed or, with the argument `fail`, raises an error.
"""

from __future__ import annotations

import os
import signal
import sys

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
    if "fail" in sys.argv:
        raise SystemExit("another contender has failed")
    os.kill(os.getpid(), signal.SIGKILL)
