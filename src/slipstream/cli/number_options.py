"""The options of subcommands that take a number, with the smallest value that is allowed."""

from typing import Any

from typer import Option


def count(text: str) -> Any:
    """Returns an option of at least 1, with its help."""
    return Option(help=text, min=1)


def amount(text: str) -> Any:
    """Returns an option of at least 0, with its help."""
    return Option(help=text, min=0)
