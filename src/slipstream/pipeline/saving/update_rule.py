"""How an optimizer and its scheduler update, apart from tensors of parameters: classes, options of groups, progress."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from torch import Tensor, nn
from torch.optim import Optimizer

from slipstream.errors import SlipstreamError
from slipstream.pipeline.saving.plain_values import decode, encode


class Scheduler(Protocol):
    """A learning-rate schedule: any of PyTorch's, or an object with the same two methods."""

    def state_dict(self) -> dict[str, Any]:
        """Returns its progress."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Takes over what `state_dict` returned."""
        ...


def describe_rule(optimizer: Optimizer | None, scheduler: Scheduler | None) -> dict[str, Any]:
    """Returns what a checkpoint keeps of both, as JSON can hold it.

    Raises:
        SlipstreamError: for an option or progress that it can't hold.
    """
    return {
        "optimizer": None if optimizer is None else _described(optimizer, _options(optimizer)),
        "scheduler": None if scheduler is None else _described(scheduler, scheduler.state_dict()),
    }


def check_parameters(optimizer: Optimizer, parameters: Iterable[nn.Parameter]) -> None:
    """Raises SlipstreamError where the optimizer updates something that isn't among a Pipeline's parameters."""
    own = {id(parameter) for parameter in parameters}
    others = [each for group in optimizer.param_groups for each in group["params"] if id(each) not in own]
    if others:
        raise SlipstreamError(
            f"the optimizer updates a tensor of shape {tuple(others[0].shape)} that isn't of pipe.parameters(): no "
            "checkpoint would hold it. Make the optimizer of pipe.parameters(), after the Pipeline."
        )


def check_rule(kept: Mapping[str, Any], optimizer: Optimizer | None, scheduler: Scheduler | None) -> str:
    """Returns why what a checkpoint keeps of them can't be taken over by these; "" where it can."""
    for what, mine in (("optimizer", optimizer), ("scheduler", scheduler)):
        saved = kept[what]
        if saved is None and mine is not None:
            return f"has no {what}: call pipe.load without {what}="
        if saved is not None and mine is not None and saved["class"] != type(mine).__name__:
            return f"has the state of a {saved['class']}, and {what}= is a {type(mine).__name__}"
    if optimizer is not None and kept["scheduler"] is not None and scheduler is None:
        return "has a scheduler, without which the learning rate would stay: give pipe.load scheduler= as well"
    if optimizer is not None:
        saved, here = len(kept["optimizer"]["state"]), len(optimizer.param_groups)
        return "" if saved == here else f"has an optimizer of {saved} parameter groups, and this one has {here}"
    return ""


def restore_rule(kept: Mapping[str, Any], optimizer: Optimizer | None, scheduler: Scheduler | None) -> None:
    """Gives both what `describe_rule` returned, once `check_rule` has found nothing."""
    if optimizer is not None:
        for group, options in zip(optimizer.param_groups, decode(kept["optimizer"]["state"]), strict=True):
            for name, value in options.items():
                here = group.get(name)
                if isinstance(here, Tensor) and isinstance(value, Tensor):
                    here.copy_(value)  # a graph of the GPU may read it there
                else:
                    group[name] = value
    if scheduler is not None:
        scheduler.load_state_dict(decode(kept["scheduler"]["state"]))


def _described(owner: object, state: Any) -> dict[str, Any]:
    return {"class": type(owner).__name__, "state": encode(state, f"the state of {type(owner).__name__}")}


def _options(optimizer: Optimizer) -> list[dict[str, Any]]:
    return [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
