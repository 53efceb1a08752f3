"""Takes requests to stop, as Slurm, Kubernetes and the owners of spot machines send them some time before the end."""

from __future__ import annotations

import math
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from slipstream.errors import StoppedRunError
from slipstream.launch.watched_run import launched_error_file
from slipstream.watchdog import end_watch

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
"""The signals that ask a run to save at the end of its step and to end. The third request ends it at once."""


# Seconds in which the same signal is the same request: Slurm sends it to every process of a step, launchers pass on
# what they get, and people type it twice.
_SAME_REQUEST = 5.0
_REQUESTS_TO_END = 3


class RequestCount:
    """Counts the requests to stop that have come."""

    def __init__(self) -> None:
        self._number = 0
        self._came: dict[int, float] = {}

    def take(self, number: int) -> bool:
        """Takes a signal; returns whether it is another request than those of the last seconds."""
        now = time.monotonic()
        is_other = now - self._came.get(number, -math.inf) > _SAME_REQUEST
        if is_other:
            self._came[number] = now
            self._number += 1
        return is_other

    @property
    def ends_at_once(self) -> bool:
        """Whether so many have come that nobody means to wait for a checkpoint."""
        return self._number >= _REQUESTS_TO_END


@contextmanager
def ended_by_requests() -> Iterator[None]:
    """Lets a request to stop end the body by StoppedRunError, as there is nothing in it to save."""

    def end(number: int, _frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        raise StoppedRunError(f"{name} ended the run while no rank was training; nothing new is to be saved")

    handlers = {each: signal.signal(each, end) for each in STOP_SIGNALS}
    try:
        yield
    finally:
        for each, handler in handlers.items():
            signal.signal(each, handler)


class StopRequest:
    """Whether this process was asked to stop, and by which signal.

    Until `begin` there is nothing to save: a request then ends the process at once. torchrun sends one to the ranks
    that are left when another has died, and they may wait for that one where nothing else would end them.

    A thread takes the signals through a pipe, so that the third one ends the process even where its main thread waits
    in gloo or NCCL, in which no handler of Python runs.
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
        requests = RequestCount()
        while True:
            number = os.read(reading, 1)[0]
            if number not in STOP_SIGNALS:
                continue
            if not self._has_begun:
                _end_at_once(signal.Signals(number).name)
            requests.take(number)
            if requests.ends_at_once:
                os._exit(128 + number)
            self.name = self.name or signal.Signals(number).name


def _end_at_once(name: str) -> None:
    text = f"{name} ended the run before its first step; nothing new is to be saved"
    end_watch(text)
    if launched_error_file() is None:  # our launcher says it for all ranks
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()
    os._exit(StoppedRunError.exit_code)
