"""Parameters of tests: which combinations `make test` runs, and which it leaves to `make test-more`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from _pytest.mark import ParameterSet


def each_once(rows: Iterable[Any], columns: Iterable[Any]) -> list[ParameterSet]:
    """Every combination of a row and a column; `make test` runs each row and each column at least once.

    A row or column of several parameters is a tuple. The other combinations are marked `more`.
    """
    rows, columns = list(rows), list(columns)
    return [
        pytest.param(*_values(row), *_values(column), marks=[pytest.mark.more] * (i % len(columns) != j % len(rows)))
        for i, row in enumerate(rows)
        for j, column in enumerate(columns)
    ]


def first_of(values: Iterable[Any], count: int = 1, others: str = "more") -> list[ParameterSet]:
    """All values; those after the first ones have the mark `others`, and so `make test` leaves them out."""
    mark = getattr(pytest.mark, others)
    return [pytest.param(*_values(each), marks=[mark] * (n >= count)) for n, each in enumerate(values)]


def _values(given: Any) -> tuple[Any, ...]:
    return given if isinstance(given, tuple) else (given,)
