"""The options of subcommands that take numbers: what is given, and the smallest value that is allowed."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from typer import BadParameter, Option

from slipstream.errors import SlipstreamError


def count(text: str, least: int = 1) -> Any:
    """Returns an option of a whole number, at least 1 or what `least` says, with its help."""
    return Option(help=text, parser=_whole_number(least), metavar="NUMBER")


def amount(text: str) -> Any:
    """Returns an option of a number of at least 0, with its help."""

    def parse(given: str | float) -> float:
        number = _number(given)
        if number is None or not 0 <= number < math.inf:
            raise BadParameter(f"{given!r}: give a number from 0")
        return number

    return Option(help=text, parser=parse, metavar="NUMBER")


def above_zero(text: str, unit: str, example: str) -> Any:
    """Returns an option of a number above 0 in a unit, such as bytes, with its help and an example."""

    def parse(given: str | float) -> float:
        number = _number(given)
        if number is None or not 0 < number < math.inf:
            raise BadParameter(f"{given!r}: give a number of {unit} above 0, such as {example}")
        return number

    return Option(help=text, parser=parse, metavar=unit.upper())


def numbers(text: str | None, name: str) -> list[float] | None:
    """Returns the numbers of an option that takes several, separated by commas; None where it isn't given."""
    try:
        return None if text is None else [float(part) for part in text.split(",")]
    except ValueError:
        raise SlipstreamError(f"--{name}={text} can't be read; give numbers separated by commas") from None


def _whole_number(least: int) -> Callable[[str | int], int]:
    def parse(given: str | int) -> int:
        number = _number(given)
        if number is None or not number.is_integer() or number < least:  # infinity is no integer
            raise BadParameter(f"{given!r}: give a whole number from {least}")
        return int(number)

    return parse


def _number(given: str | float) -> float | None:
    try:
        return float(given)
    except ValueError:
        return None
