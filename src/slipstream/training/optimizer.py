"""Makes AdamW, with weight decay for matrices only, and its learning rate schedule."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch.nn import Parameter
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

from slipstream.training.config import OptimizerSection


def make_optimizer(parameters: Iterable[Parameter], settings: OptimizerSection) -> AdamW:
    """Returns AdamW over one rank's parameters; norms and biases (one dimension) don't decay."""
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": settings.weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    return AdamW(groups, lr=settings.lr, betas=settings.betas, eps=settings.eps)


def make_scheduler(optimizer: torch.optim.Optimizer, settings: OptimizerSection, num_steps: int) -> LambdaLR:
    """Returns the schedule of the learning rate over `num_steps` steps."""
    return LambdaLR(optimizer, lambda step: lr_ratio(step, num_steps, settings))


def lr_ratio(step: int, num_steps: int, settings: OptimizerSection) -> float:
    """Returns the share of `lr` at a step: a straight line up, then half a cosine down to `min_lr_ratio`.

    lr |   ,-.
       |  /    `.
       | /       `--._
       +-----------------> step
        warm-up
    """
    if step < settings.warmup_steps:
        return (step + 1) / settings.warmup_steps
    if settings.schedule == "constant":
        return 1.0
    done = (step - settings.warmup_steps) / max(1, num_steps - settings.warmup_steps)
    cosine = (1 + math.cos(math.pi * min(done, 1.0))) / 2
    return settings.min_lr_ratio + (1 - settings.min_lr_ratio) * cosine
