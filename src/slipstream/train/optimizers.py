"""The optimizer of a run and its learning rates: found by name, tried on a toy, and made for a rank's parameters."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from slipstream.errors import SlipstreamError, did_you_mean
from slipstream.train.config import OptimizerSection

_FIELDS = ("lr", "betas", "eps", "weight_decay")  # settings that are arguments of the class


# The last part of a bias's name; experts have theirs in one parameter, of two dimensions, such as gate_up_proj_bias.
_BIAS = re.compile(r"(.*_)?bias")
# The name of a norm's module; those of single heads, such as Cohere's q_norm, have weights of two dimensions.
_NORM = re.compile(r"(.*_)?((layer|rms)_?)?norm\d*")


def make_optimizer(parameters: Iterable[tuple[str, Parameter]], settings: OptimizerSection) -> Optimizer:
    """Returns the optimizer of one rank's parameters, given with their names; norms and biases don't decay.

    Raises SlipstreamError where there is no such class here.
    """
    trained = [(name, parameter) for name, parameter in parameters if parameter.requires_grad]
    groups = [
        {"params": [parameter for name, parameter in trained if _decays(name, parameter)]},
        {"params": [parameter for name, parameter in trained if not _decays(name, parameter)], "weight_decay": 0.0},
    ]
    made: Optimizer = find_class(settings.name)(groups, **_given(settings), **settings.args)
    return made


def _decays(name: str, parameter: Parameter) -> bool:
    *_, module, last = ("", *name.split("."))
    return parameter.ndim >= 2 and not _BIAS.fullmatch(last) and not _NORM.fullmatch(module)


def find_class(name: str) -> Any:
    """Returns the class of torch.optim with this name in small letters, or the one at an import path.

    Raises SlipstreamError where there is none, or it isn't an optimizer.
    """
    if "." in name:
        return _imported(name)
    named = {kind.__name__.lower(): kind for kind in vars(torch.optim).values() if _is_optimizer(kind)}
    if name.lower() not in named:
        raise SlipstreamError(
            f"optimizer.name={name} isn't in torch.optim{did_you_mean(name, named).rstrip('.')}; give "
            f"{', '.join(sorted(named))}, or an import path such as package.module.Class"
        )
    return named[name.lower()]


def _imported(path: str) -> type[Optimizer]:
    module, _, name = path.rpartition(".")
    try:
        kind = getattr(import_module(module), name)
    # A module may raise anything when imported.
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise SlipstreamError(
            f"optimizer.name={path} can't be imported ({reason}); install its package on every machine, or give a name "
            "of torch.optim, such as adamw"
        ) from error
    if not _is_optimizer(kind):
        raise SlipstreamError(f"optimizer.name={path} isn't a subclass of torch.optim.Optimizer; give one that is")
    return kind  # type: ignore[no-any-return]


def _is_optimizer(found: Any) -> bool:
    return inspect.isclass(found) and issubclass(found, Optimizer) and found is not Optimizer


def _given(settings: OptimizerSection) -> dict[str, Any]:
    return {name: value for name in _FIELDS if (value := getattr(settings, name)) is not None}


def check_arguments(settings: OptimizerSection) -> None:
    """Raises SlipstreamError for an argument that the class doesn't take, with those that it takes."""
    kind = find_class(settings.name)
    parameters = inspect.signature(kind).parameters
    taken = [name for name in parameters if name != "params"]
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
        # The optimizer's trial finds the problem.
        return
    for prefix, names in (("optimizer", _given(settings)), ("optimizer.args", settings.args)):
        for name, value in names.items():
            if name not in taken:
                left_out = "leave it out, or give null where a file has it"
                raise SlipstreamError(
                    f"{prefix}.{name}={value} with optimizer.name={settings.name}: {kind.__name__} takes no {name}, "
                    f"but {', '.join(taken)}; {left_out}"
                )
    needed = [name for name in taken if parameters[name].default is inspect.Parameter.empty]
    if missing := [name for name in needed if name not in {**_given(settings), **settings.args}]:
        section = "optimizer" if missing[0] in _FIELDS else "optimizer.args"
        raise SlipstreamError(f"optimizer.name={settings.name} needs {missing[0]}; give {section}.{missing[0]}")


_OWN = ("cosine", "constant")
_FROM_RUN = ("optimizer", "num_warmup_steps", "num_training_steps", "last_epoch")  # arguments reserved for the run


def make_scheduler(optimizer: Optimizer, settings: OptimizerSection, num_steps: int) -> LambdaLR:
    """Returns the schedule of the learning rate over `num_steps` steps."""
    if settings.schedule in _OWN:
        return LambdaLR(optimizer, partial(lr_ratio, num_steps=num_steps, settings=settings))
    # This imports PEFT and bitsandbytes where they are installed, for more than a second of every rank.
    from transformers.optimization import get_scheduler

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
    name = settings.schedule
    args = settings.schedule_args
    taken = [] if name in _OWN else [argument for argument in _signature(name) if argument not in _FROM_RUN]
    if unknown := [argument for argument in args if argument not in taken]:
        takes = f"it takes {', '.join(taken)}" if taken else "it takes none"
        raise SlipstreamError(f"optimizer.schedule_args.{unknown[0]} with optimizer.schedule={name}: {takes}")
    optimizer = make_optimizer([("", Parameter(torch.zeros(2, 2)))], settings)
    try:
        ratio = make_scheduler(optimizer, settings, num_steps).lr_lambdas[0]
        rates = [float(ratio(step)) for step in {*range(min(num_steps, 1000)), settings.warmup_steps, num_steps}]
    # Arguments may be of any type, and so may what a class raises.
    except Exception as error:
        arguments = f" (it takes {', '.join(taken)})" if taken else ""
        raise SlipstreamError(
            f"optimizer.schedule={name} can't be used: {error}; change optimizer.schedule_args={args}{arguments}"
        ) from error
    if not all(math.isfinite(rate) and rate >= 0 for rate in rates):
        raise SlipstreamError(
            f"optimizer.schedule={name} with optimizer.schedule_args={args} leads to a learning rate below zero, or "
            f"to none, within {num_steps} steps; change them"
        )


def _signature(name: str) -> list[str]:
    """Returns the arguments of a schedule of transformers.

    Raises SlipstreamError where there is none of this name, or it follows a run's losses: those have no warm-up.
    """
    from transformers.optimization import TYPE_TO_SCHEDULER_FUNCTION

    functions = TYPE_TO_SCHEDULER_FUNCTION.items()
    signatures = {kind.value: list(inspect.signature(function).parameters) for kind, function in functions}
    known = [*_OWN, *(kind for kind, arguments in signatures.items() if "num_warmup_steps" in arguments)]
    if name not in known:
        what = "follows the losses of a run" if name in signatures else "is not known"
        hint = "" if name in signatures else did_you_mean(name, known).rstrip(".")
        raise SlipstreamError(f"optimizer.schedule={name} {what}{hint}; give {', '.join(sorted({*known}))}")
    return signatures[name]


Reach = Literal["element", "parameter", "model"]

# By number of dimensions; above the sizes from which known optimizers factor (128) or quantise (4096 elements) a state.
_SHAPES = {0: (), 1: (4160,), 2: (160, 144), 3: (3, 160, 144), 4: (2, 2, 40, 36)}
_SCALES = (1.0, 10.0, 0.1, 3.0, 1.0, 0.01, 1.0, 2.0)  # factor of the gradients in each step
# Largest difference of equal values, as a share of the largest value.
_BOUNDS = {torch.float64: 1e-9, torch.float32: 1e-4}


@dataclass(frozen=True)
class OptimizerTraits:
    """The traits of an optimizer that a trial shows.

    Attributes:
        reach: of what the update of an element depends: on that element's gradients alone, on those of its parameter,
            or on those of other parameters too.
        states: the names of its state of each parameter.
        size: how many times a parameter's elements these have.
        group_states: the names of its state of all parameters together.
    """

    reach: Reach
    states: tuple[str, ...]
    size: float
    group_states: tuple[str, ...]


def try_optimizer(settings: OptimizerSection, dims: Collection[int]) -> OptimizerTraits:
    """Returns the traits of the optimizer that `settings` describe, on parameters of these numbers of dimensions.

    Raises:
        SlipstreamError: where it can't train such parameters, with its class's message.
    """
    _check_step(settings)
    with torch.random.fork_rng(devices=[]):
        try:
            return _Trial(settings, dims, torch.float64).traits()
        # Anybody may have written the class; some know float32 alone.
        except Exception:
            try:
                return _Trial(settings, dims, torch.float32).traits()
            except Exception as error:
                raise SlipstreamError(
                    f"optimizer.name={settings.name} can't train this model: {type(error).__name__}: {error}. Change "
                    "its arguments, or give another optimizer, such as adamw"
                ) from error


def _check_step(settings: OptimizerSection) -> None:
    """Raises SlipstreamError where a step needs a closure."""
    closure = inspect.signature(find_class(settings.name).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise SlipstreamError(
            f"optimizer.name={settings.name} needs a closure, with which it runs the model several times a step; a run "
            "computes its gradients once. Give another optimizer, such as adamw"
        )


class _Trial:
    """Some steps on the same gradients, of tensors together, each alone, and cut."""

    def __init__(self, settings: OptimizerSection, dims: Collection[int], dtype: torch.dtype) -> None:
        self._settings = settings
        self._bound = _BOUNDS[dtype]
        generator = torch.Generator().manual_seed(0)
        shapes = [_SHAPES[ndim] for ndim in sorted({min(ndim, max(_SHAPES)) for ndim in dims})]
        self._toys = [
            [torch.randn(shape, dtype=dtype, generator=generator) for _ in range(1 + len(_SCALES))]
            for shape in [*shapes, shapes[-1]]
        ]

    def traits(self) -> OptimizerTraits:
        together, optimizer = self._train(self._toys)
        alone = [value for toy in self._toys for value in self._train([toy])[0]]
        state: list[dict[str, Any]] = [dict(kept) for kept in optimizer.state.values()]
        sizes = [value.numel() for kept in state for value in kept.values() if isinstance(value, Tensor) and value.ndim]
        return OptimizerTraits(
            reach=self._reach(together, alone),
            states=tuple(sorted({str(name) for kept in state for name in kept})),
            size=sum(sizes) / sum(toy[0].numel() for toy in self._toys),
            group_states=tuple(sorted(self._changed(optimizer))),
        )

    def _reach(self, together: list[Tensor], alone: list[Tensor]) -> Reach:
        if not self._are_equal(together, alone):
            return "model"
        for toy, whole in zip(self._toys, alone, strict=True):
            for dim in range(whole.ndim):
                halves = [[tensor.chunk(2, dim)[half] for tensor in toy] for half in (0, 1)]
                if not self._are_equal([torch.cat(self._train(halves)[0], dim)], [whole]):
                    return "parameter"
        return "element"

    def _train(self, toys: Sequence[Sequence[Tensor]]) -> tuple[list[Tensor], Optimizer]:
        """Returns the values of toys after some steps with one optimizer."""
        parameters = [Parameter(values.clone()) for values, *_ in toys]
        optimizer = make_optimizer([("", parameter) for parameter in parameters], self._settings)
        for place, scale in enumerate(_SCALES, 1):
            for parameter, toy in zip(parameters, toys, strict=True):
                parameter.grad = toy[place] * scale
            optimizer.step()
        return [parameter.detach() for parameter in parameters], optimizer

    def _are_equal(self, some: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
        return all(self._is_equal(one, other) for one, other in zip(some, others, strict=True))

    def _is_equal(self, one: Tensor, other: Tensor) -> bool:
        # A learning rate may be so large that the toys overflow, alike whether or not they are cut.
        largest = other[other.isfinite()].abs().amax() if other.isfinite().any() else torch.zeros(())
        return torch.allclose(one, other, rtol=0, atol=self._bound * float(largest), equal_nan=True)

    def _changed(self, optimizer: Optimizer) -> Iterator[str]:
        fresh = make_optimizer([("", Parameter(toy[0].clone())) for toy in self._toys], self._settings)
        for before, after in zip(fresh.param_groups, optimizer.param_groups, strict=True):
            yield from (name for name in after if name != "params" and repr(before.get(name)) != repr(after[name]))
