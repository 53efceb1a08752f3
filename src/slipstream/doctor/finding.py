"""What one check has found out, and checks that can't end each other."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """What was found out about one topic."""

    topic: str
    text: str
    problem: str | None = None
    """Why training would fail, and what to do; None where it wouldn't."""
    advice: str | None = None
    """What would make more of this machine, although training runs without it."""


Check = Callable[[], Iterable[Finding]]


def isolated(topic: str, check: Check) -> list[Finding]:
    """Returns what the check finds; an exception ends it alone, and is one of its findings."""
    found: list[Finding] = []
    try:
        found.extend(check())
    except Exception as error:
        found.append(Finding(topic, f"not found out: {error_text(error)}"))
    return found


def error_text(error: BaseException) -> str:
    """Returns an exception's class and the first line of its message."""
    first = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {first}" if first else type(error).__name__
