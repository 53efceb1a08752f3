"""Parameters of tests: which combinations `make test` runs, and which it leaves to `make test-all` and others."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product
from typing import Any

import pytest
from _pytest.mark import ParameterSet


def each_once(rows: Iterable[Any], columns: Iterable[Any], count: int | None = None) -> list[ParameterSet]:
    """Every combination of a row and a column; `make test` runs each row and each column at least once.

    A row or column of several parameters is a tuple. With a `count`, `make test` runs the first ones alone and `make
    test-all` each other row and column once. `make exactness` runs the other combinations.
    """
    rows, columns = list(rows), list(columns)
    places = list(product(range(len(rows)), range(len(columns))))
    once = [(i, j) for i, j in places if i % len(columns) == j % len(rows)]
    return [
        pytest.param(
            *_values(rows[i]),
            *_values(columns[j]),
            marks=[] if (i, j) in once[:count] else [pytest.mark.more if (i, j) in once else pytest.mark.grid],
        )
        for i, j in places
    ]


def first_of(values: Iterable[Any], count: int = 1, others: str = "more") -> list[ParameterSet]:
    """All values; those after the first ones have the mark `others`, and so `make test` leaves them out."""
    mark = getattr(pytest.mark, others)
    return [pytest.param(*_values(each), marks=[mark] * (n >= count)) for n, each in enumerate(values)]


def _values(given: Any) -> tuple[Any, ...]:
    return given if isinstance(given, tuple) else (given,)
