"""Compiling with numba so that functions keep their types."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from numba import njit

Function = TypeVar("Function", bound=Callable[..., object])


def compiled(function: Function) -> Function:
    """Compile at the first call and keep the code in numba's cache on disk.

    The cache notices changes of the function's own file only: compiled functions call none of other files.
    """
    return njit(cache=True)(function)  # type: ignore[no-any-return]
