"""A checkpoint's record of the optimizer's and the scheduler's settings and progress, and of the loop's facts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from torch import Tensor
from torch.optim import Optimizer

from slipstream.checkpoint.encoded_values import decode, encode


class Scheduler(Protocol):
    """A learning-rate schedule: any of PyTorch's, or an object with the same two methods."""

    def state_dict(self) -> dict[str, Any]:
        """Returns its progress."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Takes over the state of `state_dict`."""
        ...


def describe_rule(optimizer: Optimizer | None, scheduler: Scheduler | None) -> dict[str, Any]:
    """Returns a checkpoint's record of both, as JSON can hold it.

    Raises:
        SlipstreamError: for an option or progress that it can't hold.
    """
    return {
        "optimizer": None if optimizer is None else _described_rule(optimizer, _options(optimizer)),
        "scheduler": None if scheduler is None else _described_rule(scheduler, scheduler.state_dict()),
    }


def loop_facts(rule: Mapping[str, Any], facts: Any, random_state: tuple[int, int]) -> dict[str, Any]:
    """Returns the facts of every checkpoint, by which `Pipeline.load` goes on: the record of `describe_rule`, encoded
    facts of the loop, and the state of dropout."""
    return {"loop": {**rule, "facts": facts, "random_state": list(random_state)}}


def check_rule(kept: Mapping[str, Any], optimizer: Optimizer | None, scheduler: Scheduler | None) -> str:
    """Returns why these can't take over a checkpoint's record of them; "" where they can."""
    for what, mine in (("optimizer", optimizer), ("scheduler", scheduler)):
        saved = kept[what]
        if saved is None and mine is not None:
            return f"has no {what}: call pipe.load without {what}="
        if saved is not None and mine is not None and saved["class"] != type(mine).__name__:
            return f"has the state of a {saved['class']}, and {what}= is a {type(mine).__name__}"
    if optimizer is not None and kept["scheduler"] is not None and scheduler is None:
        return "has a scheduler, without which the learning rate would stay: give pipe.load scheduler= as well"
    if optimizer is not None:
        saved = len(kept["optimizer"]["state"])
        here = len(optimizer.param_groups)
        return "" if saved == here else f"has an optimizer of {saved} parameter groups, and this one has {here}"
    return ""


def restore_rule(kept: Mapping[str, Any], optimizer: Optimizer | None, scheduler: Scheduler | None) -> None:
    """Restores both from the record of `describe_rule`, once `check_rule` has found nothing."""
    if optimizer is not None:
        for group, options in zip(optimizer.param_groups, decode(kept["optimizer"]["state"]), strict=True):
            for name, value in options.items():
                here = group.get(name)
                if isinstance(here, Tensor) and isinstance(value, Tensor):
                    # A recorded graph may read the value at this place on the GPU.
                    here.copy_(value)
                else:
                    group[name] = value
    if scheduler is not None:
        scheduler.load_state_dict(decode(kept["scheduler"]["state"]))


def _described_rule(owner: object, state: Any) -> dict[str, Any]:
    return {"class": type(owner).__name__, "state": encode(state, f"the state of {type(owner).__name__}")}


def _options(optimizer: Optimizer) -> list[dict[str, Any]]:
    return [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
