"""Finds the class of an optimizer by its name, checks its arguments, and makes one for a rank's parameters."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from importlib import import_module
from typing import Any

import torch
from torch.nn import Parameter
from torch.optim import Optimizer

from slipstream.errors import SlipstreamError, did_you_mean
from slipstream.training.config import OptimizerSection

_FIELDS = ("lr", "betas", "eps", "weight_decay")  # of the section, that are arguments of the class


def make_optimizer(parameters: Iterable[Parameter], settings: OptimizerSection) -> Optimizer:
    """Returns the optimizer of one rank's parameters; norms and biases (one dimension) don't decay.

    Raises SlipstreamError where there is no such class here.
    """
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim >= 2]},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    made: Optimizer = find_class(settings.name)(groups, **_given(settings), **settings.args)
    return made


def find_class(name: str) -> Any:
    """Returns the class of torch.optim with this name in small letters, or the one at an import path.

    Raises SlipstreamError where there is none, or it isn't an optimizer.
    """
    if "." in name:
        return _imported(name)
    named = {each.__name__.lower(): each for each in vars(torch.optim).values() if _is_optimizer(each)}
    if name.lower() not in named:
        raise SlipstreamError(
            f"optimizer.name={name} isn't in torch.optim{did_you_mean(name, named).rstrip('.')}; give "
            f"{', '.join(sorted(named))}, or an import path such as package.module.Class"
        )
    return named[name.lower()]


def _imported(path: str) -> type[Optimizer]:
    module, _, name = path.rpartition(".")
    try:
        found = getattr(import_module(module), name)
    except Exception as error:  # a module may raise anything
        reason = f"{type(error).__name__}: {error}"
        raise SlipstreamError(
            f"optimizer.name={path} can't be imported ({reason}); install its package on every machine, or give a name "
            "of torch.optim, such as adamw"
        ) from error
    if not _is_optimizer(found):
        raise SlipstreamError(f"optimizer.name={path} isn't a subclass of torch.optim.Optimizer; give one that is")
    return found  # type: ignore[no-any-return]


def _is_optimizer(found: Any) -> bool:
    return inspect.isclass(found) and issubclass(found, Optimizer) and found is not Optimizer


def _given(settings: OptimizerSection) -> dict[str, Any]:
    """Returns the fields that are arguments of the class and aren't left to it."""
    return {name: value for name in _FIELDS if (value := getattr(settings, name)) is not None}


def check_arguments(settings: OptimizerSection) -> None:
    """Raises SlipstreamError for an argument that the class doesn't take, with those that it takes."""
    kind = find_class(settings.name)
    parameters = inspect.signature(kind).parameters
    taken = [name for name in parameters if name != "params"]
    if any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values()):
        return  # its trial says what is wrong
    for prefix, names in (("optimizer", _given(settings)), ("optimizer.args", settings.args)):
        for name, value in names.items():
            if name not in taken:
                left_out = "leave it out, or give null where a file has it"
                raise SlipstreamError(
                    f"{prefix}.{name}={value} with optimizer.name={settings.name}: {kind.__name__} takes no {name}, "
                    f"but {', '.join(taken)}; {left_out}"
                )
    needed = [name for name in taken if parameters[name].default is inspect.Parameter.empty]
    if missing := [name for name in needed if name not in {**_given(settings), **settings.args}]:
        section = "optimizer" if missing[0] in _FIELDS else "optimizer.args"
        raise SlipstreamError(f"optimizer.name={settings.name} needs {missing[0]}; give {section}.{missing[0]}")
