"""A decorator that compiles with numba and keeps the function's type."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from numba import njit

Function = TypeVar("Function", bound=Callable[..., object])


def compiled(function: Function) -> Function:
    """Compiles a function at its first call and keeps the code in numba's cache on disk.

    The cache notices changes of the function's own file only, so compiled functions must not call those of other files.
    """
    return njit(cache=True)(function)  # type: ignore[no-any-return]
