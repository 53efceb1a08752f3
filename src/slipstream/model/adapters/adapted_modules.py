"""The modules that PEFT puts around a model's own, and the names of what is inside."""

from __future__ import annotations

from torch import nn

_INSIDE = ("base_layer", "original_module")  # of a module with an adapter, and of one with a trained copy


def is_wrapper(module: nn.Module) -> bool:
    """Returns whether PEFT has put this module around one of the model's."""
    return any(name in module._modules for name in _INSIDE)


def own_module(module: nn.Module) -> nn.Module:
    """Returns the model's own module, around which PEFT may have put others."""
    for name in _INSIDE:
        if name in module._modules:
            return own_module(module.get_submodule(name))
    return module
