"""Ten steps of examples/own_loop.py, of which a rank is killed in a step of this start, once a checkpoint is complete;
in step 0: in none. dying_loop.py FOLDER STEP
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from examples import own_loop
from slipstream import Pipeline
from slipstream.checkpoint import CheckpointFolder

folder, at = Path(sys.argv[1]), int(sys.argv[2])
own, num_steps = Pipeline.step, 0


def step(self: Pipeline, *arguments: Any, **named: Any) -> Any:
    global num_steps
    num_steps += 1
    if num_steps == at and os.environ["RANK"] == "1":
        while not CheckpointFolder(folder).steps():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
    return own(self, *arguments, **named)


Pipeline.step = step  # type: ignore[method-assign]
own_loop.main(folder, num_steps=10)
