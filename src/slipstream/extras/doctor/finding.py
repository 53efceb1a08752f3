"""The findings of one check, and checks that can't end each other."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, as_completed
from dataclasses import dataclass
from math import ceil
from threading import Thread

from slipstream.errors import RankFailedError


@dataclass(frozen=True)
class Finding:
    """The result of a check on one topic."""

    topic: str
    text: str
    problem: str | None = None
    """Why training would fail, and what to do; None where it wouldn't."""
    advice: str | None = None
    """What would make more of this machine, although training runs without it."""


Check = Callable[[], Iterable[Finding]]


def isolated(topic: str, check: Check, is_vital: bool = False) -> list[Finding]:
    """Returns a check's findings. An exception ends this one alone, and is a finding; a problem where it is vital."""
    findings: list[Finding] = []
    try:
        findings.extend(check())
    except Exception as error:
        text = f"couldn't be determined: {error_text(error)}"
        findings.append(Finding(topic, text, text if is_vital else None))
    return findings


def error_text(error: BaseException) -> str:
    """Returns an exception's class and the first line of its message."""
    first = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {first}" if first else type(error).__name__


class ExchangeError(RankFailedError):
    """Raised where ranks couldn't exchange; the message names them and the exchange."""


class WrongBytesError(ExchangeError):
    """Raised where another message came than the one that was sent."""


def run_within(seconds: float, calls: Mapping[str, Callable[[], object]]) -> dict[str, float]:
    """Runs calls at the same time; returns the seconds after which each has ended, in the order in which they did.

    Raises:
        ExchangeError: names those that haven't ended in time, which go on, or the first that failed.
    """
    began = time.perf_counter()
    names = dict[Future[float], str]()
    for name, call in calls.items():
        future = Future[float]()
        names[future] = name
        # A call that hangs mustn't keep the program from ending.
        Thread(target=_run, args=(call, began, future), daemon=True).start()
    took: dict[str, float] = {}
    try:
        for future in as_completed(names, seconds):
            if (problem := future.exception()) is not None:
                raise ExchangeError(f"{names[future]} failed ({error_text(problem)})") from problem
            took[names[future]] = future.result()
    except TimeoutError:
        pending = [name for name in calls if name not in took]
        raise ExchangeError(f"{' and '.join(pending)} did not end within {ceil(seconds)} s") from None
    return took


def _run(call: Callable[[], object], began: float, future: Future[float]) -> None:
    try:
        call()
        future.set_result(time.perf_counter() - began)
    except Exception as error:
        future.set_exception(error)
