"""The exceptions that the command line prints without a traceback, and the hint for a misspelt name."""

from __future__ import annotations

import difflib
import re
import signal
from collections.abc import Iterable


def printable(text: str) -> str:
    """Returns a text that may be shown: with escapes such as \\x1b for the characters by which a file's or a host's
    name would steer a terminal, and without the passwords of addresses."""
    shown = _CONTROL.sub(lambda match: repr(match[0])[1:-1], text)
    return _PASSWORD.sub(r"\1***@", shown)


_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # all but tabs and ends of lines
_PASSWORD = re.compile(r"(\b[a-zA-Z][\w+.-]*:/{1,2}[^\s/@:]*:)[^\s/@]+@")  # a path of one slash had two before


class SlipstreamError(ValueError):
    """Bad input, found before anything runs. The command line prints it and exits with code 2."""

    def __init__(self, *message: object) -> None:
        super().__init__(*(printable(part) if isinstance(part, str) else part for part in message))


class NonFiniteError(RuntimeError):
    """Losses, gradients or weights are infinite or not numbers. The command line prints it and exits with code 3."""


class StoppedRunError(BaseException):
    """A run was asked to stop, and has; the message says how it goes on. The command line exits with code 75.

    No `Exception`: code that catches errors, as where a model's code is tried, lets it pass.
    """

    exit_code = 75  # sysexits.h calls it a temporary failure: to be tried again


STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
"""The signals that ask a run to save at the end of its step and to end. The third request ends it at once."""
NOTHING_TO_SAVE = "ended the run while no rank was training; there is nothing new to save"


class RankFailedError(RuntimeError):
    """A rank ended early; the message names the rank and the cause.

    Attributes:
        lost: the ranks whose processes were ended from outside, as far as a launcher of ours has seen.
    """

    exit_code = 1

    def __init__(self, *message: object, lost: tuple[int, ...] = ()) -> None:
        super().__init__(*message)
        self.lost = lost


class InterruptedRunError(RuntimeError):
    """Ctrl-C ended a run that can go on; the message says how."""


class LostRankError(RankFailedError):
    """Another rank ended, or doesn't answer; the message names the one that this rank waited for."""


def syntax_text(error: Exception) -> str:
    """Returns where a YAML, TOML or JSON text can't be read, and why, in one line."""
    mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
    if mark is None or problem is None:
        return " ".join(str(error).split())
    tabs = "; indent with spaces" if "'\\t'" in problem else ""
    return f"line {mark.line + 1}, column {mark.column + 1}: {problem}{tabs}"


_ALIKE = 0.65  # how alike two names must be, of 1: with less, logging_steps would be steps


def did_you_mean(name: str, known: Iterable[str], prefix: str = "") -> str:
    """Returns the end of a sentence that says `name` is unknown: "; did you mean 'gpipe'?", or "." if none is similar.

    Args:
        name: the given one.
        known: the allowed names, in lower case.
        prefix: written before the suggested name, such as the section of a configuration key.
    """
    near = difflib.get_close_matches(name.lower(), list(known), n=1, cutoff=_ALIKE)
    return f"; did you mean {prefix + near[0]!r}?" if near else "."
