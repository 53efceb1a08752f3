"""The outputs of tokens, put together from slices and microbatches as the batch had them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from slipstream.parallel import RankGroup
from slipstream.pipeline.batch import SplitBatch

TokenRows = Tensor | list[Tensor]  # (batch, sequence, ...), or of every sequence (T, ...)


@dataclass(frozen=True)
class RowPlaces:
    """Where a batch's tokens are: in microbatches of rows next to each other, or each a row of sequences."""

    groups: Sequence[Sequence[int]] = ()  # the sequences in each microbatch's row
    lengths: Sequence[int] = ()  # of each sequence, by its number

    def joined(self, outputs: Mapping[tuple[int, int], Tensor], batch: SplitBatch) -> TokenRows:
        """Returns the outputs by row or by sequence, of those of each (microbatch, slice), (b, T, ...)."""
        counts = map(len, batch.slices)
        rows = [torch.cat([outputs[m, i] for i in range(count)], dim=1) for m, count in enumerate(counts)]
        if not self.groups:
            return torch.cat(rows)
        cut: dict[int, Tensor] = {}
        for (row,), group in zip(rows, self.groups, strict=True):
            cut.update(zip(group, torch.split(row, [self.lengths[number] for number in group]), strict=True))
        return [cut[number] for number in range(len(cut))]


def sum_over_stages(
    outputs: Mapping[tuple[int, int], Tensor], batch: SplitBatch, pipeline: RankGroup
) -> dict[tuple[int, int], Tensor]:
    """Returns on every rank what the last stage's kept of each slice, (b, T) float64. Collective over the pipeline."""
    targets = {(m, i): each for m, row in enumerate(batch.targets) for i, each in enumerate(row)}
    mine = [outputs.get(key, each.new_zeros(each.shape, dtype=torch.float64)) for key, each in targets.items()]
    whole = pipeline.sum(torch.cat([each.flatten() for each in mine]))
    parts = torch.split(whole, [each.numel() for each in mine])
    return {key: part.view_as(each) for (key, each), part in zip(targets.items(), parts, strict=True)}


def aligned_with_labels(rows: TokenRows) -> TokenRows:
    """Returns what tokens say of the labels after them at these labels' places; zero at the first."""
    if isinstance(rows, Tensor):
        return functional.pad(rows[..., :-1], (1, 0))
    return [functional.pad(row[:-1], (1, 0)) for row in rows]
