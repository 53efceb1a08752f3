"""Calls a torch.autograd.Function for less: the wrappers around its forward and backward cost as much as small kernels.

They look for transforms of torch.func and guard second derivatives; here both are looked for, and only then served.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch.autograd.function import once_differentiable


def direct_apply(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """Returns `function.apply` without its steps for torch.func, unless a transform of that is active."""
    direct: Callable[..., Any] = super(torch.autograd.Function, function).apply  # type: ignore[misc]
    wrapped: Callable[..., Any] = function.apply

    def apply(*args: Any) -> Any:
        return (wrapped if torch._C._are_functorch_transforms_active() else direct)(*args)

    return apply


def differentiable_once(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Guards a backward as `once_differentiable` does, but leaves it as it is where no graph is recorded, as usual."""
    guarded: Callable[..., Any] = once_differentiable(backward)

    @wraps(backward)
    def either(ctx: Any, *grad_outputs: Any) -> Any:
        return (guarded if torch.is_grad_enabled() else backward)(ctx, *grad_outputs)

    return either
