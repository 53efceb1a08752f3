"""Makes rotary tables exact for a slice where their frequencies depend on the longest position of the batch."""

from __future__ import annotations

import inspect
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn

from slipstream.model.hooks.token_slice import current_slice

_LENGTH_DEPENDENT = ("dynamic", "longrope")


def fix_length_dependent_rope(model: nn.Module) -> None:
    """Gives every rotary module of type dynamic or longrope the batch's largest position in addition to the slice's.

    A slice below the threshold would otherwise compute other frequencies than the whole sequence does. The extra column
    decides the frequencies and is removed from the output; the slice's columns are computed element by element.
    """
    for module in model.modules():
        rope_type = getattr(module, "rope_type", None)
        types = rope_type.values() if isinstance(rope_type, dict) else [rope_type]
        if any(word in str(each) for each in types for word in _LENGTH_DEPENDENT):
            module.forward = _with_largest_position(module)


def keep_frequencies(model: nn.Module) -> None:
    """Makes rotary modules read no position: on the meta device positions have no values, and only shapes count."""
    for module in model.modules():
        if hasattr(module, "rope_type"):
            module.forward = inspect.unwrap(type(module).forward).__get__(module)


def _with_largest_position(module: nn.Module) -> Any:
    forward = type(module).forward
    signature = inspect.signature(forward)

    @wraps(forward)
    def extended(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(module, *args, **kwargs)
        position_ids = bound.arguments["position_ids"]  # (..., b, T)
        largest = position_ids.new_full((*position_ids.shape[:-1], 1), current_slice().token_slice.max_position)
        bound.arguments["position_ids"] = torch.cat([position_ids, largest], dim=-1)
        tables = forward(*bound.args, **bound.kwargs)  # cos and sin, each (..., b, T + 1, d)
        return _without_last(tables) if isinstance(tables, Tensor) else tuple(map(_without_last, tables))

    return extended


def _without_last(table: Tensor) -> Tensor:
    """Stored in order, as tables are: every layer reads it, and fused kernels take no other."""
    return table[..., :-1, :].contiguous()
