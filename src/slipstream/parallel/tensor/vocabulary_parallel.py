"""Embedding and loss where each rank has some rows of the vocabulary: no rank ever has all logits of a token.

PTD-P section 2.3: the parallel cross entropy exchanges (b, T) numbers instead of (b, T, vocabulary) logits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from slipstream.model.adapters import inner_modules
from slipstream.parallel.parameter_share import part_bounds
from slipstream.parallel.rank_group import RankGroup
from slipstream.parallel.tensor.tensor_operators import sum_over_ranks


def vocabulary_cross_entropy(
    group: RankGroup, first_id: int, ignore_index: int
) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Returns the loss of logits (b, T, V_local), of ids first_id to first_id + V_local, and targets (b, T).

    The loss returns (sum over tokens, number of valid tokens), the same on every rank, in float32 or wider; targets
    equal to `ignore_index` don't count. Forward all-reduces each token's largest logit, then the sum of exponentials
    with the target's logit; backward is local. Calling it is collective over the group.
    """

    losses = vocabulary_token_losses(group, first_id, ignore_index)

    def loss(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        return losses(logits, targets).sum(), (targets != ignore_index).sum()

    return loss


def vocabulary_token_losses(group: RankGroup, first_id: int, ignore_index: int) -> Callable[[Tensor, Tensor], Tensor]:
    """Returns what `vocabulary_cross_entropy` sums up: the loss of each token, (b, T), zero where none counts."""

    def losses(logits: Tensor, targets: Tensor) -> Tensor:
        each: Tensor = _CrossEntropy.apply(logits, targets, group, first_id, ignore_index)  # type: ignore[no-untyped-call]
        return each

    return losses


def gather_vocabulary(logits: Tensor, group: RankGroup, num_ids: int) -> Tensor:
    """Returns the logits of all ids, (b, T, num_ids), of those of this rank's rows, (b, T, V_local). Collective."""
    bounds = [part_bounds(num_ids, group.size, rank) for rank in range(group.size)]
    sizes = [stop - start for start, stop in bounds]
    parts = group.all_gather(functional.pad(logits, (0, max(sizes) - logits.shape[-1])))
    return torch.cat([part[..., :size] for part, size in zip(parts, sizes, strict=True)], dim=-1)


class _CrossEntropy(torch.autograd.Function):
    """Of each token log(sum_v exp(logit_v)) - logit_target."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, group: RankGroup, first_id: int, ignore_index: int
    ) -> Tensor:
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        shifted = wide - group.max(wide.amax(-1))[..., None]  # (b, T, V_local)
        is_valid = targets != ignore_index  # (b, T)
        index = targets - first_id
        is_here = is_valid & (index >= 0) & (index < logits.shape[-1])
        index = index.masked_fill(~is_here, 0)[..., None]  # (b, T, 1)
        chosen = shifted.gather(-1, index).squeeze(-1).masked_fill(~is_here, 0)
        exponentials = shifted.exp_()
        denominator, chosen = group.sum(torch.stack([exponentials.sum(-1), chosen]))
        probabilities = exponentials.div_(denominator[..., None])
        ctx.save_for_backward(probabilities, index, is_here, is_valid)
        ctx.dtype = logits.dtype
        each: Tensor = (denominator.log() - chosen).masked_fill(~is_valid, 0)
        return each

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None]:
        probabilities, index, is_here, is_valid = ctx.saved_tensors
        of_logits = probabilities * (gradient * is_valid)[..., None]
        of_logits.scatter_add_(-1, index, -(gradient * is_here)[..., None])
        return of_logits.to(ctx.dtype), None, None, None, None


class VocabularyEmbedding:
    """Hooks for an nn.Embedding of which this rank has the rows from `first_id` on: other ids give zeros, then g.

    Unless `is_read`, its output stays without g: a last stage has a tied embedding for its head alone.
    """

    def __init__(self, group: RankGroup, first_id: int, is_read: bool) -> None:
        self._group = group
        self._first_id = first_id
        self._is_read = is_read
        self._num_ids = 0  # that are here
        self._is_elsewhere: Tensor | None = None  # (b, T), set between the two hooks

    def install(self, module: nn.Module) -> None:
        """Installs the hooks on a module whose weight is already this rank's share, or on one with an adapter or a
        trained copy around it."""
        for inner in inner_modules(module):
            self._adjust(inner)
        module.register_forward_pre_hook(self._before)
        module.register_forward_hook(self._after)

    def _adjust(self, module: nn.Module) -> None:
        assert isinstance(module, nn.Embedding)
        if module.padding_idx is not None:
            padding = module.padding_idx - self._first_id
            module.padding_idx = padding if 0 <= padding < len(module.weight) else None
        module.num_embeddings = self._num_ids = len(module.weight)

    def _before(self, _module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        index = args[0] - self._first_id
        self._is_elsewhere = (index < 0) | (index >= self._num_ids)
        return (index.masked_fill(self._is_elsewhere, 0), *args[1:])

    def _after(self, _module: nn.Module, _args: Any, output: Tensor) -> Tensor:
        assert self._is_elsewhere is not None
        found, self._is_elsewhere = output.masked_fill(self._is_elsewhere[..., None], 0), None
        return sum_over_ranks(found, self._group) if self._is_read else found
