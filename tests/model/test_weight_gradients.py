"""Layers that add their weight's gradient in place have PyTorch's gradients, whether added immediately or deferred."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from slipstream.model.weight_gradients import add_weight_gradients_in_place, compiled_modules, defer_weight_gradients
from support.weights import undeferred_weights


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
            with defer_weight_gradients() as work:
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
    with defer_weight_gradients() as work:
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


class Experts(nn.Module):
    """Weights in one 3-D tensor, as transformers keeps experts."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2, 3, 3))


class LowRank(nn.Linear):
    """A subclass, whose forward may be anything."""


def test_what_stays_whole_is_listed() -> None:
    model = nn.Sequential(nn.Linear(3, 3), LowRank(3, 3), Experts(), nn.LayerNorm(3), nn.Embedding(4, 3, max_norm=1.0))
    assert undeferred_weights(model) == ["1.weight", "2.weight", "4.weight"]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, when its compiler is imported
def test_what_is_compiled_stays_whole() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.Linear(3, 3)), torch.compile(nn.Linear(3, 3)))
    model[1].compile()
    assert undeferred_weights(model) == ["1.0.weight", "2._orig_mod.weight"]
    add_weight_gradients_in_place(model)
    assert compiled_modules(model) == ["1", "2"]
    assert "forward" in vars(model[0])
    assert "forward" not in vars(model[1][0])


@pytest.mark.parametrize("index", range(3))
def test_outputs_may_be_changed_in_place(index: int) -> None:
    ours = layers()[index].double()
    theirs, x = copy.deepcopy(ours), torch.randn(4, 7, 5, dtype=torch.float64)
    add_weight_gradients_in_place(ours)
    for layer in (ours, theirs):
        output = layer(x)
        output += 1
        output.square().sum().backward()
    for ours_, theirs_ in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.allclose(ours_.grad, theirs_.grad, rtol=0, atol=1e-12)
