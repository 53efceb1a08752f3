"""The operators that tensor parallelism puts around local linear layers: f, g and others, each another's backward.

PTD-P section 2.3 (figure 5): f is the identity forward and an all-reduce backward, g the reverse. With sequence
parallelism (Korthikanti et al. 2022, figure 5) they become an all-gather and a reduce-scatter over the tokens. Between
them each rank has a different tensor; outside them all ranks have the same tensor and the same whole gradient, unless
the tokens are spread: then each rank has its tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from slipstream.parallel.rank_group import RankGroup


def copy_to_ranks(tensor: Tensor, group: RankGroup) -> Tensor:
    """Applies f: what all ranks have is used by each separately; the gradients of these uses are summed. Collective."""
    copied: Tensor = _Copy.apply(tensor, group)  # type: ignore[no-untyped-call]
    return copied


def sum_over_ranks(tensor: Tensor, group: RankGroup) -> Tensor:
    """Applies g: returns the sum of the ranks' tensors, on all ranks. Collective."""
    total: Tensor = _Sum.apply(tensor, group)  # type: ignore[no-untyped-call]
    return total


def gather(tensor: Tensor, group: RankGroup, dim: int, length: int, is_partial: bool = False) -> Tensor:
    """Joins parts along `dim`, `length` in all, to the whole on all ranks; what is beyond it was padding. Collective.

    Backward returns this rank's part of the gradient, where all have the whole one, or, if `is_partial`, of the sum of
    the ranks' gradients (a reduce-scatter: f with sequence parallelism).
    """
    whole: Tensor = _Gather.apply(tensor, group, dim, length, is_partial)  # type: ignore[no-untyped-call]
    return whole


def split(tensor: Tensor, group: RankGroup, dim: int) -> Tensor:
    """Returns this rank's part along `dim`, padded with zeros to equal lengths; backward gathers. Collective."""
    part: Tensor = _Split.apply(tensor, group, dim)  # type: ignore[no-untyped-call]
    return part


def sum_and_split(tensor: Tensor, group: RankGroup, dim: int) -> Tensor:
    """Applies g with sequence parallelism: returns this rank's part along `dim` of the ranks' sum; backward gathers."""
    part: Tensor = _SumAndSplit.apply(tensor, group, dim)  # type: ignore[no-untyped-call]
    return part


def part_length(length: int, num_parts: int) -> int:
    """Returns the length of each of `num_parts` equal parts, the last ones padded."""
    return ceil(length / num_parts)


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: RankGroup) -> Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _sum(gradient, ctx.group), None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: RankGroup) -> Tensor:
        return _sum(tensor, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: RankGroup, dim: int, length: int, is_partial: bool) -> Tensor:
        ctx.group, ctx.dim, ctx.is_partial = group, dim, is_partial
        return _join(group.all_gather(tensor), dim, length)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        parts = _cut(gradient, ctx.dim, ctx.group.size)
        mine = ctx.group.reduce_scatter(parts) if ctx.is_partial else parts[ctx.group.rank].contiguous()
        return mine, None, None, None, None


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: RankGroup, dim: int) -> Tensor:
        ctx.group, ctx.dim, ctx.length = group, dim, tensor.shape[dim]
        return _cut(tensor, dim, group.size)[group.rank].clone(memory_format=torch.contiguous_format)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return _join(ctx.group.all_gather(gradient), ctx.dim, ctx.length), None, None


class _SumAndSplit(_Split):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: RankGroup, dim: int) -> Tensor:
        ctx.group, ctx.dim, ctx.length = group, dim, tensor.shape[dim]
        return group.reduce_scatter(_cut(tensor, dim, group.size))


def _sum(tensor: Tensor, group: RankGroup) -> Tensor:
    """Returns the sum in new memory: a recomputation may have kept the tensor that goes in."""
    return group.sum(tensor.clone(memory_format=torch.contiguous_format))


def _cut(tensor: Tensor, dim: int, num_parts: int) -> Tensor:
    """Turns (..., length, ...) into (num_parts, ..., part_length, ...), the end padded with zeros."""
    length = part_length(tensor.shape[dim], num_parts)
    missing = num_parts * length - tensor.shape[dim]
    if missing:
        padding = tensor.new_zeros((*tensor.shape[:dim], missing, *tensor.shape[dim + 1 :]))
        tensor = torch.cat([tensor, padding], dim)
    shape = (*tensor.shape[:dim], num_parts, length, *tensor.shape[dim + 1 :])
    return tensor.reshape(shape).movedim(dim, 0)


def _join(parts: Tensor, dim: int, length: int) -> Tensor:
    """Undoes `_cut`, in new memory, since models may change the result in place."""
    each = parts.shape[dim + 1]
    lengths: Sequence[int] = [min(each, max(0, length - index * each)) for index in range(len(parts))]
    return torch.cat([part.narrow(dim, 0, n) for part, n in zip(parts, lengths, strict=True)], dim)
