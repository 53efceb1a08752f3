"""The learning rate of each step: a cosine or a constant after a warm-up, or one of transformers' schedules."""

from __future__ import annotations

import inspect
import math
from functools import partial

import torch
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from transformers.optimization import TYPE_TO_SCHEDULER_FUNCTION, get_scheduler

from slipstream.errors import SlipstreamError, did_you_mean
from slipstream.training.config import OptimizerSection
from slipstream.training.optimizers.optimizer_choice import make_optimizer

_OWN = ("cosine", "constant")
_FROM_RUN = ("optimizer", "num_warmup_steps", "num_training_steps", "last_epoch")  # arguments that aren't to be given


def make_scheduler(optimizer: Optimizer, settings: OptimizerSection, num_steps: int) -> LambdaLR:
    """Returns the schedule of the learning rate over `num_steps` steps."""
    if settings.schedule in _OWN:
        return LambdaLR(optimizer, partial(lr_ratio, num_steps=num_steps, settings=settings))
    made: LambdaLR = get_scheduler(
        settings.schedule, optimizer, settings.warmup_steps, num_steps, scheduler_specific_kwargs=settings.schedule_args
    )
    return made


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
    least = settings.min_lr_ratio or 0.0
    done = (step - settings.warmup_steps) / max(1, num_steps - settings.warmup_steps)
    return least + (1 - least) * (1 + math.cos(math.pi * min(done, 1.0))) / 2


def check_schedule(settings: OptimizerSection, num_steps: int) -> None:
    """Raises SlipstreamError where there is no such schedule, it doesn't take its arguments, or leads below zero."""
    known = {name: signature for name, signature in _signatures().items() if "num_warmup_steps" in signature}
    name, given = settings.schedule, settings.schedule_args
    if name not in _OWN and name not in known:
        others = ", ".join(sorted({*_OWN, *known}))
        what = "follows the losses of a run" if name in _signatures() else "is not known"
        hint = "" if name in _signatures() else did_you_mean(name, {*_OWN, *known}).rstrip(".")
        raise SlipstreamError(f"optimizer.schedule={name} {what}{hint}; give {others}")
    taken = [] if name in _OWN else [each for each in known[name] if each not in _FROM_RUN]
    if unknown := [each for each in given if each not in taken]:
        takes = f"it takes {', '.join(taken)}" if taken else "it takes none"
        raise SlipstreamError(f"optimizer.schedule_args.{unknown[0]} with optimizer.schedule={name}: {takes}")
    optimizer = make_optimizer([Parameter(torch.zeros(2, 2))], settings)
    try:
        ratio = make_scheduler(optimizer, settings, num_steps).lr_lambdas[0]
        rates = [float(ratio(step)) for step in {*range(min(num_steps, 1000)), settings.warmup_steps, num_steps}]
    except Exception as error:  # of arguments of any type
        arguments = f" (it takes {', '.join(taken)})" if taken else ""
        raise SlipstreamError(
            f"optimizer.schedule={name} can't be used: {error}; change optimizer.schedule_args={given}{arguments}"
        ) from error
    if not all(math.isfinite(rate) and rate >= 0 for rate in rates):
        raise SlipstreamError(
            f"optimizer.schedule={name} with optimizer.schedule_args={given} leads to a learning rate below zero, or "
            f"to none, within {num_steps} steps; change them"
        )


def _signatures() -> dict[str, list[str]]:
    """Returns the arguments of each schedule of transformers; those that follow a loss have no warm-up."""
    found = TYPE_TO_SCHEDULER_FUNCTION.items()
    return {name.value: list(inspect.signature(function).parameters) for name, function in found}
