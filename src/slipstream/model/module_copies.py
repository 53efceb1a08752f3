"""Copies modules together with the forwards and hooks that a user has set on them.

`copy.deepcopy` takes functions as they are: a forward that was wrapped, `layer.forward = lambda x: old(x) * 2`, or a
hook whose closure holds a module would go on running the original's modules, which other stages cut in other ways. So
the functions that are found on a copy get closures, and globals, in which every module is the copy's.
"""

from __future__ import annotations

import builtins
import copy
import dis
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from types import BuiltinFunctionType, CellType, FunctionType, MethodType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from slipstream.errors import SlipstreamError
from slipstream.model.own_code import HOOKS, cell_contents, codes_of, global_values

_Model = TypeVar("_Model", bound=nn.Module)
_AS_THEY_ARE = (type(None), bool, int, float, str, type, FunctionType, MethodType, BuiltinFunctionType)


def copy_with_shared_weights(model: _Model) -> _Model:
    """Returns a copy of the modules over the same parameters and buffers, which can be cut differently."""
    (copied,) = copy_modules([model], {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())})
    return copied


def copy_modules(
    models: Sequence[_Model], memo: dict[int, Any], copy_tensor: Callable[[Tensor], Tensor] | None = None
) -> list[_Model]:
    """Returns copies of modules in which `memo` has the replacement of a tensor or module, by its `id`.

    `copy_tensor` copies the other tensors, by default as `copy.deepcopy` does. The copies share all that the modules
    share, and objects that Python can't copy, such as a lock, with them. Functions set on the modules use the copies.
    """
    copier = _Copier(memo, copy_tensor)
    copies = [copier.of(model) for model in models]
    known = [*copier.modules, *(module for model in models for module in model.modules())]
    moved = {id(old): memo[id(old)] for old in known if id(old) in memo}
    for copied in copies:
        bind_functions(copied, moved)
    return copies


class _Copier:
    """Copies the contents of modules."""

    def __init__(self, memo: dict[int, Any], copy_tensor: Callable[[Tensor], Tensor] | None) -> None:
        self.modules: list[nn.Module] = []  # copied modules
        self._memo = memo
        self._copy_tensor = copy_tensor or self._copied_tensor

    def of(self, value: Any) -> Any:
        """Returns the copy of a value, always the same one."""
        if isinstance(value, _AS_THEY_ARE):
            return value
        if id(value) not in self._memo:
            self._copy(value)
        return self._memo[id(value)]

    def _copy(self, value: Any) -> None:
        memo = self._memo
        place = id(value)
        kind: Any = type(value)
        if isinstance(value, nn.Module) and not hasattr(kind, "__deepcopy__"):
            self.modules.append(value)
            memo[place] = made = kind.__new__(kind)
            vars(made).update({name: self.of(item) for name, item in vars(value).items()})
        elif isinstance(value, Tensor):
            memo[place] = self._copy_tensor(value)
        elif isinstance(value, torch.Generator):
            memo[place] = value.clone_state()
        elif kind in (list, tuple, set):
            memo[place] = kind(map(self.of, value))
        elif isinstance(value, dict):
            memo[place] = made = copy.copy(value)
            made.update({key: self.of(item) for key, item in value.items()})
        else:
            self._copy_by_python(value)

    def _copy_by_python(self, value: Any) -> None:
        # Classes such as those of parametrized modules copy themselves.
        if isinstance(value, nn.Module):
            self.modules += value.modules()
            for tensor in (*value.parameters(), *value.buffers()):
                self.of(tensor)
        trial = dict(self._memo)
        try:
            trial[id(value)] = copy.deepcopy(value, trial)
        # A class may raise anything when copied.
        except Exception:
            if isinstance(value, nn.Module):
                raise
            trial = {id(value): value}
        self._memo.update(trial)

    def _copied_tensor(self, tensor: Tensor) -> Tensor:
        # One with a graph is computed by a hook from parameters before every forward, as by the old `weight_norm`.
        copied: Tensor = copy.deepcopy(tensor, self._memo) if tensor.is_leaf else tensor.detach()
        return copied


def bind_functions(model: nn.Module, moved: Mapping[int, nn.Module]) -> None:
    """Makes the forwards and hooks set on the modules of `model` use the modules that `moved` gives for others' ids."""
    binding = _Binding(moved)
    for module in model.modules():
        attributes = vars(module)
        for name, value in attributes.items():
            if isinstance(value, FunctionType | MethodType | partial):
                attributes[name] = binding.of(value)
        for kind in HOOKS:
            hooks: OrderedDict[int, Any] = getattr(module, kind)
            for key, hook in hooks.items():
                hooks[key] = binding.of(hook)


class GlobalNames(dict[str, Any]):
    """The globals of a function on a copy: some names are the copy's, all others are looked up when they are used."""

    def __init__(self, names: dict[str, Any], own: Mapping[str, Any]) -> None:
        super().__init__(own, __builtins__=names.get("__builtins__", builtins), __name__=names.get("__name__"))
        self._names = names

    def __missing__(self, name: str) -> Any:
        return self._names[name]


class _Binding:
    """Replaces modules in the closures of functions and in their global values."""

    def __init__(self, moved: Mapping[int, nn.Module]) -> None:
        self._moved = moved
        # Id of the original -> the original, to keep its id taken, and its replacement.
        self._done: dict[int, tuple[Any, Any]] = {}

    def of(self, value: Any) -> Any:
        """Returns the value with every module in it replaced, the value itself where there is none."""
        if isinstance(value, nn.Module):
            return self._moved.get(id(value), value)
        if not isinstance(value, (FunctionType, MethodType, partial, tuple, list, dict, CellType)):
            return value
        if id(value) in self._done:
            return self._done[id(value)][1]
        # A function may close over itself, so it is entered first.
        self._done[id(value)] = value, value
        bound = self._bound(value)
        self._done[id(value)] = value, bound
        return bound

    def _bound(self, value: Any) -> Any:
        if isinstance(value, FunctionType):
            return self._function(value)
        if isinstance(value, MethodType):
            function, owner = self.of(value.__func__), self.of(value.__self__)
            same = function is value.__func__ and owner is value.__self__
            return value if same else MethodType(function, owner)
        if isinstance(value, partial):
            parts = self.of(value.func), self._all(value.args), self.of(value.keywords)
            same = parts[0] is value.func and parts[1] is value.args and parts[2] is value.keywords
            return value if same else partial(parts[0], *parts[1], **parts[2])
        if isinstance(value, dict):
            values = self._all([*value.values()])
            same = all(new is old for new, old in zip(values, value.values(), strict=True))
            return value if same else dict(zip(value, values, strict=True))
        return self._all(value)

    def _function(self, function: FunctionType) -> FunctionType:
        cells = function.__closure__ or ()
        contents = [cell_contents(cell) for cell in cells]
        named = global_values(function)
        parts = [contents, function.__defaults__, function.__kwdefaults__, vars(function), named]
        bound = [self.of(part) for part in parts]
        if all(new is old for new, old in zip(bound, parts, strict=True)):
            return function
        closure = tuple(
            cell if new is old else CellType(new) for cell, new, old in zip(cells, bound[0], contents, strict=True)
        )
        names = function.__globals__
        if bound[4] is not named:
            instructions = (instruction for code in codes_of(function) for instruction in dis.get_instructions(code))
            if assigned := {instruction.argval for instruction in instructions if instruction.opname == "STORE_GLOBAL"}:
                raise SlipstreamError(
                    f"{function.__qualname__}, which the model calls, assigns the global {min(assigned)} and reads "
                    "modules by global names, which differ on every stage. Keep what it assigns in an object."
                )
            names = GlobalNames(names, {name: new for name, new in bound[4].items() if new is not named[name]})
        made = FunctionType(function.__code__, names, function.__name__, bound[1], closure or None)
        made.__kwdefaults__ = bound[2]
        made.__qualname__ = function.__qualname__
        made.__doc__ = function.__doc__
        vars(made).update(bound[3])
        return made

    def _all(self, values: Any) -> Any:
        """Returns a list or tuple with the values' replacements, the given one where there are none."""
        bound = [self.of(value) for value in values]
        if all(new is old for new, old in zip(bound, values, strict=True)):
            return values
        return bound if isinstance(values, list) else tuple(bound)


def separate_modules(layers: Iterable[tuple[nn.Module, str, nn.Module]]) -> None:
    """Puts copies over the same weights in the place of modules that stand in several layers.

    Args:
        layers: the parent of each layer, its name there and the layer, in order. A layer may stand there twice.
    """
    taken: set[int] = set()
    for parent, name, layer in layers:
        if not taken.isdisjoint(map(id, layer.modules())):
            layer = copy_with_shared_weights(layer)
            parent._modules[name] = layer
        taken |= set(map(id, layer.modules()))
