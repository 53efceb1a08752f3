"""The section `optimizer` of a configuration: a class of optimizers, its arguments, and its learning rates."""

from __future__ import annotations

from contextlib import suppress
from typing import Annotated, Any, Self

from pydantic import BeforeValidator, Field, PositiveFloat, model_validator

from slipstream.options import Record

# What adamw has where nothing else is given; another optimizer has the defaults of its class.
_ADAMW = {"lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
_MIN_LR_RATIO = 0.1


def _with_numbers(value: Any) -> Any:
    """Returns nested values in which texts that are numbers are: YAML takes 1e-5, without a point, for a text."""
    if isinstance(value, dict):
        return {name: _with_numbers(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_with_numbers(each) for each in value]
    if isinstance(value, str) and any(map(str.isdigit, value)):
        with suppress(ValueError):
            return float(value)
    return value


Arguments = Annotated[dict[str, Any], BeforeValidator(_with_numbers)]


class OptimizerSection(Record):
    """The optimizer, its learning rates and its decay."""

    name: str = "adamw"
    """A class of torch.optim in small letters (adamw, sgd, nadam, adafactor), or the import path of an optimizer, such
    as `package.module.Class`. One that must see more of the gradient than a rank has is refused."""
    lr: PositiveFloat | None = None
    """Learning rate at the end of the warm-up. Default: 3e-4 for adamw, for others that of their class; likewise for
    `betas`, `eps` and `weight_decay`."""
    betas: tuple[float, float] | None = None
    """Decay of the running mean and of the running square. Default: (0.9, 0.95) for adamw."""
    eps: PositiveFloat | None = None
    """Added to the root of the running square. Default: 1e-8 for adamw."""
    weight_decay: Annotated[float, Field(ge=0)] | None = None
    """For matrices only: norms and biases don't decay. Default: 0.1 for adamw."""
    args: Arguments = Field(default={})
    """Other arguments of the optimizer's class, such as `{decoupled_weight_decay: true}` of adam."""
    warmup_steps: int = Field(default=0, ge=0)
    """Steps of linear warm-up."""
    schedule: str = "cosine"
    """The course of the learning rate after the warm-up: cosine, constant, or one of transformers by its name there
    (linear, polynomial, inverse_sqrt, cosine_with_restarts, cosine_with_min_lr, warmup_stable_decay and others), whose
    warm-up begins at 0."""
    schedule_args: Arguments = Field(default={})
    """Arguments of a schedule of transformers, such as `{num_decay_steps: 100}` of warmup_stable_decay."""
    min_lr_ratio: Annotated[float, Field(ge=0, le=1)] | None = None
    """Where the cosine ends, as a share of `lr`. Default: 0.1."""
    clip_norm: PositiveFloat | None = 1.0
    """Largest norm of the whole model's gradient; null for no clipping."""

    @model_validator(mode="before")
    @classmethod
    def _fill_in_defaults(cls, values: Any) -> Any:
        """Fills in what isn't given, or null, of adamw and of the cosine."""
        if not isinstance(values, dict) or not isinstance(values.get("args") or {}, dict):
            return values
        given = {name: value for name, value in values.items() if value is not None or name == "clip_norm"}
        if str(given.get("name", "adamw")).lower() == "adamw":
            given = {name: value for name, value in _ADAMW.items() if name not in given.get("args", {})} | given
        if given.get("schedule", "cosine") == "cosine":
            given = {"min_lr_ratio": _MIN_LR_RATIO} | given
        return given

    @model_validator(mode="after")
    def _said_once(self) -> Self:
        both = [name for name in self.args if name in _ADAMW and getattr(self, name) is not None]
        if both:
            raise ValueError(f"optimizer.{both[0]} and optimizer.args.{both[0]} say the same; give one of the two")
        for name in ("lr", "weight_decay"):
            if name in self.args:
                raise ValueError(f"optimizer.args.{name}={self.args[name]}: give it as optimizer.{name}")
        if self.min_lr_ratio is not None and self.schedule != "cosine":
            raise ValueError(
                f"optimizer.min_lr_ratio={self.min_lr_ratio} is where schedule=cosine ends, and "
                f"schedule={self.schedule} has no use for it; leave it out, or give null where a file has it"
            )
        return self
