"""Rows of a head whose weight embeds too: what they give of a slice's embedding, and the gradient that comes back.

Every token's row lies on one rank. Each rank looks up the tokens whose rows it has, zeros for the others, and the sum
over the ranks is what the whole embedding gives (Yeung et al. 2024, on the input layer). The gradients of head and
embedding add up in the rank's own rows, so that nothing is exchanged at the end of a step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional

from slipstream.model.hooks.token_slice import current_slice
from slipstream.model.model_cutting import EmptyEmbedding
from slipstream.model.saving.weight_gradients import add_rows
from slipstream.model.vocabulary.head_rows import HeadRows


class TiedRows(HeadRows):
    """The rows `ids` of a matrix that is both head and embedding."""

    padding_idx: int | None = None  # the id whose row gets no gradient from lookups

    @classmethod
    def of_both(cls, head: nn.Linear, embedding: nn.Module, ids: Mapping[int, range]) -> dict[int, HeadRows]:
        """Returns the rows next to each stage of this process, copied from the whole matrix."""
        found = cls.of_stages(head, ids)
        for rows in found.values():
            assert isinstance(rows, TiedRows)
            rows.padding_idx = getattr(embedding, "padding_idx", None)
        return found

    @torch.no_grad()
    def look_up(self, ids: Tensor) -> Tensor:
        """Runs E: returns the rows of those of the ids (b, T) that are here, zeros for others; (b, T, hidden)."""
        index, is_here = self._places(ids)
        return functional.embedding(index, self.weight[self._rows]).masked_fill(~is_here[..., None], 0)

    @torch.no_grad()
    def add_lookups(self, ids: Tensor, gradient: Tensor) -> None:
        """Runs EW: adds the gradient (b, T, hidden) of what was looked up for the ids (b, T)."""
        if not self.weight.requires_grad:
            return
        index, is_here = self._places(ids)
        if self.padding_idx is not None:
            is_here = is_here & (ids != self.padding_idx)
        here = gradient.masked_fill(~is_here[..., None], 0)
        add_rows(self.weight, (index + self._rows.start).flatten(), here.flatten(0, 1))


class SpreadEmbedding(EmptyEmbedding):
    """Replaces an embedding whose rows are spread: on the first stage it hands on the sum of what all ranks looked up.

    What the model's own class does after its lookup, such as scaling, it does there too. On a stage next to which this
    rank has its rows, it has their weight, under its name in the unsplit model.
    """

    def __init__(self, original: Any, rows: HeadRows | None, is_first: bool) -> None:
        super().__init__(original, original.embedding_dim, original.weight.dtype, original.weight.device)
        self._is_first = is_first
        if is_first and type(original) is not nn.Embedding:
            del original.weight
            original.register_buffer("weight", self.weight, persistent=False)
            original.padding_idx = None  # an id; of what was looked up, nothing is padding
            self.own = original
        if rows is not None:
            del self.weight
            self.weight = rows.weight

    def forward(self, ids: Tensor | Sequence[int], *args: Any, **kwargs: Any) -> Tensor:
        if not self._is_first:
            shape = ids.shape if isinstance(ids, Tensor) else ids
            return self.weight.new_zeros(()).expand(*shape, self.embedding_dim)
        looked_up = current_slice().hidden
        assert looked_up is not None
        return self.of_looked_up(looked_up)

    def of_looked_up(self, looked_up: Tensor) -> Tensor:
        """Returns what the whole embedding gives, both (b, T, hidden)."""
        if not hasattr(self, "own"):
            return looked_up
        places = torch.arange(looked_up[..., 0].numel(), device=looked_up.device).view(looked_up.shape[:-1])
        found: Tensor = functional_call(self.own, {"weight": looked_up.flatten(0, -2)}, (places,))
        return found
