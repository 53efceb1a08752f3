"""Runs cases of the programs beside it, one after the other in one group of processes: group.py PROGRAM/CASE ...

Of `staged`, cases of processes.py with messages by way of host memory.
"""

from __future__ import annotations

import importlib
import sys

import torch

from support import slow_copies
from support.parallel.group_cases import Case, run_cases


def find(name: str) -> Case:
    """The case, which draws the same whatever runs before it."""
    program, _, case = name.partition("/")
    if program == "staged":  # as between ranks that share a GPU, with copies that take a while
        slow_copies.install()
        program = "processes"
    run: Case = importlib.import_module(f"workers.pipeline.{program}").CASES[case]

    def seeded() -> None:
        torch.manual_seed(0)
        run()

    return seeded


if __name__ == "__main__":
    run_cases({name: find(name) for name in sys.argv[1:]})
