"""Records the calls of modules while a model runs: their arguments and outputs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn


@dataclass(eq=False)
class ModuleCall:
    """A call of a module that is known by this name."""

    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any = None


@contextmanager
def recorded_calls(modules: Mapping[str, nn.Module]) -> Iterator[list[ModuleCall]]:
    """Collects the calls of these modules in the order in which they begin."""
    calls: list[ModuleCall] = []

    def enter(name: str, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls.append(ModuleCall(name, args, kwargs))

    def leave(name: str, _module: nn.Module, _args: Any, output: Any) -> None:
        next(call for call in reversed(calls) if call.name == name).output = output

    with ExitStack() as hooks:
        for name, module in modules.items():
            hooks.enter_context(module.register_forward_pre_hook(partial(enter, name), with_kwargs=True))
            hooks.enter_context(module.register_forward_hook(partial(leave, name)))
        yield calls
