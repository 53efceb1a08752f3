"""Optimizers whose state checkpoints hold: PyTorch's, and one with numbers and a tensor of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer


class SignedMomentum(Optimizer):
    """An optimizer as people write them: a count that is an int, a rate that is a float, a tensor of one element."""

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float = 1e-2) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group["lr"])

    def _update(self, parameter: nn.Parameter, lr: float) -> None:
        state = self.state[parameter]
        if not state:
            state |= {"count": 0, "rate": 1.0, "warm": torch.ones(1), "mean": torch.zeros_like(parameter)}
        assert isinstance(state["count"], int)
        state["count"] += 1
        state["rate"] *= 0.9
        state["warm"] *= 0.5
        state["mean"].lerp_(parameter.grad, 0.1 + float(state["warm"]) / 4)
        parameter.sub_(state["mean"] * (lr * state["rate"] / state["count"]))


OPTIMIZERS: dict[str, Callable[[Iterable[nn.Parameter]], Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=1e-3, amsgrad=True),
    "rmsprop": lambda parameters: torch.optim.RMSprop(parameters, lr=1e-3, momentum=0.5, centered=True, eps=1e-4),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=1e-3, lr_decay=0.1, eps=1e-4),
    "nadam": lambda parameters: torch.optim.NAdam(parameters, lr=1e-3),
    "adamax": lambda parameters: torch.optim.Adamax(parameters, lr=1e-3),
    "own": SignedMomentum,
}
