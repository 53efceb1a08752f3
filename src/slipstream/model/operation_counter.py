"""Counts what code computes: its kernels, matrix products with their FLOPs, and the bytes that are read and written.

A model's code is run for that on tensors without memory. What a token needs of a weight is known without: one
multiplication for each of its elements.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn, ops
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

_aten = ops.aten
_NO_KERNELS = {_aten.empty, _aten.empty_like, _aten.new_empty, _aten.empty_strided, _aten.new_empty_strided}
_NO_KERNELS |= {_aten.detach, _aten.lift_fresh, _aten._unsafe_view, _aten._reshape_alias, ops.prim.device}
_ADDING_PRODUCTS = {_aten.addmm, _aten.baddbmm}
_PRODUCTS = {_aten.mm, _aten.bmm, _aten._grouped_mm, *_ADDING_PRODUCTS}
_LOADED_BYTES = 16  # by one instruction
_GATHERS = {_aten.embedding, _aten.index, _aten.gather, _aten.index_select}
_ATTENTION = {
    _aten._scaled_dot_product_flash_attention_for_cpu,
    _aten._scaled_dot_product_flash_attention,
    _aten._scaled_dot_product_efficient_attention,
    _aten._scaled_dot_product_cudnn_attention,
}


@dataclass
class OperationTally:
    """Totals of what has run."""

    flops: float = 0
    unaligned_flops: float = 0  # of products of 16 bits with rows of other sizes than multiples of 16 bytes
    matmul_bytes: float = 0
    hidden_depth: float = 0
    other_depth: float = 0
    product_bytes: float = 0  # outputs of matrix products
    wide_bytes: float = 0
    other_bytes: float = 0
    num_matmuls: int = 0
    num_kernels: int = 0

    @property
    def num_bytes(self) -> float:
        """The bytes that all kernels read and write."""
        return self.matmul_bytes + self.wide_bytes + self.other_bytes

    def __sub__(self, other: OperationTally) -> OperationTally:
        return OperationTally(*(max(0, vars(self)[key] - vars(other)[key]) for key in vars(self)))


class OperationCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds up what runs within it; views and allocations are no kernels.

    Args:
        width: tensors whose last dimension is as long count as wide, products over it as of the hidden state.
    """

    def __init__(self, width: int = 0) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.tally = OperationTally()
        self._width = width

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        packet = func._overloadpacket
        kwargs = kwargs or {}
        result = (_grouped_product if packet is _aten._grouped_mm else func)(*args, **kwargs)
        if func.is_view or packet in _NO_KERNELS:
            return result
        tensors = [leaf for leaf in tree_leaves((args, kwargs, result)) if isinstance(leaf, Tensor)]
        # A gather reads as much as it writes, and not its whole input.
        if packet in _GATHERS:
            tensors = [result, result]
        if packet not in _FLOPS:
            self.add(tensors)
            return result
        tally = self.tally
        flops = _FLOPS[packet](*args, **kwargs, out_val=result)
        tally.flops += flops
        tally.unaligned_flops += 0 if all(map(_is_aligned, tensors)) else flops
        tally.num_kernels += 1
        tally.num_matmuls += 1
        tally.matmul_bytes += _num_bytes(tensors)
        depth = _depth(packet, args)
        tally.hidden_depth += depth if depth == self._width else 0
        tally.other_depth += depth if depth != self._width else 0
        # a convolution's gradients
        tally.product_bytes += _num_bytes(leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor))
        return result

    def add(self, tensors: Sequence[Tensor]) -> None:
        """Adds a kernel that reads and writes these."""
        self.tally.num_kernels += 1
        if any(tensor.dim() and tensor.shape[-1] == self._width for tensor in tensors):
            self.tally.wide_bytes += _num_bytes(tensors)
        else:
            self.tally.other_bytes += _num_bytes(tensors)


def weight_multiplications(module: nn.Module, experts_share: float, trained: bool = False) -> float:
    """Returns a token's multiplications: one for each element of a matrix; of experts (3-D), of those it is sent to.

    Args:
        module: whose weights they are. Weights that a trained copy has replaced don't count.
        experts_share: the share of a layer's experts that a token is sent to.
        trained: whether those that lead to weight gradients are asked for.
    """
    matrices = [
        parameter
        for name, parameter in module.named_parameters()
        if parameter.dim() > 1 and not (trained and not parameter.requires_grad) and "original_module." not in name
    ]
    return sum(p.numel() * (experts_share if p.dim() == 3 else 1.0) for p in matrices)


def _num_bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _is_aligned(operand: Tensor) -> bool:
    """Returns whether the rows of a product's operand or result, as they lie in memory, are multiples of 16 bytes.

    Those of 32 bits count as if they were: they aren't for tensor cores.
    """
    if operand.dim() < 2 or operand.element_size() > 2:
        return True
    row = operand.shape[-2] if operand.stride(-2) == 1 else operand.shape[-1]
    return row * operand.element_size() % _LOADED_BYTES == 0


def _depth(product: Any, args: Sequence[Any]) -> float:
    """Returns how many terms each element of a product's result adds up: of groups of rows their mean."""
    if product not in _PRODUCTS:
        return 0  # a convolution
    a, b = args[1:3] if product in _ADDING_PRODUCTS else args[:2]
    groups = args[2].numel() if product is _aten._grouped_mm and a.dim() == b.dim() == 2 else 1
    return float(a.shape[-1] / groups)


def _grouped_product(a: Tensor, b: Tensor, offs: Tensor | None = None, *args: Any, **kwargs: Any) -> Tensor:
    """Returns an empty result of a grouped product in any dtype, as PyTorch's meta function only takes bfloat16."""
    if a.dim() == b.dim() == 2:
        assert offs is not None
        return a.new_empty(offs.numel(), a.shape[0], b.shape[1])
    return a.new_empty(*a.shape[:-1], b.shape[-1])


def _grouped_flops(a: Tensor, b: Tensor, *_: Any, out_val: Tensor, **__: Any) -> int:
    """Counts the flops of experts' products: (N,K) x (E,K,M) -> (N,M), one matrix per token, or the gradient of B."""
    if a.dim() == b.dim() == 2:
        return 2 * a.shape[0] * a.shape[1] * b.shape[1]
    return 2 * math.prod(out_val.shape) * a.shape[-1]


def _attention_flops(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> int:
    # Of (rows, heads, tokens, width). PyTorch counts none of the CPU kernel's, and up to 2.11 refuses grouped heads.
    return query.shape[:-1].numel() * 2 * key.shape[-2] * (query.shape[-1] + value.shape[-1])


_FLOPS = {
    **flop_registry,
    **dict.fromkeys(_ATTENTION, _attention_flops),
    _aten._grouped_mm: _grouped_flops,
}
