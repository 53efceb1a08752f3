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


def isolated(topic: str, check: Check, is_vital: bool = False) -> list[Finding]:
    """Returns what a check finds. An exception ends this one alone, and is found too; a problem where it is vital."""
    found: list[Finding] = []
    try:
        found.extend(check())
    except Exception as error:
        text = f"not found out: {error_text(error)}"
        found.append(Finding(topic, text, text if is_vital else None))
    return found


def error_text(error: BaseException) -> str:
    """Returns an exception's class and the first line of its message."""
    first = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {first}" if first else type(error).__name__
