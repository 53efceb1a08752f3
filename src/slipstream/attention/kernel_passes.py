"""Passes around the attention kernels of a GPU: merges of two parts, and sums of the gradients of keys.

Each is a pass over as much memory as a kernel reads, so it counts where slices are short. Compiled, it reads and writes
every number once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from typing import NamedTuple

import torch
from torch import Tensor

_log = logging.getLogger(__name__)


class KeyGradients(NamedTuple):
    """The gradients of some of the keys and values that a kernel was given, in their dtype."""

    first: int  # first of the keys
    key: Tensor  # (B,Hkv,n,D), or (G,Hkv,n,D): one row's, of each of G query heads by itself
    value: Tensor


def add_gradients(parts: list[KeyGradients], past: int, *totals: Tensor) -> list[Tensor]:
    """Adds the gradients of earlier slices' keys and values to the totals of both; returns the slice's own, complete.

    Totals (B,Hkv,S,D) are in float32 or in the gradients' dtype, with `past` keys of earlier slices. A slice's own are
    final with later slices' parts, and are rounded as they are added: one pass where adding and copying took two.
    """
    gradients = []
    for index, total in enumerate(totals):
        for part in parts:
            gradient = (part.key, part.value)[index]
            end = part.first + gradient.shape[2]
            earlier = past - part.first
            passes = _PLAIN if len(gradient) == len(total) else _passes(total.device)
            if earlier > 0:
                passes.add(total[:, :, part.first : min(past, end)], gradient[:, :, :earlier])
            if end > past:
                gradients.append(passes.finish(total[:, :, past:], gradient[:, :, max(0, earlier) :]))
    return gradients


def merged(output: Tensor, logsumexp: Tensor, other: Tensor, other_logsumexp: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the attention over two disjoint sets of keys, in the outputs' dtype but summed in that of the
    log-sum-exps; in place of the first output."""
    return _passes(output.device).merge(output, logsumexp, other, other_logsumexp)


def _merge(output: Tensor, logsumexp: Tensor, other: Tensor, other_logsumexp: Tensor) -> tuple[Tensor, Tensor]:
    """Merges two parts; uncompiled in three passes over memory."""
    weight = torch.sigmoid(other_logsumexp - logsumexp)  # e^(lse2 - lse), (B,H,T)
    # The weights get the outputs' layout in memory.
    weight = weight.transpose(1, 2).contiguous().transpose(1, 2)[..., None]
    total = output * (1 - weight)
    torch.addcmul(total, other, weight, out=output)
    return output, torch.logaddexp(logsumexp, other_logsumexp)


def _add(total: Tensor, gradient: Tensor) -> None:
    total.add_(_summed(gradient, total))


def _finish(total: Tensor, gradient: Tensor) -> Tensor:
    """Returns the sum, rounded once, in memory as models have it."""
    batch, heads, length, width = total.shape
    rounded = gradient.new_empty(batch, length, heads, width).transpose(1, 2)
    torch.add(total, _summed(gradient, total), out=rounded)
    return rounded


def _summed(gradient: Tensor, total: Tensor) -> Tensor:
    wide = torch.promote_types(total.dtype, torch.float32)
    return gradient if len(gradient) == len(total) else gradient.sum(0, keepdim=True, dtype=wide)


class _Passes(NamedTuple):
    """Passes around the kernels of a GPU: each reads and writes all numbers once, where it is compiled."""

    merge: Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
    add: Callable[[Tensor, Tensor], None]
    finish: Callable[[Tensor, Tensor], Tensor]


_PLAIN = _Passes(_merge, _add, _finish)


@cache
def _passes(device: torch.device) -> _Passes:
    """Returns the passes compiled, where that can be done and agrees on small tensors with them uncompiled."""
    if device.type != "cuda" or find_spec("triton") is None:
        return _PLAIN
    compiled = _Passes(*(torch.compile(function, dynamic=True) for function in _PLAIN))  # type: ignore[arg-type]
    try:
        pairs = zip(_tried(compiled, device), _tried(_PLAIN, device), strict=True)
        if all(torch.allclose(a, b, rtol=0.02, atol=0.02) for a, b in pairs):
            return compiled
        problem = "they differ"
    # A compiler may raise anything.
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
    _log.info("what surrounds attention kernels isn't compiled on %s: %s", device, problem)
    return _PLAIN


@torch.no_grad()
def _tried(passes: _Passes, device: torch.device) -> list[Tensor]:
    """Returns the passes' results on small random tensors."""
    generator = torch.Generator(device).manual_seed(0)

    def draw(*size: int) -> Tensor:
        return torch.randn(*size, device=device, generator=generator)

    output, other, gradient = (draw(rows, 24, 6, 16).bfloat16().transpose(1, 2) for rows in (1, 1, 3))
    logsumexp, other_logsumexp = draw(2, 1, 6, 24)
    total = draw(1, 40, 6, 16).transpose(1, 2)
    gradients = passes.finish(total[:, :, 16:], gradient)
    passes.add(total[:, :, :24], gradient)
    return [gradients, total, *passes.merge(output, logsumexp, other, other_logsumexp)]
