"""`slipstream train` whose ranks wait before some steps until they are asked to stop, or are killed:
held_at.py RANKS:STEP,... train config.yaml, with a step for each number of ranks.

So what happens meanwhile happens then, however fast the machine is.
"""

from __future__ import annotations

import sys
import time
from typing import Any

from slipstream.cli import main
from slipstream.train.trainer import Trainer
from support.timeouts import LIMIT

held, own = [tuple(map(int, each.split(":"))) for each in sys.argv.pop(1).split(",")], Trainer._train_step


def train_step(self: Trainer, step: int) -> Any:
    deadline = time.monotonic() + LIMIT
    while (self._run.world.size, step) in held and not self._stop.name and time.monotonic() < deadline:
        time.sleep(0.05)
    return own(self, step)


Trainer._train_step = train_step  # type: ignore[method-assign]
main()
