"""`slipstream train` as a rank that is killed at a moment of its first life, under torchrun, or as a run's launcher:
killed_at.py RANK|launcher MODULE NAME COUNT train config.yaml ...

The process ends by SIGKILL at the COUNTth call of MODULE.NAME, which may be a method, in any of its threads; at COUNT 0
while MODULE is imported.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from importlib import import_module
from itertools import count
from operator import attrgetter
from pathlib import Path
from typing import Any


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class DiesAtImport:
    """Finds no module, and ends the process where it is asked for one."""

    def __init__(self, module: str) -> None:
        self._module = module

    def find_spec(self, name: str, *_: object) -> None:
        if name == self._module:
            die()


def dying(call: Callable[..., Any], at: int) -> Callable[..., Any]:
    calls = count(1)

    def called(*arguments: Any, **named: Any) -> Any:
        if next(calls) == at:
            die()
        return call(*arguments, **named)

    return called


def arm(module: str, name: str, at: int) -> None:
    if at == 0:
        sys.meta_path.insert(0, DiesAtImport(module))
        return
    holder, _, last = f"_.{name}".rpartition(".")
    owner = attrgetter(holder.removeprefix("_."))(import_module(module)) if holder != "_" else import_module(module)
    setattr(owner, last, dying(getattr(owner, last), at))


rank, module, name, at = sys.argv[1:5]
if (os.environ.get("RANK", "launcher"), os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) == (rank, "0"):
    arm(module, name, int(at))
sys.argv[:5] = [str(Path(__file__))]
import_module("slipstream.cli").main()
