"""How long a test waits for other processes."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

Found = TypeVar("Found")

# Seconds before a test says that they hang: less than pytest itself, and several times what the slowest test takes.
LIMIT = 800
# The same for what takes a few on a quiet machine: less than what gloo and stores wait by themselves, 300 and more.
SOON = 200


def wait_until(find: Callable[[], Found | None], problem: str, seconds: float = LIMIT) -> Found:
    """Returns what is found as soon as it is true; says the problem where it isn't after so many seconds."""
    deadline = time.monotonic() + seconds
    while not (found := find()):
        assert time.monotonic() < deadline, problem
        time.sleep(0.02)
    return found
