"""Takes requests to stop, as Slurm, Kubernetes and the owners of spot machines send them some time before the end."""

from __future__ import annotations

import math
import os
import signal
import threading
import time

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
"""The signals that ask a run to save at the end of its step and to end; a second one, more than a second later, ends it
at once."""


# Seconds in which another signal is the same request: Slurm sends it to every process of a step, and launchers pass on
# what they get.
_SAME_REQUEST = 1.0


class StopRequest:
    """Whether this process was asked to stop, and by which signal.

    A thread takes the signals through a pipe, so that a second one ends the process even where its main thread waits in
    gloo or NCCL, in which no handler of Python runs.
    """

    def __init__(self) -> None:
        self.name = ""  # of the signal that came; empty before

    def listen(self) -> None:
        """Begins to take the signals. Call it in the main thread."""
        reading, writing = os.pipe()
        os.set_blocking(writing, False)
        signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
        for each in STOP_SIGNALS:
            signal.signal(each, lambda *_: None)  # the pipe gets those that have a handler
        threading.Thread(target=self._take, args=(reading,), name="stop requests", daemon=True).start()

    def _take(self, reading: int) -> None:
        came = math.inf
        while True:
            number = os.read(reading, 1)[0]
            if number in STOP_SIGNALS and time.monotonic() - came > _SAME_REQUEST:
                os._exit(128 + number)
            if number in STOP_SIGNALS and not self.name:
                came, self.name = time.monotonic(), signal.Signals(number).name
