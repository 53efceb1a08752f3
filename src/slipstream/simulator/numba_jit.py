"""A decorator that compiles with numba and keeps the function's type."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from numba import njit
from numba.core.caching import FunctionCache

Function = TypeVar("Function", bound=Callable[..., object])


def compiled(function: Function) -> Function:
    """Compiles a function at its first call and keeps the code in numba's cache on disk.

    The cache notices changes of the function's own file only, so compiled functions must not call those of other files.
    """
    dispatcher = njit(function)
    dispatcher._cache = _RenewedCache(function)
    return dispatcher  # type: ignore[no-any-return]


class _RenewedCache(FunctionCache):  # type: ignore[misc]
    """Numba's cache, begun again where its index can't be read.

    The index names the classes of arguments, such as named tuples. An upgrade may have renamed one, and numba reads
    the whole index before it sees that the function's file has changed.
    """

    def load_overload(self, *signature: Any) -> Any:
        try:
            return super().load_overload(*signature)
        except Exception:  # pickle raises what the classes raise
            self.flush()
            return None
