"""Copies layers for a trial, with whatever they hold: what Python can't copy, such as a lock, the copies share."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from slipstream.model.attached_code import bind_functions

_AS_THEY_ARE = (type(None), bool, int, float, str, type, FunctionType, MethodType, BuiltinFunctionType)


def copy_layers(
    modules: Sequence[nn.Module], memo: dict[int, Any], copy_tensor: Callable[[Tensor], Tensor]
) -> list[nn.Module]:
    """Returns copies of layers, with `copy_tensor` of the tensors in them.

    What several modules share, their copies share too. Functions set on the modules use the copies. `memo` has, by
    `id`, what takes the place of what; the caller keeps it for further layers.
    """
    moved: dict[int, nn.Module] = {}

    def copied(value: Any) -> Any:
        return _copied(value, memo, moved, copied, copy_tensor)

    copies = [copied(module) for module in modules]
    for module in copies:
        bind_functions(module, moved)
    return copies


def _copied(
    value: Any,
    memo: dict[int, Any],
    moved: dict[int, nn.Module],
    copied: Callable[[Any], Any],
    copy_tensor: Callable[[Tensor], Tensor],
) -> Any:
    if isinstance(value, _AS_THEY_ARE):
        return value
    if id(value) in memo:
        return memo[id(value)]
    if isinstance(value, nn.Module):
        made: Any = value.__new__(type(value))
        memo[id(value)] = moved[id(value)] = made
        vars(made).update({name: copied(each) for name, each in vars(value).items()})
        return made
    if isinstance(value, Tensor):
        return memo.setdefault(id(value), copy_tensor(value))
    if isinstance(value, torch.Generator):
        return memo.setdefault(id(value), value.clone_state())
    if type(value) in (list, tuple, set):
        return memo.setdefault(id(value), type(value)(copied(each) for each in value))
    if isinstance(value, dict):
        made = copy.copy(value)
        for key, each in value.items():
            made[key] = copied(each)
        return memo.setdefault(id(value), made)
    trial = dict(memo)
    try:
        made = copy.deepcopy(value, trial)
    except Exception:  # whatever its class raises
        return value
    memo.update(trial)
    return made
