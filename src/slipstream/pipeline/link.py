"""What travels between stages where several ranks share each layer: from each its part (PTD-P 4.1, scatter/gather)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from slipstream.parallel.group import Group


class Link:
    """A stage's tensor-parallel ranks have the same output, so each sends 1/t of it, and the receivers gather:

        stage g    rank 0 [a b]  -- a -->  rank 0 [a b]    stage g + 1
                   rank 1 [a b]  -- b -->  rank 1 [a b]

    With sequence parallelism each rank has other tokens: it sends what it has, and nothing is gathered.
    """

    def __init__(self, tensor: Group, is_spread: bool = False) -> None:
        self._tensor = tensor
        self.gathers = tensor.size > 1 and not is_spread

    def shape(self, whole: torch.Size) -> torch.Size:
        """Of a message, given what a stage's rank has."""
        return torch.Size([self._length(whole)]) if self.gathers else whole

    def part(self, whole: Tensor) -> Tensor:
        """What this rank sends: (n,) of (b, T, hidden), n = b T hidden / t."""
        if not self.gathers:
            return whole
        length, flat = self._length(whole.shape), whole.detach().reshape(-1)
        flat = functional.pad(flat, (0, length * self._tensor.size - flat.numel()))
        return flat.narrow(0, self._tensor.rank * length, length)

    def whole(self, part: Tensor, shape: torch.Size) -> Tensor:
        """Collective over the tensor axis: what the stage before sent, from what its ranks sent of it."""
        if not self.gathers:
            return part
        return self._tensor.all_gather(part).view(-1)[: shape.numel()].view(shape)

    def _length(self, whole: torch.Size) -> int:
        return -(-whole.numel() // self._tensor.size)
