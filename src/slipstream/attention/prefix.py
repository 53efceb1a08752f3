"""Gives layers that attend by code of their own the keys and values of all tokens so far, and takes their gradients.

Nothing is known of what such code does with them, so it gets copies, which it may keep for its backward.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor

from slipstream.attention.context_store import ContextStore
from slipstream.attention.key_ranges import KeyRanges
from slipstream.autograd_calls import differentiable_once


def read_prefix(
    key: Tensor, value: Tensor, store: ContextStore, call: Hashable, ranges: KeyRanges
) -> tuple[Tensor, Tensor]:
    """Adds a slice's keys and values to the store and returns those of all tokens up to its end.

    Over all slices, the gradients of key and value are those of unsliced attention. Not collective.

    Args:
        key: (B, Hkv, T, D), of the slice [ranges.start, ranges.end) of the sequence.
        value: (B, Hkv, T, Dv).
        store: the microbatch's on this stage.
        call: identifies this attention within the stage, the same for all slices.
        ranges: which keys each query sees. Those before the first that any query sees are zeros.

    Returns:
        (B, Hkv, ranges.end, D) and (B, Hkv, ranges.end, Dv).

    Raises:
        ContextError: the slices ran in an order that doesn't allow this one.
    """
    read: Any = _Prefix.apply
    keys, values = read(key, value, store, call, ranges)
    return keys, values


class _Prefix(torch.autograd.Function):
    """Reads the store after writing it; backward adds to the gradients of all keys it read (rules 2 and 5).

    forward   K, V    |  0  |  1  | [2] |        slice 2 writes its keys and returns 0, 1, 2
    backward  dK, dV  | += 2| += 2| own |        slice 2 adds to 0, 1, 2; then 2 is final and returned
    """

    @staticmethod
    def forward(
        ctx: Any, key: Tensor, value: Tensor, store: ContextStore, call: Hashable, ranges: KeyRanges
    ) -> tuple[Tensor, ...]:
        ctx.store, ctx.call, ctx.ranges = store, call, ranges
        return tuple(_up_to(ranges, buffer) for buffer in store.write(call, key, value, ranges))

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        ranges: KeyRanges = ctx.ranges
        _, _, *buffers = ctx.store.context(ctx.call, ranges)
        for buffer, gradient in zip(buffers, gradients, strict=True):
            buffer[:, :, ranges.first : ranges.end] += gradient[:, :, ranges.first :]
        mine = slice(ranges.start, ranges.end)
        own = [b[:, :, mine].to(g.dtype, copy=True) for b, g in zip(buffers, gradients, strict=True)]
        ctx.store.finish(ctx.call, ranges)
        return *own, None, None, None


def _up_to(ranges: KeyRanges, buffer: Tensor) -> Tensor:
    """Copies what a slice sees of a sequence: buffers change later, and nothing may have been written before that."""
    found = buffer[:, :, : ranges.end].clone(memory_format=torch.contiguous_format)
    found[:, :, : ranges.first] = 0
    return found
