"""Embeddings tied across stages: one weight, two gradients, added in one fixed order (rule 11)."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from slipstream.model.stage import Stage, TiedWeight


class TiedGradients:
    """Around a step: `begin` sets earlier gradients aside, `end` adds embedding's and head's, on both ranks.

    Both ranks then hold the same gradient under the canonical name, so equal optimizers keep the copies equal.
    """

    def __init__(self, stages: list[Stage], ends: list[int]) -> None:
        """Collective. `ends` are the global ranks of the first and the last stage, equal where one rank has both."""
        self._embeddings = {t.name: t for stage in stages if stage.is_first for t in stage.tied}
        self._heads = {t.name: t for stage in stages if stage.is_last for t in stage.tied}
        self._group = dist.new_group(ends) if ends[0] != ends[-1] else None
        self._earlier: dict[str, Tensor | None] = {}

    @property
    def copies(self) -> set[int]:
        """The ids of parameters whose weight another rank counts."""
        return {id(tied.parameter) for name, tied in self._heads.items() if name not in self._embeddings}

    def begin(self) -> None:
        for name, tied in self._all().items():
            self._earlier[name] = tied.parameter.grad
            tied.parameter.grad = None
            if tied.head is not None:
                tied.head.grad = None  # of a step that failed

    def end(self) -> None:
        for name, tied in self._all().items():
            if tied.parameter.requires_grad:
                total, earlier = self._total(name), self._earlier.pop(name)
                tied.parameter.grad = total if earlier is None else earlier + total

    def _all(self) -> dict[str, TiedWeight]:
        return self._embeddings | self._heads

    def _total(self, name: str) -> Tensor:
        """Embedding's gradient plus head's: a sum of two, the same to the bit wherever it is formed."""
        parts = []
        if name in self._embeddings:
            parts.append(self._embeddings[name].parameter.grad)
        if name in self._heads:
            head = self._heads[name].head
            assert head is not None
            parts.append(head.grad)
            head.grad = None
        present = [part for part in parts if part is not None]
        total = sum(present[1:], present[0]) if present else torch.zeros_like(self._all()[name].parameter)
        if self._group is not None:
            dist.all_reduce(total, group=self._group)
        return total
