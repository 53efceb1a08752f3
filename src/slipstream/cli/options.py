"""Options that several subcommands have: how much is said, bounded numbers, the model, and new files."""

from __future__ import annotations

import inspect
import math
import sys
import traceback
from collections.abc import Callable
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, get_type_hints

from typer import BadParameter, Context, Option
from typer.core import TyperCommand

from slipstream.errors import SlipstreamError
from slipstream.terminal import LEVELS, Level, at_level, level_named, shows
from slipstream.units import numbers_meant


def _level(name: str) -> str:
    try:
        return level_named(name, "--log-level")
    except SlipstreamError:
        raise BadParameter(f"{name!r}: give {', '.join(LEVELS[:-1])} or {LEVELS[-1]}") from None


Quiet = Annotated[bool, Option("--quiet", "-q", help="Print only the result, warnings and errors.")]
LogLevel = Annotated[
    str | None,
    Option(
        parser=_level,
        autocompletion=lambda: [*LEVELS],
        metavar="LEVEL",
        help="Minimum log level: debug, info, warning (same as --quiet) or error. Default: info.",
        show_default=False,
    ),
]
_OPTIONS = {"quiet": (Quiet, False), "log_level": (LogLevel, None)}


def chosen_level(quiet: bool, log_level: str | None) -> Level | None:
    """Returns the level that the options say; None where neither is given. Raises SlipstreamError where both are."""
    if quiet and log_level is not None:
        raise SlipstreamError(f"--quiet and --log-level={log_level} both set the log level; give one of the two")
    if quiet:
        return "warning"
    return None if log_level is None else level_named(log_level, "--log-level")


def with_output_options(command: Callable[..., None]) -> Callable[..., None]:
    """Returns the command with these options, which hold while it runs; at the level debug an error has its place."""

    def run(*, quiet: bool, log_level: str | None, **arguments: Any) -> None:
        with at_level(chosen_level(quiet, log_level)):
            try:
                command(**arguments)
            except SlipstreamError:
                if shows("debug"):
                    traceback.print_exc(file=sys.stderr)
                raise
            except PermissionError as error:
                if shows("debug"):
                    raise
                raise SlipstreamError(
                    f"{error.filename}: {error.strerror}; give a path that you may read and write"
                ) from error

    types = get_type_hints(command, include_extras=True)
    known = inspect.signature(command).parameters
    parameters = [parameter.replace(annotation=types[name]) for name, parameter in known.items()]
    for name, (kind, default) in _OPTIONS.items():
        parameters.append(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind))
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    run.__name__ = command.__name__
    run.__doc__ = command.__doc__
    return run


class CommandWithSettings(TyperCommand):
    """A command that also takes settings of a configuration, wherever they are typed; its context has them as `args`.

    A value may be typed after a space, as `--training.steps 100`.
    """

    # A word without dashes is refused below, with a message that it is no setting.
    allow_extra_args = True

    def parse_args(self, ctx: Context, args: list[str]) -> list[str]:  # type: ignore[override]
        """Takes the settings out of the typed words, and leaves the rest to the command's own options."""
        options = {name for parameter in self.get_params(ctx) for name in (*parameter.opts, *parameter.secondary_opts)}
        rest = []
        settings = []
        typed = list(args)
        while typed:
            word = typed.pop(0)
            name, equals, _ = word.partition("=")
            is_misspelt = (
                not equals
                and "." not in name
                and get_close_matches(name[2:], [option.lstrip("-") for option in options], cutoff=0.7)
            )
            if not word.startswith("--") or name in options or word == "--" or is_misspelt:
                rest.append(word)
                continue
            follows = not equals and bool(typed) and not typed[0].startswith("--") and typed[0] not in options
            settings.append(f"{word}={typed.pop(0)}" if follows else word)
        super().parse_args(ctx, rest)
        ctx.args += settings
        return ctx.args


def count(text: str, least: int = 1) -> Any:
    """Returns an option of a whole number, at least 1 or `least`, with its help."""
    return _number(text, f"a whole number from {least}", lambda value: value.is_integer() and value >= least, int)


def amount(text: str) -> Any:
    """Returns an option of a number of at least 0, with its help."""
    return _number(text, "a number from 0", lambda value: 0 <= value < math.inf)


def above_zero(text: str, unit: str, example: str) -> Any:
    """Returns an option of a number above 0 in a unit, such as bytes, with its help and an example."""
    what = f"a number of {unit} above 0, such as {example}"
    return _number(text, what, lambda value: 0 < value < math.inf, metavar=unit.upper())


def _number(
    text: str, what: str, allows: Callable[[float], bool], kind: Callable[[float], Any] = float, metavar: str = "NUMBER"
) -> Any:
    def parse(given: str | float) -> Any:
        try:
            value = float(given)
        except ValueError:
            value = math.nan
        if not allows(value):
            numbers = numbers_meant(str(given), is_whole=kind is int)
            meant = [number for number in numbers if allows(float(number))]
            raise BadParameter(f"{given!r}: give {what}" + (f"; did you mean {' or '.join(meant)}?" if meant else ""))
        return kind(value)

    return Option(help=text, parser=parse, metavar=metavar)


def name_or_number(text: str) -> str | float:
    """Returns the number that a text is, else the text."""
    try:
        return float(text)
    except ValueError:
        return text


def listed(kind: Callable[[str], Any], **texts: str | None) -> dict[str, list[Any]]:
    """Returns the values, by option, of the lists separated by commas that are given."""
    values: dict[str, list[Any]] = {}
    for name, text in texts.items():
        try:
            if text is not None:
                values[name] = [kind(part.strip()) for part in text.split(",")]
        except ValueError as error:
            option = f"--{name.replace('_', '-')}={text}"
            raise SlipstreamError(f"{option} can't be read ({error}); give values separated by commas") from None
    return values


Best = Annotated[
    bool,
    Option(
        "--best",
        help="Use the checkpoint with the lowest validation loss, of a run with checkpoint.keep_best: true.",
    ),
]

TrustRemoteCode = Annotated[
    bool,
    Option(
        "--trust-remote-code",
        help="Run Python code that comes with the model. It has all your permissions: read it first.",
    ),
]


Overwrite = Annotated[bool, Option("--overwrite", help="Replace files that exist.")]


def check_new_file(path: Path, option: str, overwrite: bool) -> None:
    """Checks that a file can be written.

    Raises:
        SlipstreamError: where its folder doesn't exist, or the file does and `overwrite` is False.
    """
    if not path.parent.is_dir():
        raise SlipstreamError(f"{option}={path}: there is no folder {path.parent}; create it first")
    if path.is_dir():
        raise SlipstreamError(f"{option}={path} is a folder; name a file in it")
    if path.exists() and not overwrite:
        raise SlipstreamError(f"{option}={path} exists; choose another file, or give --overwrite to replace it")
