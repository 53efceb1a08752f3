"""`slipstream train` whose rank 1 is killed once, before a step: killed_once.py STEP train config.yaml ...

With REMOVED in the environment the run's folder is removed first.

It starts its ranks itself, by forking: they have what is changed here.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

from slipstream.cli import main
from slipstream.train.trainer import Trainer

at, own = int(sys.argv.pop(1)), Trainer._train_step
is_done = Path(sys.argv[2]).with_name("killed")


def train_step(self: Trainer, number: int) -> Any:
    if number == at and os.environ["RANK"] == "1" and not is_done.exists():
        is_done.touch()
        while "REMOVED" in os.environ and self._run.folder.path.exists():
            shutil.rmtree(self._run.folder.path, ignore_errors=True)
        os.kill(os.getpid(), signal.SIGKILL)
    return own(self, number)


Trainer._train_step = train_step  # type: ignore[method-assign]
main()
