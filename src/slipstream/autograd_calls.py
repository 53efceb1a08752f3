"""Calls a torch.autograd.Function for less, and makes one of two functions, of tensors and of their gradients.

The wrappers around a Function's forward and backward cost as much as small kernels: they look for transforms of
torch.func and guard second derivatives; here both are looked for, and only then served.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any

import torch
from torch import Tensor
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


class _GraphBeginning(torch.autograd.Function):
    """The identity; a leaf would hold its data as long as the graph lives."""

    @staticmethod
    def forward(ctx: Any, token: Tensor, tensor: Tensor, on_gradient: Callable[[Tensor], None]) -> Tensor:
        ctx.on_gradient = on_gradient
        return tensor.view_as(tensor)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None]:
        ctx.on_gradient(gradient)
        return None, None, None


begin_graph = direct_apply(_GraphBeginning)
"""Returns a tensor as the beginning of a graph, which keeps none of its memory, given an empty tensor that requires a
gradient, the tensor, and the function that gets its gradient."""

TensorFunction = Callable[..., Iterable[Tensor | None]]


class _WithBackward(torch.autograd.Function):
    """One function of tensors forward, another one of their gradients backward."""

    @staticmethod
    def forward(
        ctx: Any, forward: TensorFunction, backward: TensorFunction, fills: bool, *tensors: Tensor
    ) -> tuple[Tensor | None, ...]:
        ctx.of_gradients = backward
        ctx.set_materialize_grads(fills)
        return tuple(forward(*tensors))

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, None, *ctx.of_gradients(*gradients)


_apply = direct_apply(_WithBackward)


def with_backward(
    forward: TensorFunction, backward: TensorFunction, *tensors: Tensor, fills: bool = True
) -> tuple[Tensor, ...]:
    """Returns the results of `forward` on tensors, whose gradients `backward` computes from those of its results; of
    results on which nothing depends it gets zeros, or None unless it `fills` them in."""
    results: tuple[Tensor, ...] = _apply(forward, backward, fills, *tensors)
    return results
