"""Embeddings tied across stages: one weight, two gradients, added in one fixed order (rule 11)."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from slipstream.model import TiedWeight
from slipstream.pipeline.ranks import Ranks
from slipstream.pipeline.stage import Stage


class TiedGradients:
    """The gradients of a tied embedding: after a step `totals` adds embedding's and head's, on both ranks.

    Both ranks then hold the same gradient under the canonical name, so equal optimizers keep the copies equal.
    """

    def __init__(self, stages: list[Stage], ranks: Ranks, ends: tuple[int, int]) -> None:
        """Collective. `ends` are the pipeline's ranks of the first and the last stage, equal where one has both."""
        self._embeddings = {t.name: t for stage in stages if stage.is_first for t in stage.tied}
        self._heads = {t.name: t for stage in stages if stage.is_last for t in stage.tied}
        self._group = ranks.connect(ends) if ends[0] != ends[1] else None

    @property
    def names(self) -> set[str]:
        """The names of the tied weights that this rank holds."""
        return set(self._all())

    @property
    def copies(self) -> set[str]:
        """The names of weights that another rank counts."""
        return set(self._heads) - set(self._embeddings)

    def totals(self) -> Iterator[tuple[str, Tensor]]:
        """Collective: each trained weight's embedding's gradient plus its head's."""
        for name, tied in self._all().items():
            if tied.parameter.requires_grad:
                yield name, self._total(name)

    def _all(self) -> dict[str, TiedWeight]:
        return self._embeddings | self._heads

    def _total(self, name: str) -> Tensor:
        """A sum of two, the same to the bit wherever it is formed."""
        parts = []
        if name in self._embeddings:
            parts.append(_taken(self._embeddings[name].parameter))
        if name in self._heads:
            head = self._heads[name].head
            assert head is not None
            parts.append(_taken(head))
        present = [part for part in parts if part is not None]
        tied = self._all()[name]
        wide = (tied.head if tied.head is not None else tied.parameter).grad_dtype
        total = sum(present[1:], present[0]) if present else torch.zeros_like(tied.parameter, dtype=wide)
        if self._group is not None:
            dist.all_reduce(total, group=self._group)
        return total


def _taken(parameter: torch.nn.Parameter) -> Tensor | None:
    gradient, parameter.grad = parameter.grad, None
    return gradient
