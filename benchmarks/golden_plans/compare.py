"""What differs between two answers: decisions exactly, numbers within a tolerance."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import zip_longest
from typing import Any


def differences(wanted: Any, found: Any, tolerance: float, where: str = "plan") -> Iterator[str]:
    """Yields a line for every value that differs. Floats may differ by `tolerance` of the larger one."""
    if isinstance(wanted, dict) and isinstance(found, dict):
        for key in sorted(wanted.keys() | found.keys()):
            yield from differences(wanted.get(key), found.get(key), tolerance, f"{where}.{key}")
    elif isinstance(wanted, list) and isinstance(found, list):
        for place, (before, now) in enumerate(zip_longest(wanted, found)):
            yield from differences(before, now, tolerance, f"{where}[{place}]")
    elif isinstance(wanted, float) and isinstance(found, float):
        if abs(wanted - found) > tolerance * max(abs(wanted), abs(found)):
            yield f"{where}: {wanted!r} before, {found!r} now"
    elif wanted != found:
        yield f"{where}: {wanted!r} before, {found!r} now"
