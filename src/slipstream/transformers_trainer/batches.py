"""Batches as a Pipeline takes them, and what the last stage knows of them on every rank."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from slipstream.model import IGNORED
from slipstream.pipeline import Pipeline


def with_rows(batch: Mapping[str, Any], num_rows: int) -> Mapping[str, Any]:
    """Returns the batch with at least `num_rows` rows, one for each microbatch: the last of a data set may have fewer.

    Rows that are added have no label that counts, and so no part in the loss or in a gradient.
    """
    rows = len(batch["input_ids"]) if isinstance(batch.get("input_ids"), Tensor) else num_rows
    if rows >= num_rows:
        return batch
    more = {key: value[:1].repeat(num_rows - rows, *[1] * (value.dim() - 1)) for key, value in batch.items()}
    if "labels" in more:
        more["labels"] = torch.full_like(more["labels"], IGNORED)
    return {key: torch.cat([value, more[key]]) for key, value in batch.items()}


def replicated_logits(pipe: Pipeline, batch: Mapping[str, Any]) -> Tensor:
    """Returns the logits of a batch's tokens, (batch, sequence, vocabulary), on every rank. Collective."""
    logits = pipe.logits(batch)
    assert not isinstance(logits, list)  # a batch is one tensor
    ranks = pipe.axes["pp"]
    form = next(filter(None, ranks.gather(None if logits is None else (tuple(logits.shape), logits.dtype))))
    return ranks.sum(torch.zeros(form[0], dtype=form[1], device=pipe.device) if logits is None else logits)
