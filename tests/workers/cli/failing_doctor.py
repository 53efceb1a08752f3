"""`slipstream doctor` on ranks of which one fails: RANK HOW AT [ARGUMENTS].

HOW is "stop", "end", "garble" (it sends wrong bytes) or "elsewhere" (it can't write to its folder). AT is the number of
the message at which it does, 0 for the start.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any

import torch.distributed as dist

from slipstream.cli import main
from support.timeouts import LIMIT

failing, how, at = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
is_failing = os.environ["RANK"] == str(failing)
isend, sent = dist.isend, 0


def fail() -> None:
    if how == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(LIMIT)  # this thread may go on for a moment
    elif how == "end":
        os._exit(0)


def send(tensor: Any, *arguments: Any, **options: Any) -> Any:
    global sent
    sent += 1
    if sent == at:
        if how == "garble":
            tensor = tensor + 1
        fail()
    return isend(tensor, *arguments, **options)


if is_failing and at == 0:
    fail()
if is_failing:
    dist.isend = send
elsewhere = ["--folder", "/proc/runs"] if is_failing and how == "elsewhere" else []
sys.argv = ["slipstream", "doctor", *sys.argv[4:], *elsewhere]
main()
