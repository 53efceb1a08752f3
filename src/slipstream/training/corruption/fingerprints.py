"""Numbers by which two copies of a tensor are compared, and who differs from whom."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from slipstream.checkpoint import TensorShard

_BLOCK = 2**24  # elements of a tensor on a GPU that are widened at a time


class Difference(NamedTuple):
    """A tensor of which ranks hold different copies. `wrong` has those that differ from the majority, and is empty
    where there is none; `right` is a rank of the majority."""

    place: str
    holders: tuple[int, ...]
    wrong: tuple[int, ...]
    right: int


def fingerprint(tensor: Tensor) -> int:
    """Returns a number of the tensor's bits: another one wherever a single bit differs, and mostly where more do."""
    flat = tensor.detach().contiguous().view(-1)
    if not flat.numel():
        return 0
    if not flat.is_cuda:
        return zlib.crc32(flat.view(torch.uint8).numpy().data)
    # A sum of integers in which every bit has its weight; the products tell elements that changed places.
    words = flat.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for start in range(0, words.numel(), _BLOCK):
        part = words[start : start + _BLOCK].long()
        total += (part * (2 * torch.arange(start, start + len(part), device=flat.device) + 1)).sum()
    return int(total)


def place_of(shard: TensorShard) -> str:
    """Returns which elements of which tensor a shard has: the same text on all ranks that have the same."""
    rows = f"rows {shard.first_row}-{shard.first_row + (shard.tensor.shape[0] if shard.tensor.dim() else 1) - 1}"
    cut = "" if shard.share.is_whole else f" of the part {list(shard.share.ranges)} along dim {shard.share.dim}"
    return f"{shard.key} ({rows}{cut})"


def find_differences(found: Sequence[Mapping[str, int]]) -> list[Difference]:
    """Returns the tensors whose copies differ, from the fingerprints by place of every rank."""
    differences = []
    for place in dict.fromkeys(name for each in found for name in each):
        values = {rank: each[place] for rank, each in enumerate(found) if place in each}
        (value, number), *others = Counter(values.values()).most_common()
        if others:
            is_majority = 2 * number > len(values)
            right = [rank for rank, each in values.items() if each == value]
            wrong = tuple(rank for rank in values if rank not in right) if is_majority else ()
            differences.append(Difference(place, tuple(values), wrong, right[0]))
    return differences


def lone_places(places: Iterable[Sequence[str]]) -> set[str]:
    """Returns the places that one rank alone holds, from those of every rank."""
    counts = Counter(place for each in places for place in each)
    return {place for place, count in counts.items() if count == 1}
