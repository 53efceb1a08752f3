"""The output of commands on a terminal: how much of it, where spinners are shown, and when there are colours.

How much is said is an environment variable, so that every rank that is started knows it. Colours follow NO_COLOR and
FORCE_COLOR; a pipe gets lines and no bars in either case.
"""

from __future__ import annotations

import logging
import os
import re
import stat
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Never, get_args

from slipstream.errors import SlipstreamError, did_you_mean, printable

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

Level = Literal["debug", "info", "warning", "error"]
LEVELS: tuple[Level, ...] = get_args(Level)
_VARIABLE = "SLIPSTREAM_LOG_LEVEL"
_OF_TRANSFORMERS = "TRANSFORMERS_VERBOSITY"  # which it reads when it is imported
_PACKAGE = "slipstream"


def shows(level: Level) -> bool:
    """Returns whether messages of this level are shown.

    Raises:
        SlipstreamError: where the environment names a level that there isn't.
    """
    return LEVELS.index(level) >= LEVELS.index(level_named(os.environ.get(_VARIABLE, "info"), _VARIABLE))


def level_named(name: str, given_as: str) -> Level:
    """Returns the level of this name. Raises SlipstreamError, which says how it was `given_as`, where there is none."""
    for level in LEVELS:
        if name == level:
            return level
    hint = did_you_mean(name, LEVELS)
    raise SlipstreamError(f"{given_as}={name} isn't a level{hint} Choose one of {', '.join(LEVELS)}")


@contextmanager
def at_level(level: Level | None) -> Iterator[None]:
    """Shows messages of this level and those above it, in this process and in those that it starts; None: as before."""
    chosen = {} if level is None else {_VARIABLE: level}
    if level == "error" and _OF_TRANSFORMERS not in os.environ:
        chosen[_OF_TRANSFORMERS] = "error"
    before = {name: os.environ.get(name) for name in chosen}
    os.environ.update(chosen)
    try:
        log_details()
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
        log_details()


def log_details(speaker: str = "") -> None:
    """Writes what the package logs to standard error, where messages of level debug are shown; `speaker` is a rank."""
    logger = logging.getLogger(_PACKAGE)
    for handler in [handler for handler in logger.handlers if isinstance(handler, _Details)]:
        logger.removeHandler(handler)
    if shows("debug"):
        logger.addHandler(_Details(speaker))
        logger.setLevel(logging.DEBUG)


class _Details(logging.StreamHandler):  # type: ignore[type-arg]
    """Writes the log as lines that name the speaker."""

    def __init__(self, speaker: str) -> None:
        super().__init__(sys.stderr)
        self.setFormatter(logging.Formatter(f"debug: {speaker}{': ' if speaker else ''}%(message)s"))


class LastingStream:
    """A standard stream that goes on in a file where its reader has gone, as after `| head`, or nothing can be written.

    A regular file on a full disk may have room again later: its errors are raised.
    """

    def __init__(self, stream: Any) -> None:
        self._stream, self._file, self._is_lost = stream, Path(os.devnull), False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Writes a text; see the class."""
        with self._kept():
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """Writes the rest; see the class."""
        with self._kept():
            self._stream.flush()

    def go_on_in(self, file: Path) -> None:
        """Appends to this file from now on where the stream is lost; before, it is written nowhere."""
        self._file = file
        if self._is_lost:
            self._redirect()

    @contextmanager
    def _kept(self) -> Iterator[None]:
        if self._is_lost and not self._is_in_a_file():  # its folder has been removed, and may be there again
            self._redirect()
        try:
            yield
        except OSError:
            if stat.S_ISREG(os.fstat(self._stream.fileno()).st_mode):
                raise
            self._is_lost = True
            self._redirect()
            self._stream.flush()  # the text is still in its buffer

    def _is_in_a_file(self) -> bool:
        status = os.fstat(self._stream.fileno())
        return stat.S_ISREG(status.st_mode) and status.st_nlink > 0

    def _redirect(self) -> None:
        for file in (self._file, Path(os.devnull)):
            with suppress(OSError):
                descriptor = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW, 0o666)
                os.dup2(descriptor, self._stream.fileno())
                os.close(descriptor)
                return


def outlast_readers() -> None:
    """Lets this process go on for good where nobody reads its output any more."""
    if sys.stdout is sys.__stdout__ and sys.stderr is sys.__stderr__:  # nobody else has put something there
        streams: Any = sys
        streams.stdout, streams.stderr = LastingStream(sys.stdout), LastingStream(sys.stderr)


def go_on_in(file: Path) -> None:
    """Says where output goes that nobody reads any more."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, LastingStream):
            stream.go_on_in(file)


def make_console(stderr: bool = False) -> Console:
    """Returns a console on standard output, or on standard error for a command whose output is its result alone.

    It has colours on a terminal, unless NO_COLOR says otherwise, and where FORCE_COLOR asks for them; bars and spinners
    on a terminal alone.
    """
    from rich.console import Console

    is_terminal = (sys.stderr if stderr else sys.stdout).isatty()
    return Console(highlight=False, soft_wrap=True, stderr=stderr, force_interactive=None if is_terminal else False)


_FILE_COLUMNS = 10_000  # where the output isn't a terminal: no cell is cut and no line broken
_TRAILING = re.compile(r"(?: |\x1b\[[\d;]*m)+$", re.MULTILINE)  # blanks at a line's end, and ends of colours


def print_table(table: Table) -> None:
    """Prints a table, in a pipe or a file without the blanks that fill its cells up at the ends of lines."""
    console = make_console()
    if console.is_interactive:
        console.print(table)
        return
    console.width = _FILE_COLUMNS
    with console.capture() as capture:
        console.print(table)
    console.file.write(_TRAILING.sub(lambda match: match[0].replace(" ", ""), capture.get()))


@contextmanager
def spinner(description: str) -> Iterator[Callable[[str], None]]:
    """Shows a spinner on standard error while the body runs, if that is a terminal; yields a setter of its text."""
    console = make_console(stderr=True)
    if not (console.is_interactive and shows("info")):
        yield lambda _text: None
        return
    with console.status(description) as status:
        yield status.update


def fail(message: str, code: int, at_once: bool = False) -> Never:
    """Says an error and exits; `at_once` without taking all modules down first, which takes seconds on a busy machine,
    or may wait for a rank that is gone, and also where an import would swallow an exception."""
    if sys.stderr.isatty():
        print("\033[?25h", end="", file=sys.stderr)  # shows the cursor, which a stopped rank may have hidden
    sys.stderr.write(f"{printable(message)}\n")  # at once: ranks that fail at the same time may share a terminal
    if at_once:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(code)
    sys.exit(code)
