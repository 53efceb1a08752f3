"""Direct calls of autograd functions keep what their wrappers are for: torch.func, and no second derivatives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream.autograd_calls import differentiable_once, direct_apply


class Squared(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 2 * ctx.saved_tensors[0] * grad


squared = direct_apply(Squared)


def test_gradients() -> None:
    x = torch.tensor([1.0, -3.0], requires_grad=True)
    squared(x).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [2, -6]


def test_second_derivatives_are_refused() -> None:
    x = torch.ones(2, requires_grad=True)
    (first,) = torch.autograd.grad(squared(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()


def test_a_transform_is_told_what_the_function_lacks() -> None:
    """Called directly it would go wrong without a word."""
    with pytest.raises(RuntimeError, match="setup_context"):
        torch.func.grad(squared)(torch.tensor(1.0))
