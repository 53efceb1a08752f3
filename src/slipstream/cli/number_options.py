"""The options of subcommands that take numbers, with the smallest value that is allowed."""

from typing import Any

from typer import Option

from slipstream.errors import SlipstreamError


def count(text: str) -> Any:
    """Returns an option of at least 1, with its help."""
    return Option(help=text, min=1)


def amount(text: str) -> Any:
    """Returns an option of at least 0, with its help."""
    return Option(help=text, min=0)


def numbers(text: str | None, name: str) -> list[float] | None:
    """Returns the numbers of an option that takes several, separated by commas; None where it isn't given."""
    try:
        return None if text is None else [float(part) for part in text.split(",")]
    except ValueError:
        raise SlipstreamError(f"--{name}={text} can't be read; give numbers separated by commas") from None
