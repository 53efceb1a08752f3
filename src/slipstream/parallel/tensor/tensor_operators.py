"""The operators that tensor parallelism puts around local linear layers: f, g and others, each another's backward.

PTD-P section 2.3 (figure 5): f is the identity forward and an all-reduce backward, g the reverse. With sequence
parallelism (Korthikanti et al. 2022, figure 5) they become an all-gather and a reduce-scatter over the tokens. Between
them each rank has a different tensor; outside them all ranks have the same tensor and the same whole gradient, unless
the tokens are spread: then each rank has its tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from math import ceil
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from slipstream.parallel.rank_group import RankGroup


def copy_to_ranks(tensor: Tensor, group: RankGroup) -> Tensor:
    """Applies f: what all ranks have is used by each separately; the gradients of these uses are summed. Collective."""
    return _apply(tensor, lambda whole: whole.view_as(whole), lambda gradient: _sum(gradient, group))


def sum_over_ranks(tensor: Tensor, group: RankGroup) -> Tensor:
    """Applies g: returns the sum of the ranks' tensors, on all ranks. Collective."""
    return _apply(tensor, lambda part: _sum(part, group), lambda gradient: gradient)


def gather(tensor: Tensor, group: RankGroup, dim: int, length: int, is_partial: bool = False) -> Tensor:
    """Joins parts along `dim`, `length` in all, to the whole on all ranks; what is beyond it was padding. Collective.

    Backward returns this rank's part of the gradient, where all have the whole one, or, if `is_partial`, of the sum of
    the ranks' gradients (a reduce-scatter: f with sequence parallelism).
    """
    return _apply(
        tensor,
        lambda part: _join(group.all_gather(part), dim, length),
        lambda gradient: _part(gradient, group, dim, is_partial),
    )


def split(tensor: Tensor, group: RankGroup, dim: int, is_partial: bool = False) -> Tensor:
    """Returns this rank's part along `dim`, padded with zeros to equal lengths; backward gathers. Collective.

    It is the part of the tensor that all ranks have or, if `is_partial`, of the sum of the ranks' tensors (a
    reduce-scatter: g with sequence parallelism).
    """
    length = tensor.shape[dim]
    return _apply(
        tensor,
        lambda whole: _part(whole, group, dim, is_partial),
        lambda gradient: _join(group.all_gather(gradient), dim, length),
    )


def part_length(length: int, num_parts: int) -> int:
    """Returns the length of each of `num_parts` equal parts, the last ones padded."""
    return ceil(length / num_parts)


class _Operator(torch.autograd.Function):
    """One function of a tensor forward, another one of its gradient backward."""

    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, forward: Callable[[Tensor], Tensor], backward: Callable[[Tensor], Tensor]
    ) -> Tensor:
        ctx.of_gradient = backward
        return forward(tensor)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return ctx.of_gradient(gradient), None, None


def _apply(tensor: Tensor, forward: Callable[[Tensor], Tensor], backward: Callable[[Tensor], Tensor]) -> Tensor:
    result: Tensor = _Operator.apply(tensor, forward, backward)  # type: ignore[no-untyped-call]
    return result


def _sum(tensor: Tensor, group: RankGroup) -> Tensor:
    """Returns the sum in new memory: a recomputation may have kept the tensor that goes in."""
    return group.sum(tensor.clone(memory_format=torch.contiguous_format))


def _part(tensor: Tensor, group: RankGroup, dim: int, is_partial: bool) -> Tensor:
    """Returns this rank's part along `dim`, in new memory: of the tensor or, if it `is_partial`, of the ranks' sum."""
    parts = _cut(tensor, dim, group.size)
    return group.reduce_scatter(parts) if is_partial else parts[group.rank].clone(memory_format=torch.contiguous_format)


def _cut(tensor: Tensor, dim: int, num_parts: int) -> Tensor:
    """Turns (..., length, ...) into (num_parts, ..., part_length, ...), the end padded with zeros."""
    length = part_length(tensor.shape[dim], num_parts)
    missing = num_parts * length - tensor.shape[dim]
    if missing:
        tensor = functional.pad(tensor, (0, 0) * (tensor.dim() - 1 - dim) + (0, missing))
    return tensor.reshape(*tensor.shape[:dim], num_parts, length, *tensor.shape[dim + 1 :]).movedim(dim, 0)


def _join(parts: Tensor, dim: int, length: int) -> Tensor:
    """Undoes `_cut`, in new memory, since models may change the result in place."""
    return torch.cat([*parts], dim).narrow(dim, 0, length).contiguous()
