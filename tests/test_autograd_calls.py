"""Direct calls of autograd functions keep what their wrappers are for: torch.func, and no second derivatives.

And functions that are given: the beginning of a graph, and a function with a backward of its own.
"""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream.autograd_calls import begin_graph, differentiable_once, direct_apply, with_backward


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


def test_a_graph_begins_at_a_tensor_that_it_does_not_keep() -> None:
    gradients: list[Tensor] = []
    received = torch.tensor([2.0, 3.0])
    memory = weakref.ref(received.untyped_storage())
    begun = begin_graph(torch.empty(0, requires_grad=True), received, gradients.append)
    total = (5 * begun).sum()
    del received, begun
    assert memory() is None
    torch.autograd.backward(total)
    assert [gradient.tolist() for gradient in gradients] == [[5, 5]]


@pytest.mark.parametrize("fills", [True, False])
def test_a_function_is_given_its_backward(fills: bool) -> None:
    """It gets zeros, or None, for a result on which nothing depends."""
    given: list[Tensor | None] = []

    def backward(*gradients: Tensor | None) -> list[Tensor | None]:
        given.extend(gradients)
        return [gradients[0], None]

    a, b = (torch.tensor([value], requires_grad=True) for value in (2.0, 3.0))
    first, _ = with_backward(lambda a, b: (7 * a, a + b), backward, a, b, fills=fills)
    torch.autograd.backward((3 * first).sum())
    assert [None if gradient is None else gradient.tolist() for gradient in given] == [[3], [0] if fills else None]
    assert (a.grad, b.grad) == (torch.tensor([3.0]), None)
