"""Tells the code that a user has set on modules from that of their classes, and finds what such code refers to."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import partial
from types import CellType, CodeType, FunctionType, MethodType
from typing import Any
from weakref import ReferenceType

from torch import Tensor, nn

HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


def runs_class_code(module: nn.Module) -> bool:
    """Returns whether calling a module's `forward` runs its class's, as its class was defined.

    Only then may other code take the place of a known class's forward, or trace it.
    """
    if "forward" in vars(module):
        return False
    forward = inspect.unwrap(type(module).forward)
    homes = {getattr(sys.modules.get(kind.__module__), "__file__", None) for kind in type(module).__mro__}
    return not isinstance(forward, FunctionType) or forward.__code__.co_filename in homes


def has_own_code(module: nn.Module) -> bool:
    """Returns whether calling a module runs more than its class's code: a forward that was set, or hooks."""
    return not runs_class_code(module) or any(getattr(module, kind) for kind in HOOKS)


def global_values(function: FunctionType) -> dict[str, Any]:
    """Returns the values that a function, or one inside of it, may find by a global name, without functions of
    other files."""
    names = dict[str, Any]()
    home = function.__code__.co_filename
    for name in (name for code in codes_of(function) for name in code.co_names):
        with suppress(KeyError):
            names[name] = function.__globals__[name]
    return {
        name: value
        for name, value in names.items()
        if not isinstance(value, FunctionType) or value.__code__.co_filename == home
    }


def codes_of(function: FunctionType) -> Iterator[CodeType]:
    """Yields the code of a function and of those inside of it."""
    codes = [function.__code__]
    while codes:
        code = codes.pop()
        codes += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
        yield code


def cell_contents(cell: CellType) -> Any:
    """Returns what a cell of a function's closure holds, None where nothing is assigned yet."""
    try:
        return cell.cell_contents
    except ValueError:
        return None


def code_referents(code: FunctionType | MethodType | partial[Any]) -> list[Any]:
    """Returns what code holds: a function's closure and defaults, a method's function and object, a partial's
    function and arguments."""
    if isinstance(code, MethodType):
        return [code.__func__, code.__self__]
    if isinstance(code, partial):
        return [code.func, *code.args, *code.keywords.values()]
    keywords = (code.__kwdefaults__ or {}).values()
    return [*map(cell_contents, code.__closure__ or ()), *(code.__defaults__ or ()), *keywords]


def references(values: Iterable[object]) -> Iterator[nn.Module | Tensor]:
    """Yields the modules and tensors that values hold: in containers, closures, defaults and partials, and in the
    attributes of objects that are called. Of a module its parameters and buffers, too."""
    seen: set[int] = set()
    waiting: list[Any] = [*values]
    while waiting:
        value = waiting.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, nn.Module | Tensor):
            yield value
            # A module may be in no layer, and its weights in one.
            if isinstance(value, nn.Module):
                yield from (*value.parameters(), *value.buffers())
        elif isinstance(value, dict):
            waiting += value.values()
        elif isinstance(value, list | tuple | set | frozenset):
            waiting += value
        elif isinstance(value, FunctionType | MethodType | partial):
            waiting += [*code_referents(value), getattr(value, "__dict__", {})]
        elif isinstance(value, ReferenceType):
            waiting.append(value())
        elif callable(value) and not isinstance(value, type):
            waiting.append(getattr(value, "__dict__", {}))
