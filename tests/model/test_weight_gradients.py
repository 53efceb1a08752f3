"""Layers that add their weight's gradient in place have PyTorch's gradients, at once or deferred."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from slipstream.model.weight_gradients import add_weight_gradients_in_place, deferring


def layers() -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Linear(5, 3), nn.Linear(5, 3, bias=False), Conv1D(3, 5)]


def backward(layer: nn.Module, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    layer(x).square().sum().backward()
    assert x.grad is not None
    return x.grad


@pytest.mark.parametrize("index", range(3))
@pytest.mark.parametrize("deferred", [False, True])
def test_gradients_are_pytorchs(index: int, deferred: bool) -> None:
    ours = layers()[index].double()
    theirs = copy.deepcopy(ours)
    add_weight_gradients_in_place(ours)
    inputs = torch.randn(2, 4, 7, 5, dtype=torch.float64)
    for x in inputs:  # the second adds to the first
        expected = backward(theirs, x)
        if deferred:
            with deferring() as work:
                found = backward(ours, x)
            assert len(work) == 1
            before = None if ours.weight.grad is None else ours.weight.grad.clone()
            work[0]()
            assert before is None or not torch.equal(before, ours.weight.grad)
        else:
            found = backward(ours, x)
        assert torch.allclose(found, expected, rtol=1e-13)
    for parameter, wanted in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.allclose(parameter.grad, wanted.grad, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("padding_idx", [None, 2])
def test_embeddings_add_rows(padding_idx: int | None) -> None:
    ours = nn.Embedding(6, 4, padding_idx=padding_idx).double()
    theirs = copy.deepcopy(ours)
    add_weight_gradients_in_place(ours)
    ids = torch.tensor([[0, 2, 2, 5], [5, 5, 1, 2]])
    for layer in (ours, theirs):
        for _ in range(2):
            layer(ids).pow(3).sum().backward()
    assert torch.allclose(ours.weight.grad, theirs.weight.grad, rtol=1e-13)


def test_a_frozen_weight_gets_no_gradient() -> None:
    layer = nn.Linear(5, 3).requires_grad_(False)
    add_weight_gradients_in_place(layer)
    with deferring() as work:
        backward(layer, torch.randn(2, 5))
    assert not work
    assert layer.weight.grad is None


def test_hooks_on_a_weight_still_run() -> None:
    layer = nn.Linear(5, 3)
    add_weight_gradients_in_place(layer)
    seen = []
    layer.weight.register_hook(lambda gradient: seen.append(gradient.shape))
    backward(layer, torch.randn(2, 5))
    assert seen == [(3, 5)]


def test_autocast_is_pytorchs() -> None:
    ours = nn.Linear(5, 3)
    theirs = copy.deepcopy(ours)
    add_weight_gradients_in_place(ours)
    x = torch.randn(2, 5)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(backward(ours, x), backward(theirs, x))
    assert torch.equal(ours.weight.grad, theirs.weight.grad)
