"""Attention by the fused kernels of a GPU: a slice as a whole where its mask is regular, else tile by tile."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from slipstream.attention.backend import (
    AttentionSite,
    KeySums,
    QueryState,
    TiledBackend,
    TileGradients,
    added,
    merge_,
    merged_with,
)
from slipstream.attention.kernel_choice import KERNELS, choose_kernel
from slipstream.attention.kernel_passes import add_gradients
from slipstream.attention.masked_math import MaskedMath
from slipstream.attention.masks import ScoreTile
from slipstream.attention.store import AttentionResult


def fits_kernels(query: Tensor, value: Tensor, site: AttentionSite) -> bool:
    """Returns whether a GPU's kernels take such tensors, with all keys in a query's range and without dropout."""
    is_narrow = query.dtype in (torch.float16, torch.bfloat16) and max(query.shape[-1], value.shape[-1]) <= 256
    return query.device.type == "cuda" and is_narrow and not site.dropout and site.selected is None


class FusedCUDA(TiledBackend):
    """Computes masks that are causal or a window, in every row."""

    # The same as FlexCUDA's, for sequences whose other slices need that backend.
    width_multiple: ClassVar[int | None] = 16

    @classmethod
    def takes(cls, query: Tensor, value: Tensor, site: AttentionSite) -> bool:
        """See `AttentionBackend`."""
        return fits_kernels(query, value, site) and site.softcap is None and not site.ranges.irregular

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, so_far: AttentionResult | None = None
    ) -> AttentionResult:
        """See `AttentionBackend`."""
        mask = self.site.ranges.regular
        if mask is None:
            return super().attend(query, key, value, so_far)
        kernel = choose_kernel(query, key.shape[1], mask)
        return merged_with(so_far, kernel.forward(query, key, value, mask, self.site.scale))

    def differentiate(
        self, queries: QueryState, key: Tensor, value: Tensor, sums: KeySums, so_far: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        """See `AttentionBackend`."""
        mask = self.site.ranges.regular
        if mask is None:
            return super().differentiate(queries, key, value, sums, so_far)
        kernel = choose_kernel(queries.query, key.shape[1], mask)
        grad_query, parts = kernel.backward(queries, key, value, mask, self.site.scale)
        # Where other ranks' queries see the keys too, none is final before those ranks' parts are added.
        num_added = mask.past if self.site.exchange is None else key.shape[2]
        return added(so_far, grad_query), *add_gradients(parts, num_added, *sums)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, tile: ScoreTile) -> None:
        """See `TiledBackend`."""
        found = KERNELS["flash"].forward(query, key, value, tile.regular, self.site.scale)
        merge_((out, lse), found, is_first=tile.has_own)

    def backward(self, queries: QueryState, key: Tensor, value: Tensor, grads: TileGradients, tile: ScoreTile) -> None:
        """See `TiledBackend`."""
        grad_query, parts = KERNELS["flash"].backward(queries, key, value, tile.regular, self.site.scale)
        grads.query.add_(grad_query)
        for part in parts:
            grads.key.add_(part.key)
            grads.value.add_(part.value)


class PartlyFusedCUDA(FusedCUDA):
    """Computes tiles that are neither causal nor a window by the masked math: where FlexAttention doesn't work."""

    @classmethod
    def takes(cls, query: Tensor, value: Tensor, site: AttentionSite) -> bool:
        """See `AttentionBackend`."""
        return fits_kernels(query, value, site) and site.softcap is None

    def forward(self, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, tile: ScoreTile) -> None:
        """See `TiledBackend`."""
        compute = MaskedMath(self.site).forward if tile.irregular else super().forward
        compute(query, key, value, out, lse, tile)

    def backward(self, queries: QueryState, key: Tensor, value: Tensor, grads: TileGradients, tile: ScoreTile) -> None:
        """See `TiledBackend`."""
        compute = MaskedMath(self.site).backward if tile.irregular else super().backward
        compute(queries, key, value, grads, tile)
