"""What checkpoint tests save and load: tensors over a mesh at random, in packed ranges, rows of replicas, copies."""

from __future__ import annotations

import random

import torch
from torch import Tensor

from slipstream.checkpoint import TensorShard
from slipstream.parallel import ParameterShare

SHAPES: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
    "embedding": ((61, 8), torch.float32),
    "packed": ((24, 8), torch.bfloat16),
    "experts": ((4, 6, 10), torch.float16),
    "bias": ((24,), torch.float64),
    "one row": ((1, 13), torch.float32),
    "steps": ((), torch.float32),
    "random state": ((37,), torch.uint8),
    "ids": ((5, 3), torch.int64),
    "nothing": ((0, 4), torch.float32),
}


def tensors(seed: int) -> dict[str, Tensor]:
    """Whole tensors of random bits, denormal numbers and negative zeros among them, but none that isn't finite."""
    generator = torch.Generator().manual_seed(seed)
    made = {}
    for name, (shape, dtype) in SHAPES.items():
        size = torch.empty(shape, dtype=dtype).nbytes
        bits = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator)
        value = bits.view(dtype).view(shape)
        made[name] = torch.where(value.isfinite(), value, torch.zeros_like(value))
    return made


def layout(seed: int, whole: dict[str, Tensor], tensor_ranks: int, data_ranks: int) -> list[list[TensorShard]]:
    """The pieces of each of tensor_ranks x data_ranks ranks, which together write each element once."""
    rng = random.Random(seed)
    ranks: list[list[TensorShard]] = [[] for _ in range(tensor_ranks * data_ranks)]
    for name, tensor in whole.items():
        for index, share in enumerate(shares(rng, tuple(tensor.shape), tensor_ranks)):
            mine = share.take(tensor)
            replicas = range(index * data_ranks, (index + 1) * data_ranks)
            if mine.ndim and rng.random() < 0.5:  # each replica has some of the rows
                position = 0
                for rank, rows in zip(replicas, mine.tensor_split(data_ranks), strict=True):
                    ranks[rank].append(TensorShard(name, share, rows.clone(), position, writes=share.copy == 0))
                    position += len(rows)
            else:  # each has all of it
                writer = rng.choice(replicas)
                for rank in replicas:
                    ranks[rank].append(
                        TensorShard(name, share, mine.clone(), writes=share.copy == 0 and rank == writer)
                    )
    return ranks


def shares(rng: random.Random, shape: tuple[int, ...], tensor_ranks: int) -> list[ParameterShare]:
    """Of each rank: the same of all, or several ranges of one dim, cut and dealt at random."""
    if not shape or 0 in shape or rng.random() < 0.2:
        return [ParameterShare.whole(shape, copy) for copy in range(tensor_ranks)]
    dim = rng.randrange(len(shape))
    cuts = sorted(rng.sample(range(1, shape[dim]), min(shape[dim] - 1, 2 * tensor_ranks)))
    ranges = list(zip([0, *cuts], [*cuts, shape[dim]], strict=True))
    owners = [rng.randrange(tensor_ranks) for _ in ranges]
    dealt = [
        tuple(part for part, owner in zip(ranges, owners, strict=True) if owner == rank) or ((0, 0),)
        for rank in range(tensor_ranks)
    ]
    return [ParameterShare(shape, dim, parts) for parts in dealt]


def emptied(pieces: list[TensorShard]) -> list[TensorShard]:
    """The same places with other values."""
    return [
        TensorShard(piece.key, piece.share, torch.full_like(piece.tensor, 77), piece.first_row, not piece.writes)
        for piece in pieces
    ]


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Also where they aren't numbers."""
    return one.dtype == other.dtype and one.shape == other.shape and bits(one).equal(bits(other))


def bits(tensor: Tensor) -> Tensor:
    """Its bytes."""
    return tensor.contiguous().view(-1).view(torch.uint8)
