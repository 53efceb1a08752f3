"""The exceptions that the command line prints without a traceback, and the hint for a misspelt name."""

from __future__ import annotations

import difflib
import os
import re
import signal
from collections.abc import Iterable
from pathlib import Path


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
    """Returns where a YAML, TOML or JSON text can't be read, and why, in one line; of YAML also the line itself."""
    mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
    if mark is None or problem is None:
        return " ".join(str(error).split())
    said = f"line {mark.line + 1}, column {mark.column + 1}: {problem}"
    lines = (getattr(mark, "buffer", None) or "").rstrip("\0").splitlines()
    if "'\\t'" in problem:
        return f"{said}; indent with spaces"
    if len(lines) < 2 or mark.line >= len(lines):
        return said
    line, before = lines[mark.line], next((text for text in reversed(lines[: mark.line]) if text.strip()), "")
    return f"{said}, in {line!r}{_layout_hint(line, before)}"


def _layout_hint(line: str, before: str) -> str:
    """Returns the end of a sentence about two lines of YAML that don't fit each other; "" where they may well."""
    if glued := next(filter(None, map(colon_hint, (before, line))), ""):
        return f"; {glued}"
    indent, indent_before = (len(text) - len(text.lstrip(" ")) for text in (line, before))
    if indent == indent_before or line.lstrip().startswith("#"):
        return ""
    return (
        f"; it is indented by {indent}, and the line before, {before.strip()!r}, by {indent_before}: indent all "
        "settings of a section alike"
    )


def colon_hint(text: str) -> str:
    """Returns how to write a setting of YAML whose value follows the colon without a blank; "" where none does."""
    glued = _GLUED.fullmatch(text)
    return f"put a blank after the colon: {glued[1]}: {glued[2]}" if glued else ""


_GLUED = re.compile(r"\s*(?:- )?([a-zA-Z]\w*):((?!//)\S.*)")  # no address such as https://a


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


def path_hint(name: str | Path) -> str:
    """Returns what follows in a sentence that says there is no such file or folder: " (did you mean 'books/a.txt'?)",
    or "" if none is similar."""
    near = _near_path(Path(name))
    return f" (did you mean {near!r}?)" if near else ""


def _near_path(path: Path) -> str:
    """Returns what is here by the nearest name of the first part of a path that isn't; "" where there is none."""
    missing = next((part for part in (*reversed(path.parents), path) if not os.path.exists(part)), None)
    if missing is None:
        return ""
    try:
        known = os.listdir(missing.parent)
    except OSError:
        return ""
    names = difflib.get_close_matches(missing.name, known, cutoff=_ALIKE)
    near = (missing.with_name(name) / path.relative_to(missing) for name in names)
    return next((str(candidate) for candidate in near if os.path.exists(candidate)), "")


def is_surely_a_path(name: str) -> bool:
    """Returns whether a name can't be one on the hub, where it is NAME or OWNER/NAME."""
    return name.startswith((".", "/", "~")) or name.count("/") > 1 or name.endswith("/")


def check_not_misspelt(what: str, name: str) -> None:
    """Raises SlipstreamError, before the hub is asked, where `name` isn't here and can't be one of the hub, or has no
    owner and nearly the name of a file or folder here. `what` begins the message, such as "no model at 'modle'"."""
    if os.path.exists(name):
        return
    near = _near_path(Path(name))
    if is_surely_a_path(name):
        raise SlipstreamError(f"{what}: there is no such file or folder{path_hint(name)}")
    # A longer name is no misspelt one: gpt2 of the hub, where a run has left gpt2-mine.
    if near and "/" not in name and not near.startswith(name):
        raise SlipstreamError(
            f"{what}: there is no such file or folder here{path_hint(name)}, and a name on the hub is OWNER/{name}"
        )
