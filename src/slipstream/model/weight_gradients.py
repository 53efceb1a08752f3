"""Adds weights' gradients in place, in a backward or later: the part that I leaves to W.

Autograd makes a new weight-sized tensor for every slice and adds it to `.grad`: several passes over memory where a
matrix product that accumulates needs one, and an embedding touches a few rows. With short slices those passes cost as
much as the arithmetic. Gradients are added in the parameter's `grad_dtype`: its own dtype, or float32 for a bfloat16
parameter with a float32 master.

Experts held as one 3-D weight are multiplied in one call that transformers calls "grouped_mm". PyTorch's kernel for it
has no float64, and its backward makes a gradient of the size of all experts for every slice, of which a short slice
fills few. So they have products and gradients of their own here, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn import functional
from transformers.integrations import moe
from transformers.pytorch_utils import Conv1D

from slipstream.autograd_calls import differentiable_once, direct_apply
from slipstream.model.own_code import runs_class_code
from slipstream.model.tensors import NARROW

WeightGradient = partial[None]  # a call with the weight and the factors as arguments
_deferred: list[WeightGradient] | None = None
_leaves_all = False  # True while all weight gradients are left to autograd


@contextmanager
def defer_weight_gradients() -> Iterator[list[WeightGradient]]:
    """Makes a backward (I) leave its weight gradients in the list; calling each of them is W."""
    global _deferred
    _deferred = []
    try:
        yield _deferred
    finally:
        _deferred = None


@contextmanager
def left_to_autograd() -> Iterator[None]:
    """Leaves the gradients of forwards to autograd: of code that asks for gradients itself, in any order."""
    global _leaves_all
    before, _leaves_all = _leaves_all, True
    try:
        yield
    finally:
        _leaves_all = before


def add_weight_gradients_in_place(model: nn.Module) -> None:
    """Gives every nn.Linear, Conv1D and nn.Embedding of `model` the backwards below.

    Subclasses, modules with a forward of their own and those inside a compiled one stay as they are: I has their
    gradients.
    """
    for module in deferrable_layers(model):
        is_embedding = isinstance(module, nn.Embedding)
        forward = partial(_embedding, module) if is_embedding else partial(_linear, module, isinstance(module, Conv1D))
        module.forward = partial(forward, module.forward)


def compiled_modules(model: nn.Module) -> list[str]:
    """Returns the names of modules that torch.compile runs: their backward can't be split into I and W."""
    return [name or "the model" for name, module in model.named_modules() if is_compiled(module)]


def uncompiled_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yields the modules that torch.compile doesn't run, with their names."""
    compiled = [name for name, module in model.named_modules() if is_compiled(module)]
    for name, module in model.named_modules():
        if not any(not outer or f"{name}.".startswith(f"{outer}.") for outer in compiled):
            yield name, module


def deferrable_layers(model: nn.Module) -> Iterator[nn.Module]:
    """Yields the linear layers and embeddings whose weight gradients can wait for W: those that run their class's code,
    so that a replacement computes the same."""
    for _, module in uncompiled_modules(model):
        plain = type(module) is nn.Embedding and not (module.max_norm or module.scale_grad_by_freq or module.sparse)
        if (type(module) in (nn.Linear, Conv1D) or plain) and (_is_replaced(module) or runs_class_code(module)):
            yield module


def _is_replaced(module: nn.Module) -> bool:
    """Returns whether a module's forward is one of those below already."""
    forward = vars(module).get("forward")
    return isinstance(forward, partial) and forward.func in (_linear, _embedding)


def is_compiled(module: nn.Module) -> bool:
    """Returns whether `module.compile()` or `torch.compile(module)` compiled it."""
    return module._compiled_call_impl is not None or "_orig_mod" in module._modules


def _linear(module: Any, transposed: bool, original: Callable[[Tensor], Tensor], x: Tensor) -> Any:
    """Returns the module's output; autograd computes its weight's gradient where hooks on the weight must see it."""
    weight = module.weight
    if _is_autograds(x, weight, 2) or torch.is_autocast_enabled(x.device.type):
        return original(x)
    return _multiply(x, weight, module.bias, transposed)


def _embedding(module: Any, original: Callable[[Tensor], Tensor], ids: Tensor) -> Any:
    """Does the same for an embedding."""
    weight = module.weight
    return original(ids) if _is_autograds(ids, weight, 1) else _embed(ids, weight, module.padding_idx)


def _is_autograds(x: Tensor, weight: Any, least_dims: int) -> bool:
    """Returns whether a weight's gradient is left to autograd, or there is none.

    The backwards below can't serve a call of one row, by torch.func, or with a weight that only takes a parameter's
    place, as one does that `weight_norm` computes.
    """
    transformed = torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0
    if _leaves_all or transformed or x.dim() < least_dims or not isinstance(weight, nn.Parameter):
        return True
    hooked = weight._backward_hooks or weight._post_accumulate_grad_hooks
    return bool(hooked) or not weight.requires_grad or not torch.is_grad_enabled()


class _Linear(torch.autograd.Function):
    """Computes y = x W^T + b, or x W + b where the weight is kept transposed, as in Conv1D."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: nn.Parameter, bias: Tensor | None, transposed: bool) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight, ctx.transposed, ctx.bias = weight, transposed, bias
        y = functional.linear(x, weight.t() if transposed else weight, bias)
        # autograd forbids models to change a view in place that was made here, as it can be of (b T, out)
        return torch.ops.aten._unsafe_view(y, y.shape) if y._is_view() else y

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, None, Tensor | None, None]:
        (x,) = ctx.saved_tensors
        weight = ctx.weight
        rows = grad_output.flatten(0, -2), x.flatten(0, -2)  # (b T, out), (b T, in)
        left, right = reversed(rows) if ctx.transposed else rows
        now_or_later(partial(add_product, weight, left, right))
        needs_x, _, needs_bias, _ = ctx.needs_input_grad
        grad_x = rows[0].mm(weight.t() if ctx.transposed else weight).view(x.shape) if needs_x else None
        return grad_x, None, rows[0].sum(0, dtype=ctx.bias.grad_dtype) if needs_bias else None, None


class _Embedding(torch.autograd.Function):
    """Computes y = W[ids]."""

    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight: nn.Parameter, padding_idx: int | None) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.weight, ctx.padding_idx = weight, padding_idx
        return functional.embedding(ids, weight)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad_output: Tensor) -> tuple[None, None, None]:
        (ids,) = ctx.saved_tensors
        if ctx.padding_idx is not None:
            grad_output = grad_output.masked_fill((ids == ctx.padding_idx)[..., None], 0)
        now_or_later(partial(add_rows, ctx.weight, ids.flatten(), grad_output.flatten(0, -2)))
        return None, None, None


_multiply, _embed = direct_apply(_Linear), direct_apply(_Embedding)


def now_or_later(work: WeightGradient) -> None:
    """Adds a weight's gradient, or leaves that to W where this backward is an I."""
    if _deferred is None:
        work()
    else:
        _deferred.append(work)


def factors_of(work: Iterable[WeightGradient]) -> list[Tensor]:
    """Returns the tensors that weight gradients which I left to W are computed from, weights aside."""
    return [argument for gradient in work for argument in gradient.args[1:] if isinstance(argument, Tensor)]


def add_product(weight: nn.Parameter, left: Tensor, right: Tensor, rows: slice | int | None = None) -> None:
    """Adds left^T right to weight.grad[rows], None being all of them, in one pass unless a GPU multiplies in a narrower
    dtype than it adds."""
    # Without gradients, as in a backward, entering no_grad would cost as much as the rest.
    if torch.is_grad_enabled():
        with torch.no_grad():
            add_product(weight, left, right, rows)
        return
    dtype = weight.grad_dtype or left.dtype
    if left.dtype != dtype and not (left.is_cuda and left.dtype in NARROW and dtype == torch.float32):
        left, right = left.to(dtype), right.to(dtype)  # exact
    if weight.grad is None and left.shape[1] == len(weight) and not left.is_cuda:
        # a GPU adds to zeros instead, as CUDA graphs do: so a step is the same to the bit with them and without
        weight.grad = _product(left, right, dtype)
        return
    gradient = gradient_of(weight, dtype)
    total = gradient if rows is None else gradient[rows]
    if left.dtype == dtype:
        total.addmm_(left.t(), right)
    else:
        total.add_(_product(left, right, dtype))


def gradient_of(parameter: nn.Parameter, dtype: torch.dtype | None = None) -> Tensor:
    """Returns a parameter's gradient, zeros of its `grad_dtype`, or else of `dtype`, where it has none yet."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter, dtype=parameter.grad_dtype or dtype)
    return parameter.grad


def _product(left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    # Not rounded to the factors' dtype.
    return left.t() @ right if left.dtype == dtype else torch.mm(left.t(), right, out_dtype=dtype)


@torch.no_grad()
def add_rows(weight: nn.Parameter, ids: Tensor, rows: Tensor) -> None:
    """Adds rows to weight.grad[ids]; ids may repeat."""
    gradient = gradient_of(weight)
    rows = rows.to(gradient.dtype)
    # index_add_ adds in a different order every time on a GPU.
    if rows.is_cuda:
        gradient.index_put_((ids,), rows, accumulate=True)
    else:
        gradient.index_add_(0, ids, rows)


_PRODUCT = "_grouped_mm"  # transformers' multiplication by experts: (S, in), (experts, in, out), offsets -> (S, out)
_grouped_mm = getattr(moe, _PRODUCT)


def add_expert_gradients_in_place(model: nn.Module) -> None:
    """Gives the experts of `model` the products below, where they are multiplied by "grouped_mm"."""
    for _, module in uncompiled_modules(model):
        # Only modules that transformers' decorator made experts have this.
        if hasattr(module, "_apply_gate"):
            module.forward = partial(_forward, module.forward)


def _forward(original: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    with patch.object(moe, _PRODUCT, _expert_product):
        return original(*args, **kwargs)


def _expert_product(x: Tensor, weight: Tensor, offs: Tensor) -> Any:
    """Returns the rows of x (S, in), which end for each expert at `offs`, times its matrix: (S, out)."""
    # A weight (experts, out, in) is passed transposed, as a view of the parameter.
    parameter: Any = weight if weight._base is None else weight._base
    is_whole = isinstance(parameter, nn.Parameter) and parameter.shape in (weight.shape, weight.mT.shape)
    if not is_whole or _is_autograds(x, parameter, 2):
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
    beyond = rows.new_zeros(len(rows) - int(offs[-1]), weight.shape[-1])  # rows of other ranks' experts
    return torch.cat([*parts, beyond])


@torch.no_grad()
def _add_products(weight: nn.Parameter, left: Tensor, right: Tensor, offs: Tensor) -> None:
    """Adds left^T right to weight.grad, of each expert over its own rows."""
    gradient = gradient_of(weight)
    if left.device.type == "cpu" or left.dtype == torch.float64:
        for expert, (a, b) in enumerate(_groups(offs)):
            if b > a:
                add_product(weight, left[a:b], right[a:b], expert)
    # A loop over groups would wait for their sizes on a GPU.
    else:
        gradient.add_(functional.grouped_mm(left.t(), right, offs=offs))


def _groups(offs: Tensor) -> Iterator[tuple[int, int]]:
    return pairwise([0, *offs.tolist()])
