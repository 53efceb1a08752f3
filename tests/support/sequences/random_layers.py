"""Random sequences of layers, and what they give when they run unsplit, a microbatch after the other."""

from __future__ import annotations

import copy
from collections import defaultdict

import torch
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from slipstream import Skip
from support.architectures import gradients

CLASSES, CHANNELS, SIZE = 5, 4, 4


class Mix(nn.Module):
    """Of two tensors, which it would notice if they were interchanged."""

    def forward(self, tensors: tuple[Tensor, Tensor]) -> Tensor:
        x, y = tensors
        return x + 2 * y.sin()


class Fan(nn.Module):
    """A tensor as three: itself, another, and one that has no gradient."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return x, x.tanh(), x > 0


class Mask(nn.Module):
    """Uses each of the three; hands one on as it is."""

    def forward(self, tensors: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        x, y, mask = tensors
        return x * mask + x.sin() * y, y


class AddInPlace(nn.Module):
    def forward(self, tensors: tuple[Tensor, ...]) -> Tensor:
        return tensors[0].mul(2).add_(tensors[1])


def _block(kind: str, skip_name: str) -> list[nn.Module]:
    """From (b, C, H, W) to the same."""
    conv = [nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1)]
    skip = Skip(skip_name)
    return {
        "conv": conv,
        "norm": [nn.BatchNorm2d(CHANNELS)],
        "relu": [*conv, nn.ReLU(inplace=True)],
        "nested": [nn.Sequential(nn.Conv2d(CHANNELS, CHANNELS, 1), nn.Sequential(nn.Tanh()))],
        "tuple": [Fan(), Mask(), AddInPlace()],
        "dropout": [nn.Dropout(0.3)],
        "skip": [skip.stash(), *conv, nn.SiLU(), skip.pop(), Mix()],
        "short skip": [nn.Tanh(), skip.stash(), skip.pop(), Mix()],
    }[kind]


KINDS = ("conv", "norm", "relu", "nested", "tuple", "dropout", "skip", "short skip")


@st.composite
def sequences(draw: st.DrawFn, kinds: tuple[str, ...] = KINDS) -> list[str]:
    return draw(st.lists(st.sampled_from(kinds), min_size=2, max_size=5))


def build(kinds: list[str], around: bool = True) -> nn.Sequential:
    """In float64, from 2 channels to classes; `around` puts a skip around everything."""
    torch.manual_seed(0)
    outer = Skip("outer")
    blocks = [layer for number, kind in enumerate(kinds) for layer in _block(kind, f"skip {number}")]
    ends = ([outer.stash()], [outer.pop(), Mix()]) if around else ([], [])
    layers = [nn.Conv2d(2, CHANNELS, 1), *ends[0], *blocks, *ends[1]]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(CHANNELS * SIZE * SIZE, CLASSES)).double()


def costs(model: nn.Sequential) -> list[float]:
    """Of every layer, those with parameters most, so that each stage has some."""
    layers = [module for module in model.modules() if not isinstance(module, nn.Sequential)]
    return [5.0 if any(True for _ in layer.parameters()) else 1.0 for layer in layers]


def batch(rows: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(rows, 2, SIZE, SIZE, dtype=torch.float64, generator=generator)
    targets = torch.randint(0, CLASSES, (rows,), generator=generator)
    if rows > 2:
        targets[1] = -100
    return inputs, targets


class Unsplit:
    """A copy of the model after a step: loss, gradients, and batch norms as the whole mini-batch moves them."""

    def __init__(self, model: nn.Sequential, inputs: Tensor, targets: Tensor, num_microbatches: int) -> None:
        self.model = copy.deepcopy(model).train()
        norms = [module for module in self.model.modules() if isinstance(module, nn.BatchNorm2d)]
        fresh = copy.deepcopy(norms)
        seen: defaultdict[nn.Module, list[Tensor]] = defaultdict(list)
        hooks = [norm.register_forward_pre_hook(lambda norm, args: seen[norm].append(args[0].data)) for norm in norms]
        self.loss = torch.zeros((), dtype=torch.float64)
        parts = zip(inputs.tensor_split(num_microbatches), targets.tensor_split(num_microbatches), strict=True)
        for rows, labels in parts:
            total = functional.cross_entropy(self.model(rows), labels, reduction="sum")
            loss = total / (targets != -100).sum()
            loss.backward()
            self.loss += loss.detach()
        for hook in hooks:
            hook.remove()
        for norm, new in zip(norms, fresh, strict=True):
            new(torch.cat(seen[norm]))
            norm.load_state_dict(new.state_dict())
        self.gradients = gradients(self.model)

    def evaluate(self, inputs: Tensor, targets: Tensor) -> Tensor:
        with torch.no_grad():
            return functional.cross_entropy(self.model.eval()(inputs), targets)
