"""The options that every command has: how much it says."""

from __future__ import annotations

import inspect
import sys
import traceback
from collections.abc import Callable
from typing import Annotated, Any, get_type_hints

from typer import BadParameter, Option

from slipstream.errors import SlipstreamError
from slipstream.terminal import LEVELS, Level, at_level, level_named, shows


def _level(name: str) -> str:
    try:
        return level_named(name, "--log-level")
    except SlipstreamError:
        raise BadParameter(f"{name!r}: give {', '.join(LEVELS[:-1])} or {LEVELS[-1]}") from None


Quiet = Annotated[bool, Option("--quiet", "-q", help="Say the result, warnings and errors alone.")]
LogLevel = Annotated[
    str | None,
    Option(
        parser=_level,
        autocompletion=lambda: [*LEVELS],
        metavar="LEVEL",
        help="The least that is said: debug, info, warning (as --quiet) or error. Default: info.",
        show_default=False,
    ),
]
_OPTIONS = {"quiet": (Quiet, False), "log_level": (LogLevel, None)}


def chosen_level(quiet: bool, log_level: str | None) -> Level | None:
    """Returns the level that the options say; None where neither is given. Raises SlipstreamError where both are."""
    if quiet and log_level is not None:
        raise SlipstreamError(f"--quiet and --log-level={log_level} both say how much is said; give one of the two")
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

    types = get_type_hints(command, include_extras=True)
    parameters = [each.replace(annotation=types[name]) for name, each in inspect.signature(command).parameters.items()]
    for name, (kind, default) in _OPTIONS.items():
        parameters.append(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind))
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {each.name: each.annotation for each in parameters}
    run.__name__, run.__doc__ = command.__name__, command.__doc__
    return run
