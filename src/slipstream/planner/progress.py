"""Reports of a search's progress."""

from __future__ import annotations

from collections.abc import Callable

ProgressReport = Callable[[str, int, int], None]  # the task, how many are done, out of how many (0: unknown)


def untold(task: str, done: int, total: int) -> None:
    """Reports nothing."""
