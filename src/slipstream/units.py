"""Formats seconds, bytes, counts and shares, everywhere the same way. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

_DURATIONS = ((1, "s"), (1e3, "ms"), (1e6, "µs"), (1e9, "ns"))  # units per second
_LONG_DURATIONS = ((86400, "days"), (3600, "hours"), (60, "minutes"), (1, "seconds"))  # seconds per unit
BYTE_UNITS = ("B", "kB", "MB", "GB", "TB")


def seconds_text(seconds: float) -> str:
    """Returns a short duration with three digits: 12.3 s, 45.6 ms, 7.89 µs; whole seconds from 100 on."""
    per_second, unit = duration_unit(seconds)
    return f"{_three_digits(seconds * per_second)} {unit}" if seconds else "0 s"


def long_duration_text(seconds: float) -> str:
    """Returns a duration in the largest unit of which there are two: 34 days, 3.5 hours, 0.2 seconds."""
    size, unit = next(((size, unit) for size, unit in _LONG_DURATIONS if seconds >= 2 * size), _LONG_DURATIONS[-1])
    amount = seconds / size
    return f"{amount:,.0f} {unit}" if amount >= 10 else f"{amount:.1f} {unit}"


def duration_unit(seconds: float) -> tuple[float, str]:
    """Returns the unit that suits a duration: how many there are in a second, and its name."""
    return next((unit for unit in _DURATIONS if seconds * unit[0] >= 1 or not seconds), _DURATIONS[-1])


def bytes_text(num_bytes: float) -> str:
    """Returns a size with three digits: 61.2 GB, in powers of 1000."""
    size, unit = bytes_unit(num_bytes)
    return f"{_three_digits(num_bytes / size)} {unit}"


def sizes_text(sizes: Mapping[Any, float]) -> str:
    """Returns what takes how many bytes, the largest first, without what takes none."""
    largest_first = sorted(sizes.items(), key=lambda pair: -pair[1])
    return ", ".join(f"{name} {bytes_text(size)}" for name, size in largest_first if size > 0)


def bytes_unit(num_bytes: float) -> tuple[float, str]:
    """Returns the unit that suits a size: the bytes in it, and its name."""
    power = next((power for power in range(len(BYTE_UNITS)) if num_bytes < 999.5 * 1000**power), len(BYTE_UNITS) - 1)
    return 1000.0**power, BYTE_UNITS[power]


def plural(number: int, noun: str) -> str:
    """Returns a number and its noun: 2 slices, 1 slice."""
    return f"{number:,} {noun}" + ("" if number == 1 else "es" if noun.endswith(("ch", "sh", "ss")) else "s")


def numbers_text(numbers: Sequence[float], between: str = ", ") -> str:
    """Returns numbers one after the other; of more than eight the first and the last ones."""
    words = [f"{value:g}" if value < 1e6 else f"{value:.0f}" for value in numbers]
    return between.join(words if len(words) <= 8 else [*words[:4], "...", *words[-3:]])


def table_text(rows: Sequence[Sequence[str]], align: Callable[[str, int], str] = str.ljust) -> str:
    """Returns rows of cells as aligned columns: the first one's cells to the left, the others' as `align` has them."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ([row[0].ljust(widths[0]), *map(align, row[1:], widths[1:])] for row in rows)
    return "\n".join("  ".join(cells).rstrip() for cells in lines)


def times_text(number: int) -> str:
    """Returns how often something has happened."""
    return "once" if number == 1 else f"{number} times"


def count_text(number: float) -> str:
    """Returns a whole number with its thousands marked; three digits and M from ten million on."""
    return f"{_three_digits(number / 1e6)} M" if number >= 1e7 else f"{number:,.0f}"


def share_text(share: float | None) -> str:
    """Returns a fraction in percent, or a dash where it is unknown."""
    return "-" if share is None else f"{share:.1%}"


def _three_digits(number: float) -> str:
    return f"{number:.2f}" if number < 9.995 else f"{number:.1f}" if number < 99.95 else f"{number:,.0f}"


def numbers_meant(text: str, is_whole: bool) -> list[str]:
    """Returns the numbers that a text such as 128k, 80GB, 1,000 or 5% may mean, as they are typed; none for others."""
    if _GROUPED.fullmatch(text):
        return [text.replace(",", "")]
    found = _WITH_UNIT.fullmatch(text.strip())
    if found is None:
        return []
    number, prefix, binary, unit = float(found[1]), found[2].lower(), found[3], found[4]
    if unit == "%":
        return [] if prefix or is_whole else [f"{number / 100:g}"]
    if not prefix:
        # 15B are billions of tokens or parameters, and 80000000000B bytes.
        return [_typed(number * 1e9 if number < _FEWEST_BYTES else number)] if unit else []
    power = "kmgt".index(prefix) + 1
    meant = [number * 1024**power] if binary else [number * 1000**power]
    if is_whole and prefix == "k" and not binary and not unit:  # of tokens both are usual
        meant.append(number * 1024)
    return [_typed(value) for value in meant]


_GROUPED = re.compile(r"\d{1,3}(,\d{3})+")
_WITH_UNIT = re.compile(r"(\d+(?:\.\d+)?)\s?([kKmMgGtT]?)(i?)([bB%]?)")
_FEWEST_BYTES = 10_000


def _typed(number: float) -> str:
    """Returns a number as short as it can be typed: 128000, 80e9."""
    if number >= 1e8 and number % 1e8 == 0:
        return f"{number / 1e9:.15g}e9"
    return f"{number:.15g}"
