"""Takes requests to stop, as Slurm, Kubernetes and the owners of spot machines send them some time before the end."""

from __future__ import annotations

import math
import os
import signal
import sys
import threading
import time

from slipstream.errors import StoppedRunError
from slipstream.launch.watched_run import launched_error_file
from slipstream.watchdog import end_watch

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
"""The signals that ask a run to save at the end of its step and to end; a second one, more than a second later, ends it
at once."""


# Seconds in which another signal is the same request: Slurm sends it to every process of a step, and launchers pass on
# what they get.
_SAME_REQUEST = 1.0


class StopRequest:
    """Whether this process was asked to stop, and by which signal.

    Until `begin` there is nothing to save: a request then ends the process at once. torchrun sends one to the ranks
    that are left when another has died, and they may wait for that one where nothing else would end them.

    A thread takes the signals through a pipe, so that a second one ends the process even where its main thread waits in
    gloo or NCCL, in which no handler of Python runs.
    """

    def __init__(self) -> None:
        self.name = ""  # of the signal that came; empty before
        self._has_begun = False

    def listen(self) -> None:
        """Begins to take the signals. Call it in the main thread."""
        reading, writing = os.pipe()
        os.set_blocking(writing, False)
        signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
        for each in STOP_SIGNALS:
            signal.signal(each, lambda *_: None)  # the pipe gets those that have a handler
        threading.Thread(target=self._take, args=(reading,), name="stop requests", daemon=True).start()

    def begin(self) -> None:
        """Has requests wait from now on until this process asks for their `name`."""
        self._has_begun = True

    def _take(self, reading: int) -> None:
        came = math.inf
        while True:
            number = os.read(reading, 1)[0]
            if number in STOP_SIGNALS and not self._has_begun:
                _end_at_once(signal.Signals(number).name)
            if number in STOP_SIGNALS and time.monotonic() - came > _SAME_REQUEST:
                os._exit(128 + number)
            if number in STOP_SIGNALS and not self.name:
                came, self.name = time.monotonic(), signal.Signals(number).name


def _end_at_once(name: str) -> None:
    text = f"{name} ended the run before its first step; nothing new is to be saved"
    end_watch(text)
    if launched_error_file() is None:  # our launcher says it for all ranks
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()
    os._exit(StoppedRunError.exit_code)
