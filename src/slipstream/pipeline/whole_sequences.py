"""The sequences of each microbatch, for a loss of whole ones: which one every token is of, and what was given of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from slipstream.errors import SlipstreamError
from slipstream.model import IGNORED
from slipstream.model.hooks import TokenSlice
from slipstream.pipeline.batch import MicrobatchSequences, SplitBatch, WholeBatch
from slipstream.pipeline.pipeline_options import SequenceLoss
from slipstream.pipeline.sequences import Sequences
from slipstream.schedule import SlicedMicrobatch


def check_sequences(loss: SequenceLoss | None, whole: WholeBatch | Sequences) -> None:
    """Raises SlipstreamError where a batch isn't of whole groups of sequences, each with a target that counts."""
    if loss is None:
        refuse_values(whole)
        return
    if whole.document_ids is not None or getattr(whole, "position_ids", None) is not None:
        raise SlipstreamError(
            "document_ids or position_ids with a SequenceLoss, to which a row is a sequence. Leave them out, and give "
            "sequences of different lengths as a list."
        )
    if len(whole.targets) % loss.group_size:
        raise SlipstreamError(
            f"a batch of {len(whole.targets)} sequences with SequenceLoss(group_size={loss.group_size}): give a "
            "multiple of it, the sequences of a group next to each other."
        )
    values = whole.sequence_values
    if values is not None and (values.dim() == 0 or len(values) != len(whole.targets)):
        raise SlipstreamError(
            f"sequence_values are {tuple(values.shape)} for {len(whole.targets)} sequences: give one, or one row, for "
            "each."
        )
    have_any = torch.stack([(targets[1:] != IGNORED).any() for targets in whole.targets]).tolist()
    if not all(have_any):
        raise SlipstreamError(
            f"targets[{have_any.index(False)}] has no label that counts: all are -100 after the first, which nothing "
            "predicts. Leave such sequences out, with those of their group."
        )


def refuse_values(whole: WholeBatch | Sequences) -> None:
    """Raises SlipstreamError where values were given of sequences, and no loss takes them."""
    if whole.sequence_values is not None:
        raise SlipstreamError(
            "sequence_values without a SequenceLoss, whose function takes them. Leave them out, or give "
            "loss_fn=slipstream.SequenceLoss(function)."
        )


def check_groups(loss: SequenceLoss, microbatches: Sequence[SlicedMicrobatch]) -> None:
    """Raises SlipstreamError where a microbatch's rows aren't whole groups."""
    rows = [each.num_sequences for each in microbatches]
    if any(number % loss.group_size for number in rows):
        raise SlipstreamError(
            f"microbatches of {rows} rows with SequenceLoss(group_size={loss.group_size}), whose sequences share a "
            f"microbatch: give batches of a multiple of {len(rows) * loss.group_size} rows, or fewer microbatches."
        )


def grouped_lengths(loss: SequenceLoss | None, lengths: Sequence[int]) -> list[int]:
    """Returns the tokens of each group of sequences, which a step plans as one."""
    size = 1 if loss is None else loss.group_size
    return [sum(lengths[first : first + size]) for first in range(0, len(lengths), size)]


def ungrouped(loss: SequenceLoss | None, groups: Sequence[Sequence[int]]) -> list[list[int]]:
    """Returns the numbers of the sequences in each microbatch, of the numbers of its groups."""
    size = 1 if loss is None else loss.group_size
    return [[number * size + place for number in group for place in range(size)] for group in groups]


def with_sequences(
    batch: SplitBatch, loss: SequenceLoss | None, whole: WholeBatch | Sequences, places: Sequence[slice | list[int]]
) -> SplitBatch:
    """Returns the batch with the sequences of each microbatch, which are at these places of the whole batch; what
    counts are its groups. Without a loss of sequences, returns the batch."""
    if loss is None:
        return batch
    values = whole.sequence_values
    pairs = zip(batch.slices, places, strict=True)
    sequences = [
        MicrobatchSequences(*_numbered(slices), place, None if values is None else values[place])
        for slices, place in pairs
    ]
    return replace(batch, sequences=sequences, num_valid=sum(each.count for each in sequences) // loss.group_size)


def _numbered(slices: Sequence[TokenSlice]) -> tuple[list[Tensor], int]:
    """Returns which sequence each token of a microbatch is of, (b, T) for each slice, and the number of sequences.

    Sequences are its rows, or the documents of its one row.
    """
    first = slices[0]
    if first.document_start is None:
        rows = torch.arange(len(first.input_ids), device=first.input_ids.device)[:, None]
        return [rows.expand_as(each.input_ids) for each in slices], len(rows)
    starts = torch.cat([each.document_start for each in slices if each.document_start is not None], dim=1)
    numbers = torch.zeros_like(starts)
    numbers[:, 1:] = (starts[:, 1:] != starts[:, :-1]).cumsum(1)
    bounds = [each.input_ids.shape[1] for each in slices]
    return list(torch.split(numbers, bounds, dim=1)), int(numbers.max()) + 1
