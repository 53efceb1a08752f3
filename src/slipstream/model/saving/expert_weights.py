"""Experts held as one 3-D weight: their products in any dtype, and their gradients in place, immediately or as W.

transformers sorts the tokens by expert and multiplies each group with its expert's matrix in one call, its default
implementation "grouped_mm". PyTorch's kernel for that has no float64, and its backward makes a gradient of the size of
all experts for every slice, of which a short slice fills few.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.integrations import moe

from slipstream.autograd_calls import differentiable_once
from slipstream.model.saving.weight_gradients import add_product, is_compiled, now_or_later

_PRODUCT = "_grouped_mm"  # what transformers multiplies experts with: (S, in), (experts, in, out), offsets -> (S, out)
_grouped_mm = getattr(moe, _PRODUCT)


def add_expert_gradients_in_place(model: nn.Module) -> None:
    """Gives the experts of `model` the products below, where they are multiplied by "grouped_mm"."""
    for module in _experts(model):
        module.forward = partial(_forward, module.forward)


def _experts(module: nn.Module) -> Iterator[nn.Module]:
    """Yields the modules that transformers' decorator made experts, but for those that are compiled."""
    if is_compiled(module):
        return
    if hasattr(module, "_apply_gate"):
        yield module
    for child in module.children():
        yield from _experts(child)


def _forward(original: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    with patch.object(moe, _PRODUCT, _product):
        return original(*args, **kwargs)


def _product(x: Tensor, weight: Tensor, offs: Tensor) -> Any:
    """Returns the rows of x (S, in), which end for each expert at `offs`, times its matrix: (S, out)."""
    parameter: Any = weight if weight._base is None else weight._base  # (experts, out, in) is given transposed
    hooked = parameter._backward_hooks or parameter._post_accumulate_grad_hooks
    is_whole = isinstance(parameter, nn.Parameter) and parameter.shape in (weight.shape, weight.mT.shape)
    if hooked or not is_whole or not parameter.requires_grad or not torch.is_grad_enabled():
        return _rows_times(x.to(weight.dtype), weight, offs)
    return _Experts.apply(x.to(weight.dtype), parameter, offs, weight is parameter)  # type: ignore[no-untyped-call]


class _Experts(torch.autograd.Function):
    """Computes y = x W_e^T with the weight of each row's expert e, or x W_e where weights are kept transposed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: nn.Parameter, offs: Tensor, transposed: bool) -> Tensor:
        ctx.save_for_backward(x, offs)
        ctx.weight, ctx.transposed = weight, transposed
        return _rows_times(x, weight if transposed else weight.mT, offs)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, None, None, None]:
        x, offs = ctx.saved_tensors
        weight = ctx.weight
        left, right = (x, grad_output) if ctx.transposed else (grad_output, x)
        now_or_later(partial(_add_products, weight, left, right, offs))
        grad_x = _rows_times(grad_output, weight.mT if ctx.transposed else weight, offs)
        return grad_x if ctx.needs_input_grad[0] else None, None, None, None


def _rows_times(rows: Tensor, weight: Tensor, offs: Tensor) -> Tensor:
    """Returns each row times its expert's matrix: (S, n) x (experts, n, m) -> (S, m)."""
    if rows.dtype != torch.float64 or rows.is_meta:
        return _grouped_mm(rows, weight, offs)  # type: ignore[no-any-return]
    parts = [rows[a:b] @ weight[expert] for expert, (a, b) in enumerate(_groups(offs)) if b > a]
    beyond = rows.new_zeros(len(rows) - int(offs[-1]), weight.shape[-1])  # of no expert here
    return torch.cat([*parts, beyond])


@torch.no_grad()
def _add_products(weight: nn.Parameter, left: Tensor, right: Tensor, offs: Tensor) -> None:
    """Adds left^T right to weight.grad, of each expert over its own rows."""
    if weight.grad is None:
        weight.grad = torch.zeros_like(weight, dtype=weight.grad_dtype)
    if left.device.type == "cpu" or left.dtype == torch.float64:
        for expert, (a, b) in enumerate(_groups(offs)):
            if b > a:
                add_product(weight, left[a:b], right[a:b], expert)
    else:  # a GPU would wait for the groups' sizes
        weight.grad.add_(functional.grouped_mm(left.t(), right, offs=offs))


def _groups(offs: Tensor) -> Iterator[tuple[int, int]]:
    return pairwise([0, *offs.tolist()])
