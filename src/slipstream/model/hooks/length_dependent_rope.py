"""Makes rotary tables exact for a slice where their frequencies depend on the longest position of the batch."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn

from slipstream.model.hooks.token_slice import current_slice

_LENGTH_DEPENDENT = ("dynamic", "longrope")
_State = tuple[dict[str, Any], dict[str, Tensor | None]]


def fix_length_dependent_rope(model: nn.Module) -> None:
    """Gives every rotary module of type dynamic or longrope the largest position that the unsplit model would see, in
    addition to the slice's.

    A slice below the threshold would otherwise compute other frequencies than the whole sequence does. The extra column
    decides the frequencies and is removed from the output; the slice's columns are computed element by element.
    """
    for module in _length_dependent(model):
        module.forward = _with_largest_position(module)


@contextmanager
def kept_frequencies(model: nn.Module) -> Iterator[None]:
    """Undoes the changes of frequencies by forwards outside of steps: type dynamic keeps those of the longest sequence
    so far, until a short one comes."""
    before = [(module, _state(module)) for module in _length_dependent(model)]
    try:
        yield
    finally:
        for module, state in before:
            _restore(module, state)


def keep_frequencies(model: nn.Module) -> None:
    """Makes rotary modules read no position: on the meta device positions have no values, and only shapes count."""
    for module in model.modules():
        if hasattr(module, "rope_type"):
            module.forward = inspect.unwrap(type(module).forward).__get__(module)


def _length_dependent(model: nn.Module) -> Iterator[nn.Module]:
    for module in model.modules():
        rope_type = getattr(module, "rope_type", None)
        types = rope_type.values() if isinstance(rope_type, dict) else [rope_type]
        if any(word in str(rope_type) for rope_type in types for word in _LENGTH_DEPENDENT):
            yield module


def _with_largest_position(module: nn.Module) -> Any:
    forward = module.forward  # the instance's own forward, if it has one
    signature = inspect.signature(forward)
    first: list[_State] = []  # the module's before its first forward

    def tables_of(call: inspect.BoundArguments, position_ids: Tensor, largest: int) -> Any:
        column = position_ids.new_full((*position_ids.shape[:-1], 1), largest)
        call.arguments["position_ids"] = torch.cat([position_ids, column], dim=-1)
        tables = forward(*call.args, **call.kwargs)  # cos and sin, each (..., b, T + 1, d)
        return _without_last(tables) if isinstance(tables, Tensor) else tuple(map(_without_last, tables))

    @wraps(forward)
    def extended(*args: Any, **kwargs: Any) -> Any:
        call = signature.bind(*args, **kwargs)
        tokens = current_slice().token_slice
        position_ids = call.arguments["position_ids"]  # (..., b, T)
        if not first:
            first.append(_state(module))
        if not tokens.lone_sequences:
            return tables_of(call, position_ids, tokens.max_position)
        pieces = position_ids.split([num_tokens for num_tokens, _ in tokens.lone_sequences], dim=-1)
        tables = []
        with kept_frequencies(module):
            for piece, (_, largest) in zip(pieces, tokens.lone_sequences, strict=True):
                _restore(module, first[0])
                tables.append(tables_of(call, piece, largest))
        if isinstance(tables[0], Tensor):
            return torch.cat(tables, dim=-2)
        return tuple(torch.cat(parts, dim=-2) for parts in zip(*tables, strict=True))

    return extended


def _without_last(table: Tensor) -> Tensor:
    # Stored in order, as tables are: every layer reads it, and fused kernels take no other.
    return table[..., :-1, :].contiguous()


def _state(module: nn.Module) -> _State:
    """Returns the values that a rotary module keeps from one forward to the next: numbers, tensors and buffers."""
    values = {name: value for name, value in vars(module).items() if isinstance(value, int | float | Tensor)}
    values.pop("training", None)
    return values, dict(module._buffers)


def _restore(module: nn.Module, state: _State) -> None:
    attributes, buffers = state
    for name in _state(module)[0].keys() - attributes.keys():
        delattr(module, name)
    vars(module).update(attributes)
    module._buffers.update(buffers)
