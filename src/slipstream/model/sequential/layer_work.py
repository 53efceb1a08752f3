"""Counts what a layer's forward computes, moves and saves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.flop_counter import flop_registry


@dataclass(frozen=True)
class LayerWork:
    """The operations, bytes moved and bytes saved of a layer's forward of a microbatch."""

    flops: int = 0
    num_bytes: int = 0  # read and written by all operations
    saved_bytes: int = 0  # kept for its backward, parameters aside
    is_random: bool = False


def _attention_flops(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> int:
    """Returns the flops of attention over (rows, heads, tokens, width).

    PyTorch counts none of the CPU kernel's, and up to 2.11 refuses grouped heads.
    """
    return query.shape[:-1].numel() * 2 * key.shape[-2] * (query.shape[-1] + value.shape[-1])


_aten = torch.ops.aten
_ATTENTION = {
    _aten._scaled_dot_product_flash_attention_for_cpu,
    _aten._scaled_dot_product_flash_attention,
    _aten._scaled_dot_product_efficient_attention,
    _aten._scaled_dot_product_cudnn_attention,
}


class OperationCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the operations of a layer, and whether any draws random numbers."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops = self.num_bytes = 0
        self.is_random = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        self.is_random |= torch.Tag.nondeterministic_seeded in func.tags
        op = func.overloadpacket
        count = _attention_flops if op in _ATTENTION else flop_registry.get(op)
        if count is not None:
            self.flops += int(count(*args, **kwargs, out_val=result))
        if not func.is_view:
            self.num_bytes += sum(t.nbytes for t in tree_iter((args, kwargs, result)) if isinstance(t, Tensor))
        return result
