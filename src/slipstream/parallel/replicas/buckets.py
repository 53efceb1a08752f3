"""Buckets: tensors of several parameters in one flat buffer, so that one collective exchanges them all.

A parameter's rows (dim 0; a scalar is one row) are spread over replicas as evenly as possible; where they don't divide,
the first replicas have one more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor, nn

from slipstream.parallel.parameter_share import part_bounds
from slipstream.parallel.rank_group import RankGroup
from slipstream.parallel.staged_collectives import PendingWork

BUCKET_BYTES = 25 * 2**20
NamedParameter = tuple[str, nn.Parameter]
Bucket = list[NamedParameter]


@dataclass(frozen=True)
class PendingReduction:
    """A running collective over the replicas: what it sends and fills, and the parameters of these gradients."""

    bucket: Bucket
    shapes: Iterable[Sequence[int]]  # of their gradients in the result
    sent: Tensor  # kept until the collective ends
    result: Tensor  # the whole sum or, of a scatter, this replica's rows
    work: PendingWork | None

    @classmethod
    def sum(cls, bucket: Bucket, group: RankGroup) -> PendingReduction:
        """Starts to sum the gradients of a bucket, which it takes. Collective."""
        gradients = take_gradients(bucket)
        flat = flatten_tensors(gradients)
        return cls(bucket, [gradient.shape for gradient in gradients], flat, flat, group.start_sum(flat))

    @classmethod
    def scatter(cls, bucket: Bucket, group: RankGroup) -> PendingReduction:
        """Starts to sum the gradients of a bucket, which it takes, each rank's rows for that rank. Collective."""
        gradients = take_gradients(bucket)
        packed = pack_rows(gradients, group.size)
        shapes = shapes_of_rows(gradients, group.rank, group.size)
        return cls(bucket, shapes, packed, *group.start_reduce_scatter(packed))

    def finish(self) -> Iterator[tuple[str, nn.Parameter, Tensor]]:
        """Waits for it, and yields the parameters with their gradients: views of the result."""
        if self.work is not None:
            self.work.wait()
        for (name, parameter), gradient in zip(self.bucket, unflatten_tensors(self.result, self.shapes), strict=True):
            yield name, parameter, gradient


def in_buckets(
    parameters: Iterable[NamedParameter],
    dtype_of: Callable[[nn.Parameter], torch.dtype],
    bucket_bytes: int = BUCKET_BYTES,
) -> list[Bucket]:
    """Returns the parameters in order, those of each dtype in buckets of at most `bucket_bytes`.

    A larger parameter has a bucket for itself.
    """
    buckets: list[Bucket] = []
    filling: dict[torch.dtype, Bucket] = {}
    for name, parameter in parameters:
        dtype = dtype_of(parameter)
        room = bucket_bytes // dtype.itemsize - parameter.numel()
        if dtype not in filling or sum(other.numel() for _, other in filling[dtype]) > room:
            filling[dtype] = []
            buckets.append(filling[dtype])
        filling[dtype].append((name, parameter))
    return buckets


def flatten_tensors(tensors: Sequence[Tensor]) -> Tensor:
    """Returns the tensors in one tensor of one dimension: a new one, or a view of a single one."""
    if len(tensors) == 1:
        return tensors[0].reshape(-1)
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def unflatten_tensors(flat: Tensor, shapes: Iterable[Sequence[int]]) -> list[Tensor]:
    """Returns views of these shapes, one after the other; what is left at the end is padding."""
    views, position = [], 0
    for shape in shapes:
        views.append(flat[position : position + prod(shape)].view(tuple(shape)))
        position += prod(shape)
    return views


def take_gradients(bucket: Bucket) -> list[Tensor]:
    """Moves the gradients of a bucket's parameters out of `.grad` and returns them, zeros where there is none."""
    gradients = []
    for _, parameter in bucket:
        gradient, parameter.grad = parameter.grad, None
        gradients.append(torch.zeros_like(parameter, dtype=parameter.grad_dtype) if gradient is None else gradient)
    return gradients


def add_gradient(parameter: nn.Parameter, gradient: Tensor) -> None:
    """Adds a gradient to the parameter's `.grad`, or makes it that; it takes the tensor over."""
    parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)


def rows_of(tensor: Tensor, owner: int, num_owners: int) -> range:
    """Returns the rows of `tensor` that belong to one of several owners."""
    return range(*part_bounds(tensor.shape[0] if tensor.ndim else 1, num_owners, owner))


def take_rows(tensor: Tensor, rows: range) -> Tensor:
    """Returns a view of these rows; for a scalar itself or, with no rows, nothing."""
    if tensor.ndim:
        return tensor[rows.start : rows.stop]
    return tensor if rows else tensor.reshape(1)[:0]


def pack_rows(tensors: Sequence[Tensor], num_owners: int) -> Tensor:
    """Returns each owner's rows of all tensors in one line, padded with zeros: (num_owners, width)."""
    pieces = [piece for owner in range(num_owners) for piece in _line(tensors, owner, num_owners)]
    return torch.cat(pieces).view(num_owners, sum(piece.numel() for piece in pieces) // num_owners)


def gather_rows(tensors: Sequence[Tensor], data: RankGroup) -> None:
    """Copies every replica's rows to the tensors, which have its own rows already. Collective."""
    mine = torch.cat(_line(tensors, data.rank, data.size))
    for owner, line in enumerate(data.all_gather(mine)):
        pieces = unflatten_tensors(line, shapes_of_rows(tensors, owner, data.size))
        for tensor, piece in zip(tensors, pieces, strict=True):
            take_rows(tensor, rows_of(tensor, owner, data.size)).copy_(piece)


def shapes_of_rows(tensors: Iterable[Tensor], owner: int, num_owners: int) -> list[torch.Size]:
    """Returns the shapes that one owner's rows of each tensor have, by which `unflatten_tensors` undoes `pack_rows`."""
    return [take_rows(tensor, rows_of(tensor, owner, num_owners)).shape for tensor in tensors]


def _line(tensors: Sequence[Tensor], owner: int, num_owners: int) -> list[Tensor]:
    """Returns an owner's rows of every tensor, and zeros up to the first owner's length, which is the largest."""
    first, mine = (
        [take_rows(tensor, rows_of(tensor, each, num_owners)).reshape(-1) for tensor in tensors] for each in (0, owner)
    )
    padding = sum(piece.numel() for piece in first) - sum(piece.numel() for piece in mine)
    return [*mine, tensors[0].new_zeros(padding)]
