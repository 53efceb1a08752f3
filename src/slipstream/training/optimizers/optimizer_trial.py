"""Tries an optimizer on toy tensors, whole and in parts: what it keeps, and of how much it must see the gradient."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from slipstream.errors import SlipstreamError
from slipstream.training.config import OptimizerSection
from slipstream.training.optimizers.optimizer_choice import find_class, make_optimizer

Reach = Literal["element", "parameter", "model"]

# By number of dimensions; above the sizes from which known optimizers factor (128) or quantise (4096 elements) a state.
_SHAPES = {0: (), 1: (4160,), 2: (160, 144), 3: (3, 160, 144), 4: (2, 2, 40, 36)}
_SCALES = (1.0, 10.0, 0.1, 3.0, 1.0, 0.01, 1.0, 2.0)  # of the gradients of each step
_BOUNDS = {torch.float64: 1e-9, torch.float32: 1e-4}  # up to which values are equal, as a share of the largest


@dataclass(frozen=True)
class OptimizerTraits:
    """What a trial shows of an optimizer.

    Attributes:
        reach: of what the update of an element depends: on that element's gradients alone, on those of its parameter,
            or on those of other parameters too.
        states: the names of what it keeps of each parameter.
        size: how many times a parameter's elements these have.
        group_states: the names of what it keeps of all parameters together.
    """

    reach: Reach
    states: tuple[str, ...]
    size: float
    group_states: tuple[str, ...]


def try_optimizer(settings: OptimizerSection, dims: Collection[int]) -> OptimizerTraits:
    """Returns the traits of the optimizer that `settings` describe, on parameters of these numbers of dimensions.

    Raises:
        SlipstreamError: where it can't train such parameters, with what its class says.
    """
    _check_step(settings)
    with torch.random.fork_rng(devices=[]):
        try:
            return _Trial(settings, dims, torch.float64).traits()
        except Exception:  # of a class that anybody may have written; some know float32 alone
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
            f"optimizer.name={settings.name} needs a closure, by which it runs the model several times a step; a run "
            "computes its gradients once. Give another optimizer, such as adamw"
        )


class _Trial:
    """Some steps on the same gradients, of tensors together, each alone, and cut."""

    def __init__(self, settings: OptimizerSection, dims: Collection[int], dtype: torch.dtype) -> None:
        self._settings, self._bound = settings, _BOUNDS[dtype]
        generator = torch.Generator().manual_seed(0)
        shapes = [_SHAPES[ndim] for ndim in sorted({min(ndim, max(_SHAPES)) for ndim in dims})]
        self._toys = [
            [torch.randn(shape, dtype=dtype, generator=generator) for _ in range(1 + len(_SCALES))]
            for shape in [*shapes, shapes[-1]]
        ]

    def traits(self) -> OptimizerTraits:
        together, optimizer = self._train(self._toys)
        alone = [value for toy in self._toys for value in self._train([toy])[0]]
        state: list[dict[str, Any]] = [dict(each) for each in optimizer.state.values()]
        kept = [value.numel() for each in state for value in each.values() if isinstance(value, Tensor) and value.ndim]
        return OptimizerTraits(
            reach=self._reach(together, alone),
            states=tuple(sorted({str(name) for each in state for name in each})),
            size=sum(kept) / sum(toy[0].numel() for toy in self._toys),
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
        optimizer = make_optimizer(parameters, self._settings)
        for number, scale in enumerate(_SCALES, 1):
            for parameter, toy in zip(parameters, toys, strict=True):
                parameter.grad = toy[number] * scale
            optimizer.step()
        return [parameter.detach() for parameter in parameters], optimizer

    def _are_equal(self, some: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
        return all(self._is_equal(one, other) for one, other in zip(some, others, strict=True))

    def _is_equal(self, one: Tensor, other: Tensor) -> bool:
        # A learning rate may be so large that the toys overflow, alike whether or not they are cut.
        largest = other[other.isfinite()].abs().amax() if other.isfinite().any() else torch.zeros(())
        return torch.allclose(one, other, rtol=0, atol=self._bound * float(largest), equal_nan=True)

    def _changed(self, optimizer: Optimizer) -> Iterator[str]:
        fresh = make_optimizer([Parameter(toy[0].clone()) for toy in self._toys], self._settings)
        for before, after in zip(fresh.param_groups, optimizer.param_groups, strict=True):
            yield from (name for name in after if name != "params" and repr(before.get(name)) != repr(after[name]))
