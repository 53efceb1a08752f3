"""Counts floating-point operations and the bytes that kernels move, while it is active."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode, flop_registry

_aten = torch.ops.aten
_NO_KERNELS = {_aten.empty, _aten.empty_like, _aten.new_empty, _aten.empty_strided, _aten.new_empty_strided}
_NO_KERNELS |= {_aten.detach, _aten.lift_fresh, _aten._unsafe_view, _aten._reshape_alias}
_GATHERS = {_aten.embedding, _aten.index, _aten.gather, _aten.index_select}


@dataclass
class OperationTally:
    """Totals of one op at one length."""

    flops: float = 0
    matmul_bytes: float = 0
    product_bytes: float = 0  # outputs of matrix products
    wide_bytes: float = 0
    other_bytes: float = 0
    num_matmuls: int = 0
    num_kernels: int = 0

    def __sub__(self, other: OperationTally) -> OperationTally:
        return OperationTally(*(max(0, vars(self)[key] - vars(other)[key]) for key in vars(self)))


@contextmanager
def counted_operations(width: int) -> Iterator[OperationTally]:
    """Returns a tally that is complete when the block ends; tensors whose last dim is `width` count as wide."""
    tally = OperationTally()
    flops = FlopCounterMode(display=False, custom_mapping={_aten._grouped_mm: _grouped_flops})
    with _Traffic(tally, width), flops:
        yield tally
    tally.flops = flops.get_total_flops()


class _Traffic(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds up the bytes that each kernel reads and writes; views and allocations are no kernels."""

    def __init__(self, tally: OperationTally, width: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._tally, self._width = tally, width

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        grouped = func._overloadpacket is _aten._grouped_mm
        result = _grouped_product(*args, **(kwargs or {})) if grouped else func(*args, **(kwargs or {}))
        if func.is_view or func._overloadpacket in _NO_KERNELS:
            return result
        tensors = [each for each in tree_leaves((args, kwargs, result)) if isinstance(each, Tensor)]
        if func._overloadpacket in _GATHERS:  # reads as much as it writes, not its whole input
            tensors = [result, result]
        num_bytes = sum(each.numel() * each.element_size() for each in tensors)
        tally = self._tally
        tally.num_kernels += 1
        if grouped or func._overloadpacket in flop_registry:
            tally.num_matmuls += 1
            tally.matmul_bytes += num_bytes
            products = [each for each in tree_leaves(result) if isinstance(each, Tensor)]  # a convolution's gradients
            tally.product_bytes += sum(each.numel() * each.element_size() for each in products)
        elif any(each.dim() and each.shape[-1] == self._width for each in tensors):
            tally.wide_bytes += num_bytes
        else:
            tally.other_bytes += num_bytes
        return result


def _grouped_product(a: Tensor, b: Tensor, offs: Tensor | None = None, *args: Any, **kwargs: Any) -> Tensor:
    """Returns an empty result of a grouped product in any dtype, as PyTorch's meta function only takes bfloat16."""
    if a.dim() == b.dim() == 2:
        assert offs is not None
        return a.new_empty(offs.numel(), a.shape[0], b.shape[1])
    return a.new_empty(*a.shape[:-1], b.shape[-1])


def _grouped_flops(a: Any, b: Any, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
    """Counts the flops of experts' products: (N,K) x (E,K,M) -> (N,M), one matrix per token, or the gradient of B."""
    if len(a) == len(b) == 2:
        return int(2 * a[0] * a[1] * b[1])
    return int(2 * math.prod(out_shape) * a[-1])
