"""Times calls on a device."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

_SECONDS = 0.05  # of measuring
_MOST_CALLS = 50


def seconds_per_call(call: Callable[[], object], *on: torch.device) -> float:
    """Returns the seconds of a call, on average of about 50 ms of them; the first two, which also pay for memory and
    for choosing a kernel, don't count."""
    _elapsed(call, 2, on)
    number = max(1, min(_MOST_CALLS, int(_SECONDS / max(_elapsed(call, 1, on), 1e-9))))
    return _elapsed(call, number, on) / number


def _elapsed(call: Callable[[], object], times: int, on: tuple[torch.device, ...]) -> float:
    _wait(on)
    began = time.perf_counter()
    for _ in range(times):
        call()
    _wait(on)
    return time.perf_counter() - began


def _wait(on: tuple[torch.device, ...]) -> None:
    for device in on:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
