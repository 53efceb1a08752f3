"""A decorator that compiles with numba and keeps the function's type."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FunctionType
from typing import Any, Protocol, TypeVar

from numba import njit
from numba.core.caching import FunctionCache
from numba.core.dispatcher import Dispatcher

Function = TypeVar("Function", bound=Callable[..., object])
_has_told = False  # that there is no place for the cache


def compiled(function: Function, makes_arrays: bool = True) -> Function:
    """Compiles a function at its first call and keeps the code in numba's cache on disk.

    The cache notices changes of the function's own file, and of those of the compiled functions that it calls.
    """
    global _has_told
    dispatcher = njit(function, _nrt=makes_arrays)
    try:
        dispatcher._cache = _RenewedCache(function)
    except RuntimeError as error:  # neither the package nor the user's cache folder can be written
        if not _has_told:
            sys.stderr.write(
                f"{error}: it is compiled anew in each process, for half a minute or more. Name a folder that can be "
                "written in NUMBA_CACHE_DIR\n"
            )
        _has_told = True
    return dispatcher  # type: ignore[no-any-return]


def compiled_in_place(function: Function) -> Function:
    """Compiles a function that makes no arrays or lists, so that it needn't count the references to any.

    Counting takes several times as long as the rest of a short function that is given many arrays.
    """
    return compiled(function, makes_arrays=False)


class CompiledFunctions(Protocol):
    """Functions that were compiled together."""

    def __call__(self, function: Function) -> Function:
        """Returns the compiled form of one of them."""
        ...


def compiled_together(in_place: Sequence[Any], making_arrays: Sequence[Any]) -> CompiledFunctions:
    """Compiles functions of one module, which stay as they are, with the compiled ones in the place of those they call.

    Args:
        in_place: those that make no arrays or lists, each after those that it calls.
        making_arrays: the others, which may call those, each after those of its kind that it calls.
    """
    names = dict(in_place[0].__globals__)
    for function in (*in_place, *making_arrays):
        copied = FunctionType(function.__code__, names, function.__name__, function.__defaults__)
        names[function.__name__] = compiled(copied, makes_arrays=function in making_arrays)

    def compiled_form(function: Function) -> Function:
        return names[function.__name__]  # type: ignore[no-any-return]

    return compiled_form


class _RenewedCache(FunctionCache):  # type: ignore[misc]
    """Numba's cache, begun again where its index can't be read.

    The index names the classes of arguments, such as named tuples. An upgrade may have renamed one, and numba reads
    the whole index before it sees that the function's file has changed.
    """

    def __init__(self, function: Any) -> None:
        super().__init__(function)
        stamps = [(status.st_mtime, status.st_size) for status in map(Path.stat, sorted(_sources(function)))]
        self._cache_file._source_stamp = tuple(stamps)

    def load_overload(self, *signature: Any) -> Any:
        try:
            return super().load_overload(*signature)
        except Exception:  # pickle raises the classes' own errors
            self.flush()
            return None


def _sources(function: Any) -> set[Path]:
    """Returns the files of a function and of all compiled functions that it calls."""
    called = (function.__globals__.get(name) for name in function.__code__.co_names)
    others = (_sources(dispatcher.py_func) for dispatcher in called if isinstance(dispatcher, Dispatcher))
    return {Path(function.__code__.co_filename)}.union(*others)
